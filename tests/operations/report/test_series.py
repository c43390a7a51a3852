"""A series of any length in bounded memory, without losing an extreme value."""

import math
import statistics

from hypothesis import given
from hypothesis import strategies as st

from genesis.operations.report.series import Point, Series


def fill(values: list[float], max_buckets: int = 8) -> Series:
    series = Series(max_buckets)
    for step, value in enumerate(values):
        series.add(Point(value, step, math.nan, math.nan))
    return series


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300))
def test_the_lowest_the_highest_the_first_and_the_last_value_are_kept(values: list[float]) -> None:
    points = fill(values).points
    kept = [point.value for point in points]
    assert min(kept) == min(values)
    assert max(kept) == max(values)
    assert points[-1].value == values[-1]
    assert all(values[int(point.step)] == point.value for point in points)
    assert [point.step for point in points] == sorted({point.step for point in points})
    assert len(points) <= 17


def test_a_short_series_is_kept_whole_and_a_long_one_keeps_every_lone_spike() -> None:
    short = fill([1.0, 2.0, 3.0])
    assert [point.value for point in short.points] == [1.0, 2.0, 3.0]
    assert not short.is_thinned
    values = [1.0] * 1000
    values[123] = 50.0
    values[777] = -50.0
    long = fill(values)
    assert {(123.0, 50.0), (777.0, -50.0)} <= {(point.step, point.value) for point in long.points}
    assert long.is_thinned


def test_a_step_that_is_logged_twice_has_its_later_value() -> None:
    series = Series()
    for value, step in ((1.0, 1.0), (2.0, 2.0), (3.0, 2.0)):
        series.add(Point(value, step, math.nan, math.nan))
    assert [(point.step, point.value) for point in series.points] == [(1.0, 1.0), (2.0, 3.0)]
    assert series.sample == [1.0, 3.0]


def test_the_sample_has_the_median_of_the_series_and_not_that_of_its_extremes() -> None:
    values = [100.0 if step % 10 == 0 else 1.0 for step in range(20_000)]
    series = fill(values, 600)
    assert statistics.median(series.sample) == 1.0
    assert len(series.sample) <= 1202
