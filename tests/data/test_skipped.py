"""Skipped data: which windows are skipped, that the order's state records them, and what they count."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.base.errors import UserError
from genesis.data.order import SequenceOrder, build_order
from genesis.data.skipped import count, merge, plan_skips, read_ranges

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda each: (each[0], sum(each))), max_size=4)


def positions(ranges: Any) -> set[int]:
    return {position for first, stop in ranges for position in range(first, stop)}


@given(RANGES, RANGES, st.integers(0, 40), st.integers(1, 9))
def test_windows_ahead_are_skipped_whole_and_those_behind_as_they_were(
    saved: list[tuple[int, int]], asked: list[tuple[int, int]], position: int, size: int
) -> None:
    before, wanted = merge(saved, ()), merge(asked, ())
    planned = plan_skips(before, wanted, position, size)
    expected = {each for each in positions(before) if each < position}
    for first in range(position, position + 120, size):
        window = set(range(first, first + size))
        if window & (positions(before) | positions(wanted)):
            expected |= window
    assert positions(planned) == expected
    assert count(planned) == len(expected)
    assert merge(planned, ()) == planned, "in order and without overlaps"
    assert plan_skips(planned, wanted, position, size) == planned, "a second resume at the same position"


@pytest.mark.parametrize("wrong", [[8], [[8]], [[True, 8]], [[8, 8]], [[9, 8]], [[-1, 8]], [[1, 2, 3]], [[0, 1.5]]])
def test_ranges_that_are_none_are_refused_in_one_line(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"data.skip_positions has the entry .*: give \[FIRST, STOP\]") as caught:
        read_ranges(wrong)
    assert "\n" not in str(caught.value)


@pytest.fixture
def order() -> SequenceOrder:
    return build_order({"web": 50, "code": 20}, {"web": 3, "code": 1}, seed=5, max_epochs={"code": 1})


def test_the_state_of_an_order_records_what_it_skips_and_a_resume_without_the_option_skips_it(
    order: SequenceOrder,
) -> None:
    assert "skipped_positions" not in order.state()
    told = order.with_skips(((10, 20),), 0, 8)
    assert told.state()["skipped_positions"] == [[8, 24]]
    assert told.hash() == order.hash(), "the order of what is not skipped is the same"
    for position in (0, 8, 16, 24, 40):
        resumed = order.continued(told.state(), position).with_skips((), position, 8)
        assert resumed.skipped == ((8, 24),)
        assert [resumed.is_skipped(first, 8) for first in (0, 8, 16, 24)] == [False, True, True, False]
        again = order.continued(resumed.state(), position).with_skips((), position, 8)
        assert again.state() == resumed.state()


def test_a_resume_does_not_claim_that_it_skipped_what_was_trained(order: SequenceOrder) -> None:
    resumed = order.continued(order.state(), 16).with_skips(((8, 24),), 16, 8)
    assert resumed.skipped == ((16, 24),)


@pytest.mark.parametrize("position", [0, 8, 12, 20, 40, 90])
def test_skipped_sequences_are_counted_by_source(order: SequenceOrder, position: int) -> None:
    told = order.with_skips(((8, 16), (36, 40)), 0, 4)
    passed = [each for each in range(position) if any(first <= each < stop for first, stop in told.skipped)]
    expected = [sum(int(told.sources(each, 1)[0]) == source for each in passed) for source in range(2)]
    assert list(told.sequences_skipped(position)) == expected
    assert told.sequences_consumed(position) == order.sequences_consumed(position)
