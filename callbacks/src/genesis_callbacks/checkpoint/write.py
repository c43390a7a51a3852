"""Writes new files durably: creates them exclusively, hashes them while writing, and forces them to the disk."""

import contextlib
import errno
import fcntl
import io
import mmap
import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from genesis_callbacks.errors import naming

from .hashing import HashAlgorithm, build_hasher
from .manifest import ChunkRecord, FileRecord
from .plan import TensorShard

# The size of one write: a multiple of any disk's block, because O_DIRECT needs aligned memory, offsets and lengths.
_BLOCK_BYTES = 8 << 20
SHARD_NAME = "__{rank}_0.distcp"


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


class _Slice(io.RawIOBase):
    """Presents a part of a file that is being written as a readable file, for `zipfile`."""

    def __init__(self, file: DurableFile, byte_offset: int, num_bytes: int) -> None:
        self._file, self._byte_offset, self._num_bytes, self._position = file, byte_offset, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = self._num_bytes - self._position
        data = self._file.read_back(left if size < 0 else min(size, left), self._byte_offset + self._position)
        self._position += len(data)
        return data


def _find_data(file: DurableFile, byte_offset: int, num_bytes: int) -> int:
    """Returns the offset of the elements: `torch.save` stores them, uncompressed, as one record of a zip archive."""
    with zipfile.ZipFile(_Slice(file, byte_offset, num_bytes)) as archive:
        record = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
    if record.compress_type != zipfile.ZIP_STORED:
        raise RuntimeError("torch.save compressed a tensor, so that its elements are not stored plainly in the file")
    # The fixed part of a zip's local header has 30 bytes; the lengths of name and extra field stand at 26 and 28. Torch
    # pads the extra field of this header alone: the central directory, which `zipfile` reads, does not know its length.
    header_bytes = 30
    start = byte_offset + record.header_offset
    header = file.read_back(header_bytes, start)
    name_bytes, extra_bytes = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return start + header_bytes + name_bytes + extra_bytes


@dataclass(frozen=True)
class Receipt:
    """The files and chunks that one rank wrote."""

    files: tuple[FileRecord, ...]
    chunks: tuple[tuple[str, ChunkRecord], ...]


def write_file(path: Path, data: bytes, *, algorithm: HashAlgorithm, rank: int = 0) -> FileRecord:
    """Writes a new small file durably and returns its record for the manifest."""
    with DurableFile(path, algorithm=algorithm) as file:
        file.write(data)
        return file.finish(rank=rank)


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Leaves out the CRC of each record: torch never checks it, and it costs as much as the file's stronger hash."""
    # The option is global: a concurrent `torch.save` in another thread also omits CRCs; its file still loads.
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def write_shard(
    directory: Path, rank: int, staged: Iterable[tuple[TensorShard, Tensor]], *, algorithm: HashAlgorithm
) -> Receipt:
    """Writes this rank's chunks into one DCP shard of `directory`, durably, and returns its receipt. No communication.

    Args:
        directory: The staging directory.
        rank: This rank.
        staged: Parts with their staged data, consumed one by one.
        algorithm: Algorithm of the file's hash.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    name = SHARD_NAME.format(rank=rank)
    ranges: list[tuple[TensorShard, int, int]] = []
    with DurableFile(directory / name, algorithm=algorithm) as file, _without_checksums():
        for part, tensor in staged:
            start = file.num_bytes
            # DCP's reader calls `torch.load` on a chunk's range of the file, so each chunk is an archive of its own.
            torch.save(tensor, file)  # type: ignore[arg-type]  # torch.save needs only write and flush
            ranges.append((part, start, file.num_bytes - start))
        file.drain()
        chunks = tuple(
            (part.name, ChunkRecord(part.offsets, part.sizes, name, start, length, _find_data(file, start, length)))
            for part, start, length in ranges
        )
        return Receipt((file.finish(rank=rank),), chunks)
