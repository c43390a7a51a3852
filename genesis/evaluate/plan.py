"""What the model is asked, put so that nothing is computed twice: requests to contexts to heads to batches. Pure.

A *context* runs once, together with the longest of its continuations; every other continuation goes on from its keys
and values, from where it first differs from that one. A continuation that differs in its last token alone, such as any
of one token, needs no forward of its own: it can be read where the context ended. A *head* is what many contexts have
in common at their beginning, such as the examples of a few-shot task; it runs once, too.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

T = TypeVar("T")

MIN_HEAD_TOKENS = 32
"""A shorter head saves less than it costs to copy its keys and values for each context."""


class Request(NamedTuple):
    """Ids whose likelihood is asked, and the ids before them; both have at least one."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Target(NamedTuple):
    """A token that a row scores.

    Args:
        position: Of the token that it follows, among those that the row feeds.
        token: Whose probability is asked.
        request: To whom it counts.
    """

    position: int
    token: int
    request: int


class Row(NamedTuple):
    """What one row of a forward does.

    Args:
        parent: The row of the cache that it goes on from.
        start: How many tokens of that row it keeps; 0 starts from scratch.
        tokens: What it feeds, at least one.
        targets: What it scores, by position.
    """

    parent: int
    start: int
    tokens: tuple[int, ...]
    targets: tuple[Target, ...] = ()


class Context(NamedTuple):
    """A context and its continuations, the longest first, each with the number of its request."""

    tokens: tuple[int, ...]
    continuations: tuple[tuple[int, tuple[int, ...]], ...]


class Head(NamedTuple):
    """What contexts have in common at their beginning; none of them ends with it."""

    tokens: tuple[int, ...]
    contexts: tuple[Context, ...]


def gather_contexts(requests: Sequence[Request]) -> list[Context]:
    """Returns the contexts of different requests, in lexicographic order."""
    by_context: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for number, request in enumerate(requests):
        by_context.setdefault(request.context, []).append((number, request.continuation))
    return [
        Context(tokens, tuple(sorted(continuations, key=lambda item: -len(item[1]))))
        for tokens, continuations in sorted(by_context.items())
    ]


def find_heads(contexts: Sequence[Context]) -> list[Head]:
    """Returns heads of contexts in lexicographic order; those that share too little have the empty head, the first.

    In that order what a run of contexts shares is the least that two neighbours share. A run is taken as it is if that
    saves half of what neighbours share in all; else it is cut wherever they share least, and what is then alone stays
    with what all of the run share.
    """
    # A context must feed a token of its own, so that it does not share its last.
    shared = [_count_shared(a.tokens[:-1], b.tokens[:-1]) for a, b in pairwise(contexts)]
    heads: list[Head] = []
    alone: list[Context] = []
    waiting = [(0, len(contexts))]
    while waiting:
        first, last = waiting.pop()
        inside = shared[first : last - 1]
        least = min(inside, default=0)
        if least >= MIN_HEAD_TOKENS and 2 * least * len(inside) >= sum(inside):
            heads.append(Head(contexts[first].tokens[:least], tuple(contexts[first:last])))
            continue
        is_cut = [num < MIN_HEAD_TOKENS or num == least for num in inside]
        cuts = [first, *(first + index + 1 for index, cut in enumerate(is_cut) if cut), last]
        waiting += [(start, stop) for start, stop in pairwise(cuts) if stop - start > 1]
        single = [contexts[start] for start, stop in pairwise(cuts) if stop - start == 1]
        if least >= MIN_HEAD_TOKENS and len(single) > 1:
            heads.append(Head(contexts[first].tokens[:least], tuple(single)))
        else:
            alone += single
    return [Head((), tuple(alone)), *heads]


def plan_context(context: Context, head: int, head_tokens: int) -> Row:
    """Returns the row that feeds a context after its head, and its longest continuation; it scores all that it can.

    Args:
        context: Which.
        head: The head's row in the cache.
        head_tokens: How long that is.
    """
    _, longest = context.continuations[0]
    end = len(context.tokens) - head_tokens
    targets = [
        Target(end - 1 + index, token, request)
        for request, continuation in context.continuations
        for index, token in enumerate(continuation[: _count_kept(longest, continuation) + 1])
    ]
    return Row(head, head_tokens, context.tokens[head_tokens:] + longest[:-1], tuple(sorted(targets)))


def plan_branches(context: Context, parent: int) -> list[Row]:
    """Returns the rows for what the context's own row, `parent` of the cache, could not score."""
    _, longest = context.continuations[0]
    rows = []
    for request, continuation in context.continuations[1:]:
        kept = _count_kept(longest, continuation)
        if fed := continuation[kept:-1]:
            scored = continuation[kept + 1 :]
            targets = tuple(Target(position, token, request) for position, token in enumerate(scored))
            rows.append(Row(parent, len(context.tokens) + kept, fed, targets))
    return rows


def batch_by_size(items: Sequence[T], size: Callable[[T], tuple[int, int]], budget: int) -> list[list[T]]:
    """Returns batches of items alike in length, each within the budget but for an item that is larger alone.

    Args:
        items: Of any lengths.
        size: Tokens that an item feeds, and tokens that it keeps in a cache.
        budget: Of tokens fed and kept in a batch, where each item is padded to the longest of it.
    """
    batches: list[list[T]] = []
    longest_fed = longest_kept = 0
    for item in sorted(items, key=lambda item: size(item), reverse=True):
        fed, kept = size(item)
        if batches:
            longest_fed, longest_kept = max(longest_fed, fed), max(longest_kept, kept)
        if not batches or (len(batches[-1]) + 1) * (longest_fed + longest_kept) > budget:
            batches.append([])
            longest_fed, longest_kept = fed, kept
        batches[-1].append(item)
    return batches


def _count_kept(longest: tuple[int, ...], continuation: tuple[int, ...]) -> int:
    """Returns how many tokens of a continuation stand in the longest one, too; its last is never fed."""
    return _count_shared(longest, continuation[:-1])


def _count_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Returns the length of the common beginning."""
    num = min(len(a), len(b))
    return next((index for index in range(num) if a[index] != b[index]), num)
