"""Plans the forwards that score requests, so that no prefix is computed twice: contexts, heads, batches. Pure.

A *context* runs once, together with the longest of its continuations. Every other continuation reuses the keys and
values of that row and starts at the first token that differs from the longest continuation. A continuation that
differs only in its last token, such as any continuation of one token, needs no forward of its own: the logits of the
context's row already score the token. A *head* is a common prefix of many contexts, such as the examples of a few-shot
task; a head also runs only once.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

T = TypeVar("T")

MIN_HEAD_TOKENS = 32
"""Minimum length of a head: copying the keys and values of a shorter head for each context costs more than it saves."""


class Request(NamedTuple):
    """A continuation to score and the context before it, as ids; both have at least one id."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Target(NamedTuple):
    """A token that a row scores.

    Args:
        position: Position of the preceding token, among the tokens that the row feeds.
        token: The id whose probability is computed.
        request: Number of the request to which the log-probability is added.
    """

    position: int
    token: int
    request: int


class Row(NamedTuple):
    """One row of a forward.

    Args:
        parent: The row of the cache whose keys and values this row reuses.
        start: Number of tokens that this row keeps of the parent; 0 starts from scratch.
        tokens: The tokens that this row feeds, at least one.
        targets: The tokens that this row scores, by position.
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
    """The common prefix of some contexts; every context is longer than its head."""

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


def keep_apart(requests: Sequence[Request]) -> tuple[Context, ...]:
    """Returns a context for each request, so that no row reuses another."""
    return tuple(Context(request.context, ((number, request.continuation),)) for number, request in enumerate(requests))


def find_heads(contexts: Sequence[Context]) -> list[Head]:
    """Returns heads of contexts in lexicographic order; contexts with too short a prefix in common have the empty head.

    The empty head is the first. In lexicographic order the common prefix of a run of contexts is the shortest common
    prefix of two neighbours. A run is not divided if its common prefix saves half of the tokens that neighbours share
    in total. Otherwise the run is cut wherever neighbours share least, and contexts that are then alone keep the common
    prefix of the whole run.
    """
    # The last token of a context is not shared, because every context must feed a token of its own.
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
    """Returns the row that feeds a context after its head and then its longest continuation.

    The targets are all tokens of all continuations that this row can score.

    Args:
        context: The context.
        head: The head's row in the cache.
        head_tokens: Number of tokens of the head.
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
    """Returns the rows for the tokens that the context's row, `parent` in the cache, cannot score."""
    _, longest = context.continuations[0]
    rows = []
    for request, continuation in context.continuations[1:]:
        kept = _count_kept(longest, continuation)
        if fed := continuation[kept:-1]:
            scored = continuation[kept + 1 :]
            targets = tuple(Target(position, token, request) for position, token in enumerate(scored))
            rows.append(Row(parent, len(context.tokens) + kept, fed, targets))
    return rows


def plan_whole(context: Context) -> list[Row]:
    """Returns rows that score all continuations without a cache: each feeds the context, too."""
    longest = context.tokens + context.continuations[0][1]
    branches = [
        Row(
            0,
            0,
            longest[: row.start] + row.tokens,
            tuple(target._replace(position=row.start + target.position) for target in row.targets),
        )
        for row in plan_branches(context, 0)
    ]
    return [plan_context(context, 0, 0), *branches]


def batch_by_size(items: Sequence[T], size: Callable[[T], tuple[int, int]], budget: int) -> list[list[T]]:
    """Returns batches of items of similar length, each within the budget; a larger item is a batch of its own.

    Args:
        items: Of any lengths.
        size: Returns the numbers of tokens that an item feeds and keeps in a cache.
        budget: The most tokens that a batch feeds and keeps, with each item padded to the longest of the batch.
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
    """Returns how many tokens a continuation shares with the longest; its own last token, never fed, does not count."""
    return _count_shared(longest, continuation[:-1])


def _count_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Returns the length of the common prefix."""
    num = min(len(a), len(b))
    return next((index for index in range(num) if a[index] != b[index]), num)
