"""Descriptors for locks that only the process which took them holds.

A lock by `flock` belongs to whatever was opened, and a forked child gets a copy of the descriptor: a data loader's
worker that outlives its trainer by seconds would hold the run's directory as long. So forked children close theirs at
once; what is started by another program's start (`exec`) never gets any.

POSIX record locks (`fcntl.lockf`) are not inherited, but a process loses one as soon as it closes *any* descriptor of
the file: a callback that copies or uploads the run's directory would give it away without a word.
"""

import contextlib
import functools
import os
from pathlib import Path
from weakref import WeakSet

_OPEN: "WeakSet[PrivateDescriptor]" = WeakSet()


class PrivateDescriptor:
    """A descriptor that this process alone has, until `close`.

    Args:
        path: What is opened.
        flags: As for `os.open`.

    Attributes:
        number: The descriptor; -1 once it is closed, and in forked children.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, flags: int) -> None:
        _close_in_children()
        self.number = os.open(path, flags | os.O_CLOEXEC, 0o644)
        _OPEN.add(self)

    def close(self) -> None:
        """Closes it, and lets go of its lock; a second call does nothing."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


@functools.cache
def _close_in_children() -> None:
    """Once in a process, and not when this module is imported: hooks of `os.fork` cannot be taken back."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for descriptor in list(_OPEN):
        with contextlib.suppress(OSError):
            descriptor.close()
