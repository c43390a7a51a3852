"""Blocks of a tensor: whether they overlap, and whether they cover it exactly once. Pure; imports no torch."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from genesis_callbacks.base.errors import numbered

from ..base.checkpoint_errors import CorruptCheckpointError


def blocks_overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> bool:
    """Returns whether two blocks of one tensor share an element."""
    return all(
        max(start, other_start) < min(start + size, other_start + other_size)
        for start, size, other_start, other_size in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    )


_MAX_PAIRED_BLOCKS = 256
_MAX_CUT_DIMS = 8  # limit for blocks that are not a grid, because the time doubles with each block
Block = tuple[tuple[int, ...], tuple[int, ...]]


def _is_grid(shape: tuple[int, ...], blocks: list[Block]) -> bool:
    """Returns whether blocks are the cells of a grid over a shape, each once, as with a device mesh.

    The distinct ranges of each dim tile the dim, no block occurs twice, and there are as many blocks as cells.
    """
    if len(set(blocks)) < len(blocks):
        return False
    num_cells = 1
    for dim, whole in enumerate(shape):
        ranges = {(offsets[dim], sizes[dim]) for offsets, sizes in blocks}
        end = 0
        for offset, size in sorted(ranges):
            if offset != end:
                return False
            end += size
        if end != whole:
            return False
        num_cells *= len(ranges)
    return num_cells == len(blocks)


def _tile_exactly(shape: tuple[int, ...], blocks: list[Block]) -> bool:
    """Returns whether blocks cover a shape exactly once, in time that grows with their number only.

    A box is determined by its corners with alternating signs: the mixed difference of its indicator function. If boxes
    tile another box, all their corners cancel except the corners of that box.
    """
    cut = [dim for dim, whole in enumerate(shape) if any(sizes[dim] != whole for _, sizes in blocks)]
    if len(cut) > _MAX_CUT_DIMS:
        return False
    corners = Counter[tuple[int, ...]]()
    for sign, (offsets, sizes) in [(-1, ((0,) * len(shape), shape)), *((1, block) for block in blocks)]:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[dim] + end * sizes[dim] for dim, end in zip(cut, ends, strict=True))
            corners[corner] += sign if sum(ends) % 2 == 0 else -sign
    return not any(corners.values())


def check_tiling(name: str, shape: tuple[int, ...], blocks: Iterable[Block]) -> None:
    """Checks that blocks of (offsets, sizes) cover a tensor of `shape` exactly once.

    Raises:
        CorruptCheckpointError: An element is missing, covered twice, or outside of the shape.
    """
    blocks = list(blocks)
    for offsets, sizes in blocks:
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset < 0 or size < 0 or offset + size > whole
            for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise CorruptCheckpointError(f"{name}: block {offsets} + {sizes} lies outside of its shape {shape}")
    # Blocks inside the shape that have as many elements as the shape, and do not overlap, cover it exactly once.
    covered = sum(math.prod(sizes) for _, sizes in blocks)
    if covered != math.prod(shape) or not blocks:
        raise CorruptCheckpointError(f"{name}: {covered:,} of {numbered(math.prod(shape), 'elements')} are covered")
    # A mesh of a thousand ranks makes as many blocks, whose pairs would cost too much: they are recognised as a
    # grid first. Other blocks are few as a rule.
    if _is_grid(shape, blocks):
        return
    if len(blocks) > _MAX_PAIRED_BLOCKS:
        if not _tile_exactly(shape, blocks):
            raise CorruptCheckpointError(f"{name}: some of its {numbered(len(blocks), 'blocks')} overlap")
        return
    for block, other in itertools.combinations(blocks, 2):
        if blocks_overlap(*block, *other):
            raise CorruptCheckpointError(f"{name}: blocks at {block[0]} and {other[0]} overlap")
