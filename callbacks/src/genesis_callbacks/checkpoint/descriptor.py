"""Descriptors for locks that only their own process holds, and none of its children.

A lock by `flock` belongs to the open file, and a forked child gets a copy of the descriptor: a data loader's worker
that outlives its trainer by seconds would keep the run's directory locked. So forked children close their copies
immediately; a program that is started by `exec` never gets a copy.

POSIX record locks (`fcntl.lockf`) are not inherited, but a process loses one as soon as it closes *any* descriptor of
the file: a callback that copies or uploads the run's directory would silently release the lock.
"""

import contextlib
import functools
import os
import threading
from pathlib import Path
from weakref import WeakSet

_OPEN: "WeakSet[PrivateDescriptor]" = WeakSet()
_FORK_WAIT_SECONDS = 1.0


class _Opening(threading.local):
    """Keeps a fork out while a descriptor is open and not yet in `_OPEN`: the child would not close its copy."""

    lock = threading.Lock()  # one for all threads
    is_held = False

    def begin_fork(self) -> None:
        """Waits for other threads, but not for a disk that does not respond: training must go on."""
        self.is_held = self.lock.acquire(timeout=_FORK_WAIT_SECONDS)

    def end_fork(self) -> None:
        """Lets other threads go on in the parent."""
        if self.is_held:
            self.is_held = False
            self.lock.release()


_OPENING = _Opening()


class PrivateDescriptor:
    """A descriptor that only this process has, until `close`.

    Args:
        path: The file or directory to open.
        flags: Flags for `os.open`.

    Attributes:
        number: The descriptor; -1 once it is closed, and in forked children.

    Raises:
        OSError: The path cannot be opened.
    """

    def __init__(self, path: Path, flags: int) -> None:
        _close_in_children()
        with _OPENING.lock:
            self.number = os.open(path, flags | os.O_CLOEXEC, 0o644)
            _OPEN.add(self)

    def close(self) -> None:
        """Closes the descriptor, which releases its lock; a second call does nothing."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


@functools.cache
def _close_in_children() -> None:
    """Registers the hook once per process, and not at import, because hooks of `os.fork` cannot be removed."""
    os.register_at_fork(before=_OPENING.begin_fork, after_in_parent=_OPENING.end_fork, after_in_child=_close_all)


def _close_all() -> None:
    _Opening.lock = threading.Lock()  # another thread of the parent may hold the old one
    _OPENING.is_held = False
    for descriptor in list(_OPEN):
        with contextlib.suppress(OSError):
            descriptor.close()
