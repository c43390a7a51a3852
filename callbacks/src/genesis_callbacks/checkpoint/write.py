"""Writes the tensors of one rank into a durable file."""

import contextlib
import io
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from ..base.hashing import HashAlgorithm
from ..base.local_shards import TensorShard
from ..base.manifest import FileRecord
from .durable_file import DurableFile
from .plan import Numbers

SHARD_NAME = "__{rank}_0.distcp"
ReadAt = Callable[[int, int], bytes]


class _Range(io.RawIOBase):
    """Presents a range of a file as a readable file, for `zipfile`."""

    def __init__(self, read_at: ReadAt, byte_offset: int, num_bytes: int) -> None:
        self._read_at, self._byte_offset, self._num_bytes, self._position = read_at, byte_offset, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._num_bytes - self._position)
        data = self._read_at(left if size < 0 else min(size, left), self._byte_offset + self._position)
        self._position += len(data)
        return data


def find_elements(read_at: ReadAt, byte_offset: int, num_bytes: int) -> tuple[int, int]:
    """Returns (offset in the file, size in bytes) of the elements in an archive of `torch.save` of one tensor.

    Args:
        read_at: Returns bytes of the file: how many, and from where on.
        byte_offset: Where the archive begins in the file.
        num_bytes: Its size.

    Raises:
        ValueError: The range is no such archive, or its elements are compressed.
    """
    try:
        with zipfile.ZipFile(_Range(read_at, byte_offset, num_bytes)) as archive:
            (record,) = (info for info in archive.infolist() if "/data/" in info.filename)
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError("torch.save compressed a tensor, so that its elements are not stored plainly in the file")
    # The fixed part of a zip's local header has 30 bytes; the lengths of name and extra field stand at 26 and 28. Torch
    # pads the extra field of this header alone: the central directory, which `zipfile` reads, does not know its length.
    header_bytes = 30
    start = byte_offset + record.header_offset
    header = read_at(header_bytes, start)
    name_bytes, extra_bytes = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return start + header_bytes + name_bytes + extra_bytes, record.file_size


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
) -> tuple[FileRecord, Numbers]:
    """Writes this rank's chunks into one DCP shard of `directory`, durably. No communication.

    Args:
        directory: The staging directory.
        rank: This rank.
        staged: Parts with their staged data, consumed one by one.
        algorithm: Algorithm of the file's hash.

    Returns:
        The file, and the place of each part in it: `[part, 3]`, the numbers of `ChunkRecord`.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    ranges: list[tuple[int, int]] = []
    with DurableFile(directory / SHARD_NAME.format(rank=rank), algorithm=algorithm) as file, _without_checksums():
        for _, tensor in staged:
            start = file.num_bytes
            # DCP's reader calls `torch.load` on a chunk's range of the file, so each chunk is an archive of its own.
            torch.save(tensor, file)  # type: ignore[arg-type]  # torch.save needs only write and flush
            ranges.append((start, file.num_bytes - start))
        file.drain()
        places = [(start, length, find_elements(file.read_back, start, length)[0]) for start, length in ranges]
        return file.finish(rank=rank), np.array(places, dtype=np.int64)
