"""Reads a checkpoint's bytes, block by block, for values that are not finite."""

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.checkpoint_errors import CorruptCheckpointError
from ...base.safe_read import open_regular, reading
from .stored import Contents, StoredBlock

_BLOCK_BYTES = 16 << 20
_LOCAL_HEADER_BYTES = 30  # the fixed part of a zip entry's header


class _Window(io.RawIOBase):
    """Presents a range of a file as a file."""

    def __init__(self, file: io.FileIO, offset: int, num_bytes: int) -> None:
        self._file, self._offset, self._num_bytes, self._position = file, offset, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._num_bytes - self._position))
        self._file.seek(self._offset + self._position)
        num_read = self._file.readinto(memoryview(buffer)[:wanted])
        self._position += num_read
        return num_read


def _find_elements(file: io.FileIO, block: StoredBlock) -> tuple[int, int]:
    """Returns (offset, bytes) of a block's elements in its file.

    Raises:
        CorruptCheckpointError: The file is not the expected archive of one tensor.
    """
    if not block.is_archive:
        return block.offset, block.num_bytes
    try:
        with zipfile.ZipFile(_Window(file, block.offset, block.num_bytes)) as archive:
            (entry,) = (info for info in archive.infolist() if "/data/" in info.filename)
    except (zipfile.BadZipFile, ValueError) as error:
        raise CorruptCheckpointError(
            f"{block.file}: the {block.num_bytes} bytes at {block.offset} are not one tensor of torch.save"
        ) from error
    file.seek(block.offset + entry.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    names_bytes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return block.offset + entry.header_offset + _LOCAL_HEADER_BYTES + names_bytes, entry.file_size


def _read_elements(file: io.FileIO, block: StoredBlock, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields a block's elements, some megabytes at a time, always in the same memory."""
    offset, num_bytes = _find_elements(file, block)
    buffer = bytearray(min(_BLOCK_BYTES, num_bytes))
    for start in range(0, num_bytes, _BLOCK_BYTES):
        view = memoryview(buffer)[: num_bytes - start]
        file.seek(offset + start)
        filled = 0
        while filled < len(view):
            num_read = file.readinto(view[filled:])
            if not num_read:
                raise CorruptCheckpointError(f"{block.file} ends before byte {offset + num_bytes}: it is truncated")
            filled += num_read
        yield torch.frombuffer(buffer, dtype=dtype, count=len(view) // dtype.itemsize)


def _count_bad(elements: Tensor, *, may_be_infinite: bool) -> int:
    if elements.is_complex():
        elements = torch.view_as_real(elements)
    if elements.dtype.itemsize == 1:  # these dtypes have no infinity to compare with
        elements = elements.float()
    # Without the sign bit, the pattern of infinity separates values: finite ones have a smaller pattern, nan a larger.
    # numpy compares in this thread; torch would take threads from the training.
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[elements.dtype.itemsize]
    infinity = int(torch.tensor(torch.inf, dtype=elements.dtype).view(integer))
    bits = elements.view(integer).numpy()
    magnitudes = bits & np.iinfo(bits.dtype).max
    return int(np.count_nonzero(magnitudes > infinity if may_be_infinite else magnitudes >= infinity))


def find_non_finite(
    contents: Contents,
    *,
    may_be_infinite: Collection[str] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, int]:
    """Returns the tensors of model and optimizers with elements that are not finite, and the number of these elements.

    Any thread may call this function. It reads some megabytes at a time.

    Args:
        contents: The result of `read_contents`.
        may_be_infinite: Names in `contents.model` for which only nan counts, such as masks.
        should_stop: Called before each read; once it returns True, the result is empty.

    Raises:
        CorruptCheckpointError: A file ends before its last tensor does, or does not hold tensors.
        OSError: A file cannot be read.
    """
    directory = contents.path if contents.path.is_dir() else contents.path.parent
    blocks_by_file: dict[str, list[tuple[str, torch.dtype, StoredBlock]]] = defaultdict(list)
    for name, tensor in contents.named_tensors():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            for block in tensor.blocks:
                blocks_by_file[block.file].append((name, tensor.dtype, block))
    found: dict[str, int] = defaultdict(int)
    for file, blocks in blocks_by_file.items():
        with reading(directory / file), io.FileIO(open_regular(directory / file)) as stream:
            for name, dtype, block in sorted(blocks, key=lambda item: item[2].offset):
                for elements in _read_elements(stream, block, dtype):
                    if should_stop():
                        return {}
                    found[name] += _count_bad(elements, may_be_infinite=name in may_be_infinite)
    return {name: count for name, count in found.items() if count}
