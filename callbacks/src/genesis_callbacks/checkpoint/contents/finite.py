"""Reads a checkpoint's bytes, block by block, for values that are not finite."""

import io
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch
from torch import Tensor

from ...base.checkpoint_errors import CorruptCheckpointError
from ...base.safe_read import open_regular, reading
from ..restore import read_exactly
from ..write import find_elements
from .stored import Contents, StoredBlock

_BLOCK_BYTES = 16 << 20


def _locate(descriptor: int, block: StoredBlock) -> tuple[int, int]:
    """Returns (offset, bytes) of a block's elements in its file.

    Raises:
        CorruptCheckpointError: The file is not the expected archive of one tensor.
    """
    if not block.is_archive:
        return block.offset, block.num_bytes
    try:
        return find_elements(
            lambda num_bytes, offset: os.pread(descriptor, num_bytes, offset), block.offset, block.num_bytes
        )
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{block.file}: the {block.num_bytes} bytes at {block.offset} are not one tensor of torch.save"
        ) from error


def _read_elements(descriptor: int, block: StoredBlock, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields a block's elements, some megabytes at a time, always in the same memory."""
    offset, num_bytes = _locate(descriptor, block)
    buffer = bytearray(min(_BLOCK_BYTES, num_bytes))
    for start in range(0, num_bytes, _BLOCK_BYTES):
        view = memoryview(buffer)[: num_bytes - start]
        read_exactly(descriptor, view, offset + start, block.file)
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
                for elements in _read_elements(stream.fileno(), block, dtype):
                    if should_stop():
                        return {}
                    found[name] += _count_bad(elements, may_be_infinite=name in may_be_infinite)
    return {name: count for name, count in found.items() if count}
