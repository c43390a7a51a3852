"""Keeps copies of remote files on the local disk, bounded in bytes and shared by all processes of the machine.

    CACHE/lock        held while copies are counted and removed, and while space is reserved
    CACHE/KEY.lock    shared by all readers of a copy; exclusive while the copy is downloaded or removed
    CACHE/KEY.part    a download in progress, from its start at its final size
    CACHE/KEY.copy    a complete copy; its modification time is the time of its last use

KEY is a hash of URL, size and identity: a copy never changes, and a file that changes in its store gets another key.
The locks are flocks, which end with their process, even if it is killed. CACHE must be on a local disk.
"""

import errno
import fcntl
import os
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from genesis.base.arguments import read_size
from genesis.base.cache_directory import find_cache_directory
from genesis.base.errors import UserError
from genesis.data.remote import RemoteFile, download
from genesis.data.store import StoreOptions, WriteError
from genesis_callbacks.base.files import sync_directory
from genesis_callbacks.base.locks import lock_file

_POLL_SECONDS = 0.1
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class CacheOptions:
    """Directory and size of the cache.

    Args:
        directory: The cache's directory; GENESIS_CACHE_DIR, or `genesis` in the user's cache directory.
        max_bytes: Size limit of all copies together; GENESIS_CACHE_BYTES.
    """

    directory: Path
    max_bytes: int = 50_000_000_000

    @classmethod
    def from_environment(cls) -> "CacheOptions":
        """Returns the options that the environment sets, with defaults for the others.

        Raises:
            UserError: GENESIS_CACHE_BYTES is not a number of bytes.
        """
        text = os.environ.get("GENESIS_CACHE_BYTES") or str(cls.max_bytes)
        try:
            max_bytes = int(read_size(text))
        except ArgumentTypeError:
            max_bytes = 0
        if max_bytes < 1:
            raise UserError(f"GENESIS_CACHE_BYTES is {text!r}; give a size above 0, such as 50GB")
        return cls(find_cache_directory(), max_bytes)


@contextmanager
def open_copy(file: RemoteFile) -> Iterator[Path]:
    """Yields the path of a copy of `file`, downloaded if necessary; no process removes the copy inside the `with`.

    Processes that need the same file at the same time download it once.

    Raises:
        UserError: The file cannot be downloaded, or the cache has no space for it.
    """
    entry = _Entry(file, CacheOptions.from_environment())
    try:
        lock = entry.acquire()
    except OSError as error:
        raise UserError(
            f"the cache {entry.options.directory} cannot be used ({error.strerror or error}); fix the cause or set "
            "GENESIS_CACHE_DIR to another directory"
        ) from None
    try:
        yield entry.copy
    finally:
        os.close(lock)


class _Entry:
    """The state of one file in the cache."""

    def __init__(self, file: RemoteFile, options: CacheOptions) -> None:
        self.file = file
        self.options = options
        key = blake3("\0".join(map(str, file)).encode()).hexdigest(length=16)
        self.copy = options.directory / f"{key}.copy"

    def acquire(self) -> int:
        """Returns the descriptor whose lock protects the copy."""
        self.options.directory.mkdir(parents=True, exist_ok=True)
        while True:
            lock = _lock(self.copy.with_suffix(".lock"), fcntl.LOCK_SH)
            if self._mark_used():
                return lock
            os.close(lock)
            self._download_alone()

    def _mark_used(self) -> bool:
        """Returns whether the copy is complete, and if so marks it as the most recently used one."""
        try:
            is_whole = self.copy.stat().st_size == self.file.num_bytes
            if is_whole:
                os.utime(self.copy)
            return is_whole
        except FileNotFoundError:
            return False

    def _download_alone(self) -> None:
        path = self.copy.with_suffix(".lock")
        lock = _lock(path, fcntl.LOCK_EX)
        try:
            if not self._mark_used():
                self._download()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(lock)

    def _download(self) -> None:
        part = self.copy.with_suffix(".part")
        for left_over in (part, self.copy):
            left_over.unlink(missing_ok=True)
        try:
            self._take_room(part)
            with part.open("r+b", buffering=0) as destination:
                download(self.file, destination)
                # Without fsync a power loss could leave a copy of the right size with empty content.
                os.fsync(destination.fileno())
            part.replace(self.copy)
            sync_directory(self.copy.parent)
        except WriteError as error:
            raise self._explain_disk(error.reason) from None
        except OSError as error:
            raise self._explain_disk(error) from None
        finally:
            part.unlink(missing_ok=True)

    def _take_room(self, part: Path) -> None:
        """Waits for space in the cache, and reserves it by creating `part` at full size."""
        options, num_bytes = self.options, self.file.num_bytes
        if num_bytes > options.max_bytes:
            raise UserError(
                f"{self.file.url} has {num_bytes} bytes, but the cache {options.directory} is limited to "
                f"{options.max_bytes}; "
                f"set GENESIS_CACHE_BYTES to {num_bytes} or more"
            )
        end = time.monotonic() + StoreOptions.from_environment().seconds
        while (num_bytes_used := _make_room(options, num_bytes, part)) is not None:
            if time.monotonic() > end:
                raise UserError(
                    f"the cache {options.directory} has no space for {self.file.url}: files in use occupy "
                    f"{num_bytes_used} of its {options.max_bytes} bytes; set GENESIS_CACHE_BYTES to "
                    f"{num_bytes_used + num_bytes} or more"
                )
            time.sleep(_POLL_SECONDS)

    def _explain_disk(self, error: OSError) -> UserError:
        if error.errno not in _DISK_IS_FULL:
            return UserError(
                f"cannot write to the cache {self.options.directory} ({error.strerror}); check its permissions and disk"
            )
        return UserError(
            f"the disk of the cache {self.options.directory} is full ({error.strerror}) with {self.file.url}, "
            f"{self.file.num_bytes} bytes; free space, set GENESIS_CACHE_DIR to another disk, or lower "
            f"GENESIS_CACHE_BYTES ({self.options.max_bytes})"
        )


def _make_room(options: CacheOptions, num_bytes: int, part: Path) -> int | None:
    """Reserves `num_bytes` by creating `part`, after removing unused copies; returns the bytes in use if that fails."""
    lock = _lock(options.directory / "lock", fcntl.LOCK_EX)
    try:
        _remove_left_overs(options.directory)
        copies = _measure(options.directory)
        num_bytes_used = sum(status.st_size for status in copies.values())
        for key in sorted(copies, key=lambda key: copies[key].st_mtime_ns):
            if num_bytes_used + num_bytes <= options.max_bytes:
                break
            if _remove_unused(options.directory, key):
                num_bytes_used -= copies[key].st_size
        if num_bytes_used + num_bytes > options.max_bytes:
            return num_bytes_used
        with part.open("wb") as file:
            file.truncate(num_bytes)
        return None
    finally:
        os.close(lock)


def _measure(directory: Path) -> dict[str, os.stat_result]:
    """Returns the sizes of all copies and downloads by key."""
    sizes = {}
    for ending in ("part", "copy"):  # in this order, a download that is renamed meanwhile is still counted
        for path in directory.glob(f"*.{ending}"):
            with suppress(FileNotFoundError):
                sizes[path.stem] = path.stat()
    return sizes


def _remove_left_overs(directory: Path) -> None:
    """Removes downloads whose process is gone, and lock files without a copy."""
    for path in directory.glob("*.lock"):
        if not path.with_suffix(".copy").exists():
            _remove_unused(directory, path.stem)


def _remove_unused(directory: Path, key: str) -> bool:
    """Removes all files of a key unless a process holds its lock."""
    lock = _try_lock(directory / f"{key}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is None:
        return False
    for ending in ("part", "copy", "lock"):
        (directory / f"{key}.{ending}").unlink(missing_ok=True)
    os.close(lock)
    return True


def _lock(path: Path, operation: int) -> int:
    while (lock := _try_lock(path, operation)) is None:
        pass
    return lock


def _try_lock(path: Path, operation: int) -> int | None:
    """Returns the descriptor of the lock, or None if another process holds it or its file was removed meanwhile."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with suppress(BlockingIOError, FileNotFoundError):
        opened = os.fstat(lock)
        lock_file(lock, operation)
        if os.path.samestat(opened, path.stat()):
            return lock
    os.close(lock)
    return None
