"""What one rank refuses ends all ranks, with one line."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from genesis.base.errors import QuietExit, RunEndedError, UserError, numbered
from genesis_callbacks.checkpoint import Ranks

T = TypeVar("T")

_ANSWER_SECONDS = 1500.0
"""Some ranks may have much more memory to page-lock than others."""


def attempt_on_all(function: Callable[[], T]) -> T:
    """Returns the result of `function()` on this rank, or ends all ranks if any of them refuses its input.

    Communicates, over a group of its own. Every rank calls it at the same point, and the function itself waits for no
    other rank.

    Raises:
        UserError: On rank 0, with the reasons of all ranks that refused.
        QuietExit: On the other ranks, so that the reason is printed once.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    refusal: UserError | None = None
    try:
        value = function()
    except UserError as error:
        refusal = error
    ranks = Ranks(timeout_seconds=_ANSWER_SECONDS)
    refusals = ranks.gather(None if refusal is None else str(refusal))
    if not any(refusals):
        return value
    if not ranks.is_first:
        raise QuietExit(UserError.exit_status) from refusal
    common = UserError(describe_refusals(refusals))
    common.ends_all_ranks = True
    raise common from refusal


def agree_on_kernel(kernel: str, failure: str | None) -> None:
    """Ends all ranks if one of them has no kernel of attention, or another one than rank 0.

    Communicates, over a group of its own. Every rank calls it at the same point.

    Args:
        kernel: The kernel that this rank would take.
        failure: Why it has none; None if it has one.

    Raises:
        RunEndedError: On every rank; the message names the ranks.
    """
    found = [(kernel, failure)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = Ranks(timeout_seconds=_ANSWER_SECONDS).gather((kernel, failure))
    reason = find_disagreement(found)
    if reason is not None:
        error = RunEndedError(reason)
        error.ends_all_ranks = True
        raise error


def find_disagreement(found: Sequence[tuple[str, str | None]]) -> str | None:
    """Returns why ranks cannot train with their kernels of attention, in one line; None if they can. Pure.

    Args:
        found: By rank, its kernel, and why it has none or None.
    """
    failures = [failure for _, failure in found]
    if any(failures):
        return describe_refusals(failures)
    kernels = [kernel for kernel, _ in found]
    if len({*kernels}) == 1:
        return None
    by_kernel = {kernel: [rank for rank, own in enumerate(kernels) if own == kernel] for kernel in kernels}
    taken = "; ".join(f"{kernel} on {_name_ranks(ranks)}" for kernel, ranks in by_kernel.items())
    return (
        f"the proof of attention failed on some ranks alone, which would train with other kernels ({taken}): check the "
        "devices of these ranks, or give all ranks one of the kernels by --model.attention"
    )


def describe_refusals(refusals: Sequence[str | None]) -> str:
    """Returns the reasons of ranks in one line: the same reason once, with its ranks unless all of them have it. Pure.

    Args:
        refusals: By rank; None for a rank that refused nothing.
    """
    by_reason: dict[str, list[int]] = {}
    for rank, reason in enumerate(refusals):
        if reason is not None:
            by_reason.setdefault(reason, []).append(rank)
    (first, ranks), *others = by_reason.items()
    if not others and len(ranks) == len(refusals):
        return first
    where = _name_ranks(ranks)
    rest = sum(len(ranks) for _, ranks in others)
    more = f" (and {numbered(rest, 'other ranks')} refused)" if rest else ""
    return f"{where}: {first}{more}"


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
