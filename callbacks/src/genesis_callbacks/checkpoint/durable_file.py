"""Durable files: created exclusively, hashed while they are written, and forced to the disk. Imports no torch."""

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from ..base.errors import naming
from ..base.hashing import HashAlgorithm, build_hasher
from ..base.manifest import FileRecord

# The size of one write: a multiple of any disk's block, because O_DIRECT needs aligned memory, offsets and lengths.
_BLOCK_BYTES = 8 << 20


def _set_direct(descriptor: int, is_direct: bool) -> bool:
    """Turns direct writes, past the page cache, on or off; returns whether they are on. Some file systems refuse."""
    # By fcntl and not at open: the last block of the same file is rarely aligned and must go through the cache.
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return is_direct


class DurableFile:
    """A new file: hashed while it is written, forced to the disk when it is finished.

    Whole blocks bypass the page cache if the file system allows it. They are not read again soon, and the cache would
    take more processor time from training than all other work of a writer.

    Raises:
        FileExistsError: A file of that name exists; files are never overwritten.
    """

    def __init__(self, path: Path, *, algorithm: HashAlgorithm) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        self._hasher = build_hasher(algorithm)
        self._block = memoryview(mmap.mmap(-1, _BLOCK_BYTES))  # a mapping begins at a page, so that it is aligned
        self._num_filled = 0
        self._is_direct = False
        self._is_drained = False
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> int:
        """Appends `data` and returns its length in bytes."""
        assert not self._is_drained
        rest = memoryview(data).cast("B")
        num_bytes = len(rest)
        self.num_bytes += num_bytes
        while rest:
            taken = min(len(rest), _BLOCK_BYTES - self._num_filled)
            self._block[self._num_filled : self._num_filled + taken] = rest[:taken]
            self._num_filled += taken
            rest = rest[taken:]
            if self._num_filled == _BLOCK_BYTES:
                self._write_block()
        return num_bytes

    def flush(self) -> None:
        """Does nothing: `torch.save` calls it after each tensor, but only `finish` forces the file to the disk."""

    def drain(self) -> None:
        """Writes the rest of the data to the file, so that the file can be read back; no more data can be written."""
        self._is_direct = _set_direct(self._descriptor, False)
        self._write_through(self._block[: self._num_filled])
        self._num_filled = 0
        self._is_drained = True

    def _write_block(self) -> None:
        self._is_direct = self._is_direct or _set_direct(self._descriptor, True)
        self._write_through(self._block)
        self._num_filled = 0

    def _write_through(self, data: memoryview) -> None:
        with naming(self._path):
            self._write_all(data)

    def _write_all(self, data: memoryview) -> None:
        # Hashed in memory and not from the file, so that bytes changed on their way to the disk do not match the hash.
        self._hasher.update(data)
        while data:
            try:
                num_written = os.write(self._descriptor, data)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                num_written = 0  # this file system accepts O_DIRECT, but not the write: retry it through the cache
            data = data[num_written:]
            if data and self._is_direct:  # the rest of a short write is not aligned
                self._is_direct = _set_direct(self._descriptor, False)

    def read_back(self, num_bytes: int, byte_offset: int) -> bytes:
        """Returns bytes of the file, after `drain`."""
        return os.pread(self._descriptor, num_bytes, byte_offset)

    def finish(self, *, rank: int) -> FileRecord:
        """Forces the file to the disk and returns its record for the manifest."""
        if not self._is_drained:
            self.drain()
        with naming(self._path):
            # Direct writes also need fsync: the drive's cache and the file's metadata must reach the disk.
            os.fsync(self._descriptor)
        return FileRecord(self._path.name, self.num_bytes, self._hasher.hexdigest(), rank)


def write_file(path: Path, data: bytes, *, algorithm: HashAlgorithm) -> FileRecord:
    """Writes a new small file of rank 0 durably and returns its record for the manifest."""
    with DurableFile(path, algorithm=algorithm) as file:
        file.write(data)
        return file.finish(rank=0)
