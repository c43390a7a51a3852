"""Whether blocks are a whole tensor is decided as the slow obvious way decides it."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from genesis_callbacks.checkpoint.errors import CorruptCheckpointError
from genesis_callbacks.checkpoint.plan import PartsCache, check_tiling

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


def test_many_shards_of_many_ranks_take_no_time_each():
    """The number of pairs of 20,000 blocks would take minutes."""
    check_tiling("t", (20_000, 2), [((row, 0), (1, 2)) for row in range(20_000)])


def test_parts_of_a_tensor_are_found_again_until_its_elements_lie_elsewhere():
    cache, tensor, other = PartsCache(), torch.ones(4), torch.ones(4)

    def take():
        parts = cache.local_parts({"model.x": tensor, "model.y": other}, lambda _: "parameter")
        cache.end_save()
        return parts

    first = take()
    tensor += 1
    again = take()
    assert all(one is another for one, another in zip(first, again, strict=True))
    tensor.data = torch.zeros(4)
    moved, kept = take()
    assert torch.equal(moved.data, torch.zeros(4))
    assert kept is first[1]
