"""Ranges of positions whose windows are skipped: pure functions, without torch.

A range is (first, stop), with `stop` after the last position. Windows are skipped whole, so that a range is extended to
the windows that it overlaps.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from genesis.base.errors import UserError

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def read_ranges(given: Sequence[Any] | None) -> Ranges:
    """Returns the ranges of `data.skip_positions`, in order and without overlaps.

    Raises:
        UserError: An entry is not two positions, the first below the second.
    """
    for entry in given or ():
        is_pair = isinstance(entry, list | tuple) and len(entry) == 2
        if not is_pair or not all(type(value) is int and value >= 0 for value in entry) or entry[0] >= entry[1]:
            raise UserError(
                f"data.skip_positions has the entry {entry!r}: give [FIRST, STOP], the first position to skip and "
                "the one after the last, such as [96, 128]"
            )
    return merge(((first, stop) for first, stop in given or ()), ())


def merge(one: Iterable[Range], other: Iterable[Range]) -> Ranges:
    """Returns the positions of both, in order and without overlaps.

    Example:
        >>> merge([(0, 8), (16, 24)], [(4, 12), (24, 32)])
        ((0, 12), (16, 32))
    """
    merged: list[Range] = []
    for first, stop in sorted([*one, *other]):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((first, stop))
    return tuple(merged)


def clip(ranges: Iterable[Range], first: int, stop: int) -> Ranges:
    """Returns the parts of ranges within [first, stop).

    Example:
        >>> clip([(0, 12), (16, 32)], 8, 20)
        ((8, 12), (16, 20))
    """
    parts = ((max(start, first), min(end, stop)) for start, end in ranges)
    return tuple((start, end) for start, end in parts if start < end)


def subtract(ranges: Ranges, others: Ranges) -> Ranges:
    """Returns the positions of ranges that are not in others.

    Example:
        >>> subtract(((0, 12), (16, 32)), ((4, 8), (20, 40)))
        ((0, 4), (8, 12), (16, 20))
    """
    end = max((stop for _, stop in ranges), default=0)
    bounds = [0, *(position for each in clip(others, 0, end) for position in each), end]
    gaps = list(zip(bounds[::2], bounds[1::2], strict=True))
    return tuple(part for first, stop in gaps for part in clip(ranges, first, stop))


def count(ranges: Iterable[Range]) -> int:
    """Returns the number of positions in ranges without overlaps."""
    return sum(stop - first for first, stop in ranges)


def plan_skips(saved: Ranges, asked: Ranges, position: int, global_batch_size: int) -> Ranges:
    """Returns what a run skips that continues at `position`.

    Before `position` that is what it has skipped; what is asked for there was trained already. From there on, it is
    each window that overlaps a range, saved or asked for.

    Args:
        saved: The ranges of the checkpoint.
        asked: The ranges of this run's option.
        position: Where the run continues; its windows begin there.
        global_batch_size: Sequences of a window.

    Example:
        >>> plan_skips(((8, 16),), ((0, 8), (20, 21)), 16, 4)
        ((8, 16), (20, 24))
    """
    past = clip(saved, 0, position)
    ahead = clip(merge(saved, asked), position, max((stop for _, stop in (*saved, *asked)), default=position))
    return merge(past, _extend(ahead, position, global_batch_size))


def _extend(ranges: Ranges, position: int, global_batch_size: int) -> Iterator[Range]:
    for first, stop in ranges:
        num_before = (first - position) // global_batch_size
        num_to_end = -(-(stop - position) // global_batch_size)
        yield position + num_before * global_batch_size, position + num_to_end * global_batch_size


def describe(ranges: Iterable[Range]) -> str:
    """Returns ranges for people, with their last positions.

    Example:
        >>> describe([(96, 128), (160, 161)])
        '96 to 127, 160'
    """
    return ", ".join(f"{first} to {stop - 1}" if stop - first > 1 else str(first) for first, stop in ranges)
