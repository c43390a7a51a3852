"""Keeps a series of any length in bounded memory: what is drawn has the minimum and maximum of each part of the series.

The first points are kept as they are. When there are more than `MAX_BUCKETS`, neighbours share a bucket, of which the
lowest and the highest point are kept; so a spike of a single step is never lost.
"""

from typing import Final, NamedTuple

MAX_BUCKETS: Final = 600
_MAX_SAMPLE: Final = 1200


class Point(NamedTuple):
    """A value and the clocks at which it was logged; a clock that was not logged is NaN."""

    value: float
    step: float
    tokens_seen: float
    tokens_updated: float


class Series:
    """The points of one metric, added in the order of their steps.

    Args:
        max_buckets: Parts of the series of which minimum and maximum are kept; an even number.

    Attributes:
        num_points: Points that were added; one that replaced another is not counted.
        num_not_finite: Values that were infinite or not a number; they are not among the points.
        last: The last point, or None.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self.num_points = 0
        self.num_not_finite = 0
        self.last: Point | None = None
        self._max_buckets = max_buckets
        self._low: list[Point] = []
        self._high: list[Point] = []
        self._width, self._fill = 1, 0
        self._sample: list[float] = []
        self._stride = 1

    def add(self, point: Point) -> None:
        """Adds a point. A point of the same step as the last one replaces it."""
        if self.last is not None and self.last.step != point.step:
            self._push(self.last)
        self.last = point

    def _push(self, point: Point) -> None:
        if self.num_points % self._stride == 0:
            self._sample.append(point.value)
            if len(self._sample) > _MAX_SAMPLE:
                self._sample, self._stride = self._sample[::2], 2 * self._stride
        self.num_points += 1
        if self._fill == 0:
            self._low.append(point)
            self._high.append(point)
        elif point.value < self._low[-1].value:
            self._low[-1] = point
        elif point.value > self._high[-1].value:
            self._high[-1] = point
        self._fill += 1
        if self._fill == self._width:
            self._fill = 0
            if len(self._low) >= self._max_buckets:
                self._low = [min(pair) for pair in zip(self._low[::2], self._low[1::2], strict=True)]
                self._high = [max(pair) for pair in zip(self._high[::2], self._high[1::2], strict=True)]
                self._width *= 2

    @property
    def is_thinned(self) -> bool:
        """Whether points were left out."""
        return self._width > 1

    @property
    def width(self) -> int:
        """The number of points of which the lowest and the highest are kept."""
        return self._width

    @property
    def points(self) -> list[Point]:
        """The kept points by step; the last one is always among them."""
        kept: list[Point] = []
        for low, high in zip(self._low, self._high, strict=True):
            kept += [low] if low.step == high.step else sorted((low, high), key=_step)
        return kept if self.last is None else [*kept, self.last]

    @property
    def sample(self) -> list[float]:
        """Values at equal distances, for medians: the kept points are the extreme ones."""
        return self._sample if self.last is None else [*self._sample, self.last.value]


def _step(point: Point) -> float:
    return point.step
