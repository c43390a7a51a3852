"""Computes ratios of contenders that took turns, for machines whose speed varies.

Absolute figures of two runs are never compared. Every contender works once in each round, so that changes of the
machine's speed between rounds do not affect the ratio of two contenders in one round. The result is the median of these
ratios over the rounds.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class PairedRatio:
    """The median of paired ratios.

    Args:
        median: Median of the ratios.
        low: Lower end of an interval that contains the true median with at least 95% probability; None if there are
            too few pairs.
        high: Upper end of this interval.
        num_pairs: Number of rounds.
    """

    median: float
    low: float | None
    high: float | None
    num_pairs: int


def rotate_order(contenders: Sequence[T], round_index: int) -> list[T]:
    """Returns the order of the contenders in a round: each contender comes first, second, ... equally often.

    Example:
        >>> rotate_order(["a", "b", "c"], 1)
        ['b', 'c', 'a']
    """
    start = round_index % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def compare_pairs(numerators: Sequence[float], denominators: Sequence[float]) -> PairedRatio:
    """Returns the median of the ratios of each round, with an interval that assumes nothing about their distribution.

    The interval runs between the k-th smallest and the k-th largest ratio, for the largest k whose coverage is enough.

    Example:
        >>> compare_pairs([2.0, 6.0, 9.0], [2.0, 3.0, 3.0])
        PairedRatio(median=2.0, low=None, high=None, num_pairs=3)

    References:
        David and Nagaraja, Order Statistics, 3rd edition, section 7.1.
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    rank = find_interval_rank(len(ratios))
    return PairedRatio(
        median=statistics.median(ratios),
        low=ratios[rank - 1] if rank else None,
        high=ratios[-rank] if rank else None,
        num_pairs=len(ratios),
    )


def find_interval_rank(num_pairs: int) -> int:
    """Returns the k of the median's interval; 0 if even the range of all ratios covers too little.

    Example:
        >>> [find_interval_rank(n) for n in (5, 6, 10, 20)]
        [0, 1, 2, 6]
    """
    tail, rank = 0.0, 0
    for k in range(num_pairs // 2):
        # The interval misses the median if fewer than k + 1 ratios lie on one of its sides.
        tail += math.comb(num_pairs, k) / 2**num_pairs
        if 1 - 2 * tail < _CONFIDENCE:
            break
        rank = k + 1
    return rank
