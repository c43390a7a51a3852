"""Initial weights, generated in blocks of rows, or marked as unset if a restore follows.

Each block has its own generator, seeded by the parameter's name and the block's number. So a rank generates only the
blocks whose rows it holds, and sharding does not change any value.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from genesis_callbacks.base.local_shards import local_shards

INIT_STD: Final = 0.02
BLOCK_ROWS: Final = 64
"""Rows of a block; another number gives other values. Smaller blocks need more generators, larger ones waste rows."""
_UNSET_BITS: Final = {1: 0xDE, 2: 0x7FDE, 4: 0x7FDEADED, 8: 0x7FFDEADEDEADEDED}
"""The mark by an element's bytes: a quiet NaN that arithmetic never gives, so that a restored NaN differs from it.
Bytes of an NF4 base have no NaN: their mark is a byte that no such tensor holds everywhere."""
_Draw = Callable[[tuple[int, ...], float, str, int], Tensor]
"""Returns a block of rows, given the parameter's shape, a deviation or bound, the key, and the block's number."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def mark_unset(parameter: Tensor) -> None:
    """Fills this rank's part of a parameter with the NaN that `is_unset` detects. Does not communicate."""
    for local in local_shards("unset", parameter, "parameter"):
        _view_bits(local.data).fill_(_UNSET_BITS[parameter.element_size()])


def is_unset(parameter: Tensor) -> bool | None:
    """Returns whether `mark_unset` filled this rank's part of a parameter; None if the rank holds no part."""
    found = None
    for local in local_shards("unset", parameter, "parameter"):
        bits, mark = _view_bits(local.data), _UNSET_BITS[parameter.element_size()]
        found = bool(bits.flatten()[0] == mark) and bool((bits == mark).all())
    return found


def _view_bits(data: Tensor) -> Tensor:
    return data.view(_INTEGERS[data.element_size()])


@dataclass(frozen=True)
class InitialValues:
    """Generates the initial values of one part: a function of the seed and the parameters' canonical names.

    Args:
        key: The seed and the part's canonical name: `0 blocks.3.attention`.
        residual_std: The deviation of parameters that write into the residual stream.

    References:
        Radford et al., Language Models are Unsupervised Multitask Learners (GPT-2), section 2.3.
    """

    key: str
    residual_std: float

    def fill(self, name: str, parameter: Tensor) -> None:
        """Fills a parameter, by its name in the part, with normal values of deviation `INIT_STD`."""
        fill_normal(parameter, INIT_STD, f"{self.key}.{name}")

    def fill_uniform(self, name: str, parameter: Tensor, bound: float) -> None:
        """Fills a parameter, by its name in the part, with values that are uniform between `-bound` and `bound`."""
        key = f"{self.key}.{name}"
        _fill_blocks(parameter, lambda shape, number: draw_uniform_block(shape, bound, key, number))

    def fill_residual(self, name: str, parameter: Tensor) -> None:
        """Fills a parameter that writes into the residual stream with normal values of deviation `residual_std`."""
        fill_normal(parameter, self.residual_std, f"{self.key}.{name}")

    def fill_stack(self, name: str, parameter: Tensor) -> None:
        """Fills a stack of matrices as `fill` does, each by its number: a rank draws no other rank's matrices."""
        self._fill_matrices(name, parameter, draw_block, INIT_STD)

    def fill_stack_residual(self, name: str, parameter: Tensor) -> None:
        """Fills a stack of matrices that write into the residual stream as `fill_stack` does."""
        self._fill_matrices(name, parameter, draw_block, self.residual_std)

    def fill_stack_uniform(self, name: str, parameter: Tensor, bound: float) -> None:
        """Fills a stack of matrices as `fill_uniform` does, each by its number."""
        self._fill_matrices(name, parameter, draw_uniform_block, bound)

    def _fill_matrices(self, name: str, parameter: Tensor, draw: _Draw, size: float) -> None:
        _fill_stack(parameter, lambda number: partial(_draw_matrix, draw, size, f"{self.key}.{name}.{number}"))


def fill_normal(parameter: Tensor, std: float, key: str) -> None:
    """Fills this rank's part of a parameter with normal values of mean 0. Does not communicate.

    Args:
        parameter: A plain tensor or a DTensor on any device, with at least one dimension.
        std: The deviation.
        key: The seed and the name, which determine the values together with shape and deviation.
    """
    _fill_blocks(parameter, lambda shape, number: draw_block(shape, std, key, number))


@torch.no_grad()
def _fill_blocks(parameter: Tensor, draw: Callable[[tuple[int, ...], int], Tensor]) -> None:
    for local in local_shards("initial", parameter, "parameter"):
        corner = zip(local.part.offsets, local.part.sizes, strict=True)
        _fill_region(local.data, [slice(offset, offset + size) for offset, size in corner], local.part.shape, draw)


@torch.no_grad()
def _fill_stack(parameter: Tensor, draw_of: Callable[[int], Callable[[tuple[int, ...], int], Tensor]]) -> None:
    for local in local_shards("initial", parameter, "parameter"):
        corner = zip(local.part.offsets, local.part.sizes, strict=True)
        first, *region = (slice(offset, offset + size) for offset, size in corner)
        for data, number in zip(local.data, range(first.start, first.stop), strict=True):
            _fill_region(data, region, local.part.shape[1:], draw_of(number))


def _draw_matrix(draw: _Draw, size: float, key: str, shape: tuple[int, ...], number: int) -> Tensor:
    return draw(shape, size, key, number)


def _fill_region(
    data: Tensor, region: Sequence[slice], shape: tuple[int, ...], draw: Callable[[tuple[int, ...], int], Tensor]
) -> None:
    """Fills `data`, which is this region of a tensor of that shape, block by block."""
    first, *others = region
    for number in find_blocks(first.start, first.stop):
        block = draw(shape, number)
        start = number * BLOCK_ROWS
        rows = slice(max(first.start, start), min(first.stop, start + len(block)))
        held = block[(slice(rows.start - start, rows.stop - start), *others)]
        data[rows.start - first.start : rows.stop - first.start].copy_(held)


def find_blocks(start: int, stop: int) -> range:
    """Returns the numbers of the blocks that have rows from `start` up to `stop`.

    >>> find_blocks(60, 130)
    range(0, 3)
    """
    return range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS))


def draw_block(shape: tuple[int, ...], std: float, key: str, number: int) -> Tensor:
    """Returns the rows of one block of a parameter, float32 on the CPU: a function of its arguments alone."""
    block, generator = _begin_block(shape, key, number)
    return block.normal_(0.0, std, generator=generator)


def draw_uniform_block(shape: tuple[int, ...], bound: float, key: str, number: int) -> Tensor:
    """Returns the rows of one block like `draw_block`, with uniform values between `-bound` and `bound`."""
    block, generator = _begin_block(shape, key, number)
    return block.uniform_(-bound, bound, generator=generator)


def _begin_block(shape: tuple[int, ...], key: str, number: int) -> tuple[Tensor, torch.Generator]:
    seed = int.from_bytes(hashlib.sha256(f"{key} {number}".encode()).digest()[:8], "little") >> 1
    num_rows = min(BLOCK_ROWS, shape[0] - number * BLOCK_ROWS)
    # On the CPU in float32, because other devices' generators give different numbers for the same seed.
    block = torch.empty((num_rows, *shape[1:]), device="cpu", dtype=torch.float32)
    return block, torch.Generator("cpu").manual_seed(seed)
