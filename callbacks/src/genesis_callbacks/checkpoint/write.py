"""Writes durable files: newly created, hashed as they are written, forced to the disk."""

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

# Written at once; a multiple of what any disk wants to be aligned to.
_BLOCK_BYTES = 8 << 20
SHARD_NAME = "__{rank}_0.distcp"


def _set_direct(descriptor: int, is_direct: bool) -> bool:
    """Lets writes go past the page cache, or not, and says whether they do; some file systems cannot."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return is_direct


class DurableFile:
    """A new file: hashed while it is written, forced to the disk when it is finished.

    Whole blocks go past the page cache where the file system allows it: nobody will read them soon, and the cache costs
    a writer more processor time, taken from training, than all else that it does.

    Raises:
        FileExistsError: There is one of that name; nothing is ever written over.
    """

    def __init__(self, path: Path, *, algorithm: HashAlgorithm) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        self._hasher = build_hasher(algorithm)
        self._block = memoryview(mmap.mmap(-1, _BLOCK_BYTES))  # which begins at a page, as direct writes must
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
        """Does nothing: `torch.save` asks for it after each tensor, and `finish` forces all to the disk."""

    def drain(self) -> None:
        """Hands everything so far to the operating system, to be read back; nothing can be written any more."""
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
        self._hasher.update(data)
        while data:
            try:
                num_written = os.write(self._descriptor, data)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                num_written = 0  # this file system takes the flag, and no such write
            data = data[num_written:]
            if data and self._is_direct:  # what is left is not aligned any more
                self._is_direct = _set_direct(self._descriptor, False)

    def read_back(self, num_bytes: int, byte_offset: int) -> bytes:
        """Returns bytes of what was drained."""
        return os.pread(self._descriptor, num_bytes, byte_offset)

    def finish(self, *, rank: int) -> FileRecord:
        """Forces everything to the disk and returns what the manifest says about the file."""
        if not self._is_drained:
            self.drain()
        with naming(self._path):
            os.fsync(self._descriptor)
        return FileRecord(self._path.name, self.num_bytes, self._hasher.hexdigest(), rank)


class _Slice(io.RawIOBase):
    """Part of a file that is being written, as a file for reading: for `zipfile`."""

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
    """Where the elements begin in the file: `torch.save` stores them, uncompressed, as one record of a zip archive."""
    with zipfile.ZipFile(_Slice(file, byte_offset, num_bytes)) as archive:
        record = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
    if record.compress_type != zipfile.ZIP_STORED:
        raise RuntimeError("torch.save compressed a tensor, whose elements therefore have no place in the file")
    header_bytes = 30
    start = byte_offset + record.header_offset
    header = file.read_back(header_bytes, start)
    name_bytes, extra_bytes = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return start + header_bytes + name_bytes + extra_bytes


@dataclass(frozen=True)
class Receipt:
    """What one rank wrote."""

    files: tuple[FileRecord, ...]
    chunks: tuple[tuple[str, ChunkRecord], ...]


def write_file(path: Path, data: bytes, *, algorithm: HashAlgorithm, rank: int = 0) -> FileRecord:
    """Writes a new small file, durably, and returns what the manifest says about it."""
    with DurableFile(path, algorithm=algorithm) as file:
        file.write(data)
        return file.finish(rank=rank)


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Leaves out the CRC of each record: nobody checks it, the file's hash says more, and it costs as much as that."""
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
        staged: Parts with their data as `stage_*` gives them; consumed one by one.
        algorithm: Of the file's hash.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    name = SHARD_NAME.format(rank=rank)
    ranges: list[tuple[TensorShard, int, int]] = []
    with DurableFile(directory / name, algorithm=algorithm) as file, _without_checksums():
        for part, tensor in staged:
            start = file.num_bytes
            torch.save(tensor, file)  # type: ignore[arg-type]  # it asks for write and flush only
            ranges.append((part, start, file.num_bytes - start))
        file.drain()
        chunks = tuple(
            (part.name, ChunkRecord(part.offsets, part.sizes, name, start, length, _find_data(file, start, length)))
            for part, start, length in ranges
        )
        return Receipt((file.finish(rank=rank),), chunks)
