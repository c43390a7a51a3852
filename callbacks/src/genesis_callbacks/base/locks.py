"""Locks that end with their process, also on file systems that have none. Imports no torch.

    open_lock(path)                the file of a lock, created if it is missing, and never behind a link
    lock_file(descriptor, kind)    as `fcntl.flock`

A file system may have no such locks: Lustre without the mount option `flock`, NFS without a lock daemon.
There a file in this machine's directory for temporary files is locked in the place of the file that was meant, and the
descriptor is made one of that file. Processes of one user on one machine keep out each other as usual; processes on
other machines do not see the lock.
"""

import contextlib
import errno
import fcntl
import functools
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO, Final
from weakref import WeakSet

from .errors import RunEndedError, naming
from .files import RefusedFileError, check_regular

__all__ = ["lock_file", "open_lock"]

_OPEN: "WeakSet[PrivateDescriptor]" = WeakSet()
_FORK_WAIT_SECONDS = 1.0

_HAS_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


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
    """A descriptor that only this process has, and none of its children, until `close`: for a lock of its own.

    A lock by `flock` belongs to the open file, and a forked child gets a copy of the descriptor: a data loader's worker
    that outlives its trainer by seconds would keep the run's directory locked. So forked children close their copies
    immediately; a program that is started by `exec` never gets a copy.

    POSIX record locks (`fcntl.lockf`) are not inherited, but a process loses one as soon as it closes *any* descriptor
    of the file: a callback that copies or uploads the run's directory would silently release the lock.

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


def open_lock(path: Path) -> BinaryIO:
    """Opens the file of a lock to read and write; it is created if it is missing, and its content is kept.

    Raises:
        OSError: It cannot be opened, or is a link, which could lead to any file, or no regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RefusedFileError(errno.ELOOP, "is a link, but must be a file", str(path)) from None
    file = open(descriptor, "r+b", buffering=0)  # noqa: PTH123, SIM115 - the caller closes it
    try:
        check_regular(str(path), os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def lock_file(descriptor: int, kind: int, reported: Path | None = None) -> None:
    """Locks an open file or directory, as `fcntl.flock` does.

    Read and write the text of a lock file through `descriptor`, after this call: it may be another file then.

    Args:
        descriptor: The file's. Only what is opened for reading and for writing can have every kind of lock on NFS.
        kind: `fcntl.LOCK_EX` or `LOCK_SH`, with `LOCK_NB` not to wait.
        reported: What the lock protects. If the file system has no locks, a line on standard error names it; None
            reports nothing.

    Raises:
        BlockingIOError: Another process holds the lock.
        RunEndedError: There are no locks, in the directory for temporary files either.
        OSError: There is no lock for another reason.
    """
    try:
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno not in _HAS_NO_LOCKS:
            error.filename = _find_path(descriptor) if reported is None else str(reported)
            raise
        directory = Path(tempfile.gettempdir()) / f"genesis-locks-{os.getuid()}"
        if reported is not None:
            sys.stderr.write(
                f"genesis-callbacks: {reported} is on a file system without locks ({error.strerror}): a lock in "
                f"{directory} keeps out other processes of yours on this machine, but none on other machines: "
                "use it from one machine at a time, or mount it with locks (Lustre: -o flock)\n"
            )
            sys.stderr.flush()
        with naming(directory):
            _become_stand_in(descriptor, directory)
            try:
                fcntl.flock(descriptor, kind)
            except OSError as stand_in:
                if stand_in.errno not in _HAS_NO_LOCKS:
                    raise
                raise RunEndedError(
                    f"no locks here ({error.strerror}) and none in {directory} ({stand_in.strerror}), so that nothing "
                    "would keep out a second run: set TMPDIR to a directory on a local disk"
                ) from None


def _find_path(descriptor: int) -> str | None:
    """Returns the path of an open file; None where the system does not show it."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    return None


def _become_stand_in(descriptor: int, directory: Path) -> None:
    """Makes `descriptor` one of the file that stands in for its file; every process finds the same one."""
    found = os.fstat(descriptor)
    directory.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    stand_in = os.open(directory / f"{found.st_dev:x}-{found.st_ino:x}", flags, 0o600)
    try:
        os.dup2(stand_in, descriptor, inheritable=False)
    finally:
        os.close(stand_in)
