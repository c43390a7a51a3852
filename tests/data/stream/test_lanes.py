from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.base.errors import UserError
from genesis.data.order import build_order
from genesis.data.sources import InputFile, Span
from genesis.data.stream.lanes import (
    check_world_size,
    choose_num_lanes,
    choose_other,
    deal_spans,
    lanes_at,
    shuffle,
)


@given(num_lanes=st.integers(1, 64), position=st.integers(0, 10**9), count=st.integers(1, 300), seed=st.integers(0, 99))
def test_every_round_has_each_lane_once_and_a_lane_depends_on_its_position_alone(num_lanes, position, count, seed):
    first = position // num_lanes * num_lanes
    assert sorted(lanes_at(first, num_lanes, num_lanes, seed).tolist()) == list(range(num_lanes))
    alone = [int(lanes_at(position + step, 1, num_lanes, seed)[0]) for step in range(count)]
    assert lanes_at(position, count, num_lanes, seed).tolist() == alone


@given(
    world_size=st.sampled_from([1, 2, 3, 4, 6, 8]),
    lanes_per_rank=st.integers(1, 12),
    rows_per_rank=st.integers(1, 20),
    step=st.integers(0, 50),
    seed=st.integers(0, 9),
)
def test_every_rank_has_equally_many_rows_of_every_global_batch(world_size, lanes_per_rank, rows_per_rank, step, seed):
    global_batch = world_size * rows_per_rank
    check_world_size(world_size * lanes_per_rank, global_batch, world_size)
    lanes = lanes_at(step * global_batch, global_batch, world_size * lanes_per_rank, seed)
    assert Counter((lanes % world_size).tolist()) == dict.fromkeys(range(world_size), rows_per_rank)


def test_a_world_size_that_would_not_is_refused_with_those_that_do():
    with pytest.raises(
        UserError, match=r"are not divisible by 8 ranks; use one of these world sizes: 1, 2, 3, 4, 6, 12"
    ):
        check_world_size(48, 12, 8)


def test_lanes_do_not_fall_into_step_with_the_mix():
    """With a mix of period 4 on 8 lanes, each lane gets each source in its share."""
    order = build_order({"web": 1, "code": 1}, {"web": 3, "code": 1}, seed=0)
    count = 8 * 2_000
    lanes, sources = lanes_at(0, count, 8, seed=0), order.sources(0, count)
    shares = [np.mean(sources[lanes == lane]) for lane in range(8)]
    assert all(0.2 < share < 0.3 for share in shares), shares


@given(sizes=st.lists(st.integers(0, 1_000), min_size=1, max_size=200), num_lanes=st.integers(1, 40))
def test_spans_are_dealt_once_each_and_about_evenly(sizes, num_lanes):
    spans = [Span(InputFile(str(number), size, 0), 0, size, size) for number, size in enumerate(sizes)]
    dealt = deal_spans(spans, num_lanes)
    assert sorted(span.file.path for part in dealt for span in part) == sorted(span.file.path for span in spans)
    loads = [sum(max(1, span.num_bytes) for span in part) for part in dealt]
    assert max(loads) - min(loads) <= max(1, *sizes)
    assert all(dealt) or len(sizes) < num_lanes
    assert deal_spans(spans, num_lanes) == dealt


def test_the_number_of_lanes_is_the_largest_that_every_source_can_be_cut_into():
    assert choose_num_lanes({"web": 1_000, "code": 64}, None) == 64
    assert choose_num_lanes({"web": 1_000, "code": 47}, None) == 32
    assert choose_num_lanes({"web": 5}, None) == 4
    assert choose_num_lanes({"web": 5}, 5) == 5
    with pytest.raises(UserError, match="num_lanes is 8, but source code can only be divided into 7 parts"):
        choose_num_lanes({"web": 9, "code": 7}, 8)
    with pytest.raises(UserError, match="source code has no text"):
        choose_num_lanes({"web": 9, "code": 0}, None)


def test_an_exhausted_source_is_replaced_by_the_one_most_behind_its_share():
    assert choose_other([2, 1, 1], [10, 7, 3], [False, True, True]) == 2
    assert choose_other([2, 1, 1], [2, 7, 3], [True, True, True]) == 0
    assert choose_other([1, 1], [4, 4], [True, True]) == 0
    assert choose_other([1, 0], [4, 0], [False, True]) is None


def test_a_shuffle_is_the_same_for_ever():
    assert shuffle(8, 3, "web", 1, 0).tolist() == [7, 4, 3, 0, 5, 1, 6, 2]
    assert sorted(shuffle(100, "x").tolist()) == list(range(100))
    assert shuffle(0, "x").tolist() == []
    assert lanes_at(0, 8, 4, seed=1).tolist() == [2, 3, 0, 1, 0, 1, 2, 3]


def test_the_sources_alone_are_those_of_the_sequences_across_a_change_of_the_mix():
    order = build_order({"web": 5, "code": 3}, {"web": 3, "code": 1}, seed=0).with_mix(90, {"web": 1, "code": 4})
    for position in range(0, 200, 7):
        assert order.sources(position, 20).tolist() == order.sequences(position, 20)[0].tolist()
