"""Files that are on the disk, whole, when the call that writes them returns; every error names its file.

    create_file(path)       a new file, forced to the disk at the end of the block
    replacing(path)         the same under another name until then: a reader finds what was there before, or all of it
    replace_file(path, d)   the same for content that is there already
    staged_file(path)       the same for a writer that wants a path
    sync_directory(path)    forces the names in a directory to the disk

No communication; nothing of torch is imported, so that a process that only writes files starts in a moment. What is
replaced has a name that ends in `.staging` until then: a kill leaves it behind, and the next writer of the same file
writes over it.
"""

import contextlib
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from .errors import naming

__all__ = ["create_file", "find_irregular_kind", "replace_file", "replacing", "staged_file", "sync_directory"]

STAGING_SUFFIX = ".staging"

_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def find_irregular_kind(mode: int) -> str | None:
    """Returns what the mode of a file says it is, as "a FIFO"; None for a regular file.

    Whatever opens a file that others may have put there asks first: to open a FIFO waits, and wakes some devices.
    """
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")


class _NamedFile(io.RawIOBase):
    """An unbuffered file for writing, whose errors name it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o666)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        with naming(self._path):
            return os.write(self._descriptor, data)

    def sync(self) -> None:
        with naming(self._path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


@contextlib.contextmanager
def create_file(path: Path) -> Iterator[BinaryIO]:
    """Gives a file to write; its content is on the disk at the end of the block, its name once the directory is synced.

    Raises:
        OSError: The disk is full, or cannot be written; it names the file.
    """
    raw = _NamedFile(path)
    try:
        file = io.BufferedWriter(raw)
        yield cast("BinaryIO", file)
        file.flush()
        raw.sync()
    finally:
        raw.close()  # not the buffer, which would try once more to write what a full disk has refused


@contextlib.contextmanager
def replacing(path: Path, *, has_rivals: bool = False) -> Iterator[BinaryIO]:
    """Gives a file to write that becomes `path` at the end of the block, all at once and durably.

    Where the block raises, `path` stays as it was.

    Args:
        path: What is replaced, or made.
        has_rivals: Whether other processes may write the same file at the same time: the last one to end wins.

    Raises:
        OSError: The disk is full, or cannot be written; it names the file.
    """
    with _becoming(path, has_rivals=has_rivals) as staging, create_file(staging) as file:
        yield file


def replace_file(path: Path, data: bytes, *, has_rivals: bool = False) -> None:
    """Makes `path` a file that holds `data`; otherwise as `replacing`."""
    with replacing(path, has_rivals=has_rivals) as file:
        file.write(data)


@contextlib.contextmanager
def staged_file(path: Path, *, has_rivals: bool = False) -> Iterator[Path]:
    """Gives a path beside `path` for a writer that wants one; otherwise as `replacing`."""
    with _becoming(path, has_rivals=has_rivals) as staging:
        yield staging
        sync_file(staging)


@contextlib.contextmanager
def _becoming(path: Path, *, has_rivals: bool) -> Iterator[Path]:
    mark = f".{secrets.token_hex(4)}" if has_rivals else ""
    staging = path.with_name(f"{path.name}{mark}{STAGING_SUFFIX}")
    try:
        yield staging
        os.replace(staging, path)  # noqa: PTH105 - the syscall by its name: fault tests wrap it
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staging)  # noqa: PTH108 - as above
        raise
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Forces what any process has written to a file to the disk."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Forces the names in a directory to the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
