"""Generates text after prompts, up to a stop string."""

from collections.abc import Callable, Sequence, Set
from typing import Final, NamedTuple

import torch
from torch import Tensor

from genesis.evaluate import plan as evaluate_plan
from genesis.evaluate.plan import Head, find_heads, gather_contexts
from genesis.generate.batch import Batch, Request, check_is_number
from genesis.generate.layout import build_head
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import plan_seeds
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.tokenizer.tokenizer import Tokenizer

_MORE_TOKENS: Final = 2
"""Number of tokens beyond its encoding that a generated stop string may have and still be found immediately."""
_MIN_SHARING: Final = 8
"""Fewer prompts with a common beginning are continued together with others: steps of few rows are inefficient."""
_CACHE_BYTES: Final = 2 * 2**30
_MAX_ROWS: Final = 64
"""From about this number of rows, a step takes longer in proportion."""


class CompleteOptions(NamedTuple):
    """Options of text generation.

    Args:
        max_new_tokens: Number of new tokens per prompt; prompt and new tokens must fit the context.
        stop: Strings that end a text; the output stops before them.
        sampling: The sampling options.
        seed: The sampling seed.
        batch_tokens: Number of tokens of prompts that a forward reads, with padding.
        cache_tokens: Number of tokens of texts that are continued together, prompts and new tokens, with padding.
        stop_ids: Tokens that end a text besides those of the tokenizer.
    """

    max_new_tokens: int
    stop: tuple[str, ...]
    sampling: SamplingOptions
    seed: int
    batch_tokens: int
    cache_tokens: int
    stop_ids: frozenset[int] = frozenset()


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    options: CompleteOptions,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Returns the text after each prompt, up to a stop id, a stop string, or the maximum number of tokens."""
    seeds = plan_seeds(prompts, options.seed)
    texts = [""] * len(prompts)
    stops = _StopFinder(tokenizer, options.stop)
    stop_ids = tokenizer.stop_ids | options.stop_ids
    head = build_head(decoder)
    for group in plan_groups(prompts, can_share=decoder.config.can_share_beginnings):
        requests = [
            Request(prompts[index], options.max_new_tokens, options.sampling, seeds[index]) for index in group.prompts
        ]
        grown = _grow(decoder, head, requests, group.prefix, stop_ids, stops, options, on_progress)
        for index, ids in zip(group.prompts, grown, strict=True):
            texts[index] = cut_at(spell(tokenizer, ids, has_controls=False), options.stop)
    return texts


def default_cache_tokens(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Returns the number of tokens whose keys and values take at most 2 GiB."""
    return max(1, _CACHE_BYTES // max(1, config.count_cache_bytes_per_token(dtype.itemsize)))


class Group(NamedTuple):
    """Prompts that are continued together.

    Args:
        prefix: The tokens with which all of them begin, which are computed once.
        prompts: Their indices, longest prompt first, so that texts which start together have similar lengths.
    """

    prefix: tuple[int, ...]
    prompts: list[int]


def plan_groups(prompts: Sequence[Sequence[int]], *, can_share: bool) -> list[Group]:
    """Returns groups of prompts with long common beginnings, such as the examples of a few-shot task, and the rest.

    A group has as many prompts as are continued efficiently together; the prompts of smaller ones are in the rest.
    """
    heads: list[Head] = []
    if can_share:
        asked = [evaluate_plan.Request(tuple(prompt), (0,)) for prompt in prompts]
        _, *heads = find_heads(gather_contexts(asked))
    groups = []
    rest = set(range(len(prompts)))
    for head in heads:
        members = [number for context in head.contexts for number, _ in context.continuations]
        if len(members) >= _MIN_SHARING:
            groups.append(Group(head.tokens, members))
            rest -= set(members)
    groups.append(Group((), sorted(rest)))
    by_length = [Group(group.prefix, sorted(group.prompts, key=lambda index: -len(prompts[index]))) for group in groups]
    return [group for group in by_length if group.prompts]


def _grow(
    decoder: Decoder,
    head: Callable[[Tensor, Tensor], Tensor],
    requests: Sequence[Request],
    prefix: Sequence[int],
    stop_ids: Set[int],
    stops: "_StopFinder",
    options: CompleteOptions,
    on_progress: Callable[[int], None],
) -> list[list[int]]:
    """Returns the new tokens of each request."""
    num_slots = max(len(request.prompt) for request in requests) + options.max_new_tokens
    num_rows = max(1, min(len(requests), _MAX_ROWS, options.cache_tokens // num_slots))
    batch = Batch(
        decoder,
        num_rows,
        stop_ids,
        num_slots=num_slots,
        prefix=prefix,
        read_tokens=options.batch_tokens,
        head=head,
    )
    grown: list[list[int]] = [[] for _ in requests]  # a batch numbers texts in the order of `add`
    num_added = num_ended = 0
    while num_ended < len(requests):
        while batch.num_free and num_added < len(requests):
            batch.add(requests[num_added])
            num_added += 1
        ended = 0
        for token in batch.step():
            check_is_number(token)
            grown[token.request].append(token.id)
            if not token.is_last and stops.end(grown[token.request]):
                batch.remove(token.request)
                ended += 1
            ended += token.is_last
        num_ended += ended
        on_progress(ended)
    return grown


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first of each stop string, one string after the other."""
    for string in stop:
        text = text.split(string)[0] if string else text
    return text


def spell(tokenizer: Tokenizer, ids: Sequence[int], *, has_controls: bool) -> str:
    """Returns the text of new tokens as the exported tokenizer decodes it, with or without control symbols."""
    # A model may have more ids than its tokenizer; these have no text.
    return tokenizer.spell([token for token in ids if token < tokenizer.vocab_size], has_controls=has_controls)


class _StopFinder:
    """Returns whether the last few new tokens contain a stop string, by the same rule as the `hf` backend."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [(string, len(tokenizer.encode(string)) + _MORE_TOKENS) for string in stop if string]

    def end(self, ids: Sequence[int]) -> bool:
        """Returns whether the text of the last ids contains a stop string, for any ids of the stop string."""
        return any(
            string in spell(self._tokenizer, ids[-num_tokens:], has_controls=True) for string, num_tokens in self._stop
        )
