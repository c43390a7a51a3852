"""Whether blocks are a whole tensor is decided as the slow obvious way decides it."""

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from genesis_callbacks.base.checkpoint_errors import CorruptCheckpointError
from genesis_callbacks.checkpoint.tiling import blocks_overlap, check_tiling

SHAPE = (6, 4)


def is_covered_once(blocks) -> bool:
    """Counts how often each element is in a block."""
    counts = np.zeros(SHAPE, dtype=int)
    for (row, column), (height, width) in blocks:
        counts[row : row + height, column : column + width] += 1
    return bool((counts == 1).all())


@st.composite
def some_blocks(draw):
    """Rows cut at some places, each band perhaps cut in two, and perhaps one block moved, doubled or left out."""
    cuts = sorted({0, *draw(st.lists(st.integers(1, 5), max_size=4)), 6})
    blocks = []
    for top, bottom in itertools.pairwise(cuts):
        split = draw(st.sampled_from([0, 0, 1, 2]))
        parts = [(0, split), (split, 4)] if split else [(0, 4)]
        blocks += [((top, left), (bottom - top, right - left)) for left, right in parts]
    fault = draw(st.sampled_from(["none", "double", "drop", "grow"]))
    index = draw(st.integers(0, len(blocks) - 1))
    (row, column), (height, width) = blocks[index]
    if fault == "double":
        blocks.append(blocks[index])
    elif fault == "drop":
        del blocks[index]
    elif fault == "grow" and row + height < 6:
        blocks[index] = ((row, column), (height + 1, width))
    return draw(st.permutations(blocks))


@given(some_blocks())
def test_tiling_is_as_counting_elements_says(blocks):
    if is_covered_once(blocks):
        check_tiling("t", SHAPE, blocks)
    else:
        with pytest.raises(CorruptCheckpointError):
            check_tiling("t", SHAPE, blocks)


def is_tiled_by_pairs(shape, blocks) -> bool:
    """Compares each block with each other one, and counts the elements."""
    num_elements = sum(math.prod(sizes) for _, sizes in blocks)
    has_overlap = any(blocks_overlap(*one, *other) for one, other in itertools.combinations(blocks, 2))
    return bool(blocks) and not has_overlap and num_elements == math.prod(shape)


@st.composite
def grids(draw):
    """The cells of a grid over up to three dims, as a mesh cuts them, some of them empty, and perhaps one fault."""
    cuts = [
        [0, *sorted(draw(st.lists(st.integers(0, whole), max_size=4))), whole]
        for whole in draw(st.lists(st.integers(0, 5), max_size=3))
    ]
    shape = tuple(edges[-1] for edges in cuts)
    ranges = [[(start, end - start) for start, end in itertools.pairwise(edges)] for edges in cuts]
    blocks = [
        (tuple(start for start, _ in cell), tuple(size for _, size in cell)) for cell in itertools.product(*ranges)
    ]
    fault = draw(st.sampled_from(["none", "double", "replace", "drop", "move", "merge", "dedupe"]))
    index, other = (draw(st.integers(0, len(blocks) - 1)) for _ in range(2))
    offsets, sizes = blocks[index]
    if fault == "double":
        blocks.append(blocks[index])
    elif fault == "replace":  # as many blocks as cells, one of them twice
        blocks[index] = blocks[other]
    elif fault == "drop":
        del blocks[index]
    elif fault == "move" and shape:
        dim = draw(st.integers(0, len(shape) - 1))
        if offsets[dim] > 0:
            blocks[index] = ((*offsets[:dim], offsets[dim] - 1, *offsets[dim + 1 :]), sizes)
    elif fault == "merge" and shape:  # two neighbours become one block: no grid any more, and right
        after = (offsets[0] + sizes[0], *offsets[1:])
        found = next((block for block in blocks if block[0] == after and block[1][1:] == sizes[1:]), None)
        if found is not None and found != blocks[index]:
            blocks.remove(found)
            blocks[blocks.index((offsets, sizes))] = (offsets, (sizes[0] + found[1][0], *sizes[1:]))
    elif fault == "dedupe":
        blocks = list(dict.fromkeys(blocks))
    return shape, draw(st.permutations(blocks))


@settings(max_examples=500)
@given(grids())
def test_grids_are_taken_or_refused_as_all_pairs_of_blocks_say(case):
    shape, blocks = case
    if is_tiled_by_pairs(shape, blocks):
        check_tiling("t", shape, blocks)
    else:
        with pytest.raises(CorruptCheckpointError):
            check_tiling("t", shape, blocks)


def test_a_grid_of_many_dims_is_taken():
    """Nine dims cut in two: 512 blocks."""
    blocks = [(offsets, (1,) * 9) for offsets in itertools.product((0, 1), repeat=9)]
    check_tiling("t", (2,) * 9, blocks)
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        check_tiling("t", (2,) * 9, [*blocks[1:], blocks[1]])


def test_many_shards_of_many_ranks_take_no_time_each():
    """The number of pairs of 20,000 blocks would take minutes."""
    check_tiling("t", (20_000, 2), [((row, 0), (1, 2)) for row in range(20_000)])
