"""Writes files that are complete and on the disk when the call returns; every error names its file.

    create_file(path)       a new file, forced to the disk at the end of the block
    replacing(path)         the same under another name until then: a reader finds what was there before, or all of it
    replace_file(path, d)   the same for content that is there already
    staged_file(path)       the same for a writer that wants a path
    sync_directory(path)    forces the names in a directory to the disk

A rename would put a file in the place of whatever has the name, also of a device that root may replace, such as
/dev/null: a device, a pipe or a socket is therefore left alone, with an error. A symbolic link is replaced itself; a
caller that was given the name by a user resolves it first.

No communication. The module imports no torch, so that a process that only writes files starts in a moment. New content
has a name that ends in `.staging` until it replaces the old file. A kill leaves the staged file behind, and the next
writer of the same file overwrites it.
"""

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from .errors import naming

__all__ = [
    "RefusedFileError",
    "check_regular",
    "create_file",
    "find_irregular_kind",
    "replace_file",
    "replacing",
    "staged_file",
    "sync_directory",
]

STAGING_SUFFIX = ".staging"

_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def find_irregular_kind(mode: int) -> str | None:
    """Returns the kind of a file by its mode, as "a FIFO"; None for a regular file.

    Code that opens a file of unknown origin calls this first: opening a FIFO blocks, and opening some devices has
    effects.
    """
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")


class RefusedFileError(OSError):
    """A file of the wrong kind or size; `strerror` follows the file's name in a sentence."""

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def check_regular(name: str, found: os.stat_result) -> None:
    """Checks that a file is a regular one.

    Raises:
        RefusedFileError: It is something else.
    """
    kind = find_irregular_kind(found.st_mode)
    if kind is not None:
        number = errno.EISDIR if kind == "a directory" else errno.ENODEV
        raise RefusedFileError(number, f"is {kind}, but must be a file", name)


class _NamedFile(io.RawIOBase):
    """An unbuffered file for writing, whose errors name it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A link that lies where the new file will be could lead to any other file, whose content would be lost.
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(path, flags, 0o666)

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
    """Opens a file to write; its content is on the disk at the end of the block, its name once the directory is synced.

    Raises:
        OSError: The disk is full, or cannot be written; the error names the file.
    """
    raw = _NamedFile(path)
    try:
        file = io.BufferedWriter(raw)
        yield cast("BinaryIO", file)
        # In this order: fsync forces what the kernel has, and the buffer's bytes are not there before the flush.
        file.flush()
        raw.sync()
    finally:
        raw.close()  # closing the buffer would try again to write the bytes that a full disk has refused


@contextlib.contextmanager
def replacing(path: Path, *, has_rivals: bool = False) -> Iterator[BinaryIO]:
    """Opens a file to write that becomes `path` at the end of the block, atomically and durably.

    If the block raises, `path` stays as it was.

    Args:
        path: The file that is replaced or created.
        has_rivals: Whether other processes may write the same file at the same time: the last one to end wins.

    Raises:
        OSError: The disk is full, or cannot be written, or the name is that of a device, a pipe or a socket; the error
            names the file.
    """
    with _becoming(path, has_rivals=has_rivals) as staging, create_file(staging) as file:
        yield file


def replace_file(path: Path, data: bytes, *, has_rivals: bool = False) -> None:
    """Replaces or creates `path` with the content `data`; otherwise as `replacing`."""
    with replacing(path, has_rivals=has_rivals) as file:
        file.write(data)


@contextlib.contextmanager
def staged_file(path: Path, *, has_rivals: bool = False) -> Iterator[Path]:
    """Yields a path beside `path` for a writer that takes a path; otherwise as `replacing`."""
    with _becoming(path, has_rivals=has_rivals) as staging:
        yield staging
        sync_file(staging)


@contextlib.contextmanager
def _becoming(path: Path, *, has_rivals: bool) -> Iterator[Path]:
    _refuse_irregular(path)
    mark = f".{secrets.token_hex(4)}" if has_rivals else ""
    # In the same directory, because a rename is atomic within one file system only.
    staging = path.with_name(f"{path.name}{mark}{STAGING_SUFFIX}")
    try:
        yield staging
        os.replace(staging, path)  # noqa: PTH105 - the syscall by its name: fault tests wrap it
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staging)  # noqa: PTH108 - as above
        raise
    # Until here a power failure may bring the old name back, but never a part of the new content.
    sync_directory(path.parent)


def _refuse_irregular(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:  # it does not exist yet, or the write gives the reason
        return
    if not stat.S_ISLNK(mode) and not stat.S_ISDIR(mode) and (kind := find_irregular_kind(mode)) is not None:
        raise OSError(errno.EEXIST, f"is {kind}, which is never replaced; give the name of a file", str(path))


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
