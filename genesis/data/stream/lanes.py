"""Lanes: the fixed number of parts into which a stream is divided, independent of the number of ranks.

L  lanes     R  ranks

Position p is served by lane (p + shift) mod L, where the shift is a function of the seed and of p // L. Every L
consecutive positions from a multiple of L use each lane once, and no lane synchronizes with the mix. Rank r reads the
lanes whose number is r modulo R. If R divides L and the global batch, every rank has the same number of rows of every
global batch, and the global batch is the same set of sequences for any R.

Everything here is a pure function of its arguments.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from heapq import heapreplace
from math import gcd
from typing import Final

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from genesis.base.errors import UserError, numbered
from genesis.data.sources import Span

_NUM_LANES: Final = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Candidates for the number of lanes, divisible by many world sizes."""


def choose_num_lanes(num_spans: Mapping[str, int], wanted: int | None) -> int:
    """Returns L: `wanted`, or the largest that leaves no source with fewer spans than lanes.

    Raises:
        UserError: A source has no text, or cannot be divided into `wanted` parts.
    """
    name, fewest = min(num_spans.items(), key=lambda item: item[1])
    if not fewest:
        raise UserError(f"source {name} has no text; correct its paths or remove it")
    if wanted is None:
        return next(count for count in _NUM_LANES if count <= fewest)
    if wanted > fewest:
        raise UserError(
            f"data.stream.num_lanes is {wanted}, but source {name} can only be divided into {fewest} parts; lower "
            "num_lanes, or give more or uncompressed files"
        )
    return wanted


def check_world_size(num_lanes: int, global_batch_size: int, world_size: int) -> None:
    """Checks that all ranks get the same number of rows of every global batch.

    Raises:
        UserError: The number of ranks does not divide the lanes and the global batch.
    """
    common = gcd(num_lanes, global_batch_size)
    if common % world_size:
        sizes = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
        raise UserError(
            f"{numbered(num_lanes, 'lanes')} (data.stream.num_lanes) and data.global_batch_size {global_batch_size} "
            f"are not divisible by {numbered(world_size, 'ranks')}; use one of these world sizes: {sizes}"
        )


def lanes_at(position: int, count: int, num_lanes: int, seed: int) -> Int64[ndarray, " count"]:
    """Returns the lane of each of `count` positions from `position` on.

    Example:
        >>> lanes_at(0, 8, 4, seed=1).tolist()
        [2, 3, 0, 1, 0, 1, 2, 3]
    """
    positions = np.arange(position, position + count)
    rounds = positions // num_lanes
    shifts = np.array([_shift(number, num_lanes, seed) for number in range(rounds[0], rounds[-1] + 1)])
    lanes: Int64[ndarray, " count"] = (positions + shifts[rounds - rounds[0]]) % num_lanes
    return lanes


def deal_spans(spans: Sequence[Span], num_lanes: int) -> tuple[tuple[Span, ...], ...]:
    """Returns the spans of each lane: about equally many bytes, each span once; none is empty if there are enough."""
    loads = [(0, lane) for lane in range(num_lanes)]
    dealt: list[list[Span]] = [[] for _ in range(num_lanes)]
    for span in sorted(spans, key=lambda span: -span.num_bytes):  # a stable sort keeps the order of equal sizes
        load, lane = loads[0]
        dealt[lane].append(span)
        heapreplace(loads, (load + max(1, span.num_bytes), lane))
    return tuple(tuple(part) for part in dealt)


def choose_other(weights: Sequence[int], consumed: Sequence[int], has_data: Sequence[bool]) -> int | None:
    """Returns the replacement for an exhausted source: the one with data that is most behind its share, or None."""
    total_weight, total_consumed = sum(weights), sum(consumed)
    behind = {
        source: weights[source] * total_consumed - consumed[source] * total_weight
        for source in range(len(weights))
        if weights[source] and has_data[source]
    }
    return max(behind, key=lambda source: (behind[source], -source)) if behind else None


def shuffle(length: int, *key: object) -> Int64[ndarray, " length"]:
    """Returns a permutation that is a function of its length and key, on any machine and version of numpy."""
    digest = blake2b("\0".join(map(str, key)).encode(), digest_size=16).digest()
    # A bit generator's output is fixed by its definition, but numpy may change the shuffle that it builds on that.
    bits = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(length)
    return np.argsort(bits, kind="stable")


@lru_cache(maxsize=4_096)
def _shift(number: int, num_lanes: int, seed: int) -> int:
    return int.from_bytes(blake2b(f"{seed}:{number}:lanes".encode(), digest_size=8).digest(), "little") % num_lanes
