"""Generates text after prompts, up to a stop string."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from genesis.generate.batch import Batch, Request, check_is_number
from genesis.generate.sample import SamplingOptions
from genesis.generate.stream import plan_seeds
from genesis.model.decoder import Decoder
from genesis.tokenizer.tokenizer import Tokenizer

_MORE_TOKENS: Final = 2
"""Number of tokens beyond its encoding that a generated stop string may have and still be found immediately."""


class CompleteOptions(NamedTuple):
    """Options of text generation.

    Args:
        max_new_tokens: Number of new tokens per prompt; prompt and new tokens must fit the context.
        stop: Strings that end a text; the output stops before them.
        sampling: The sampling options.
        seed: The sampling seed.
        batch_tokens: Number of tokens in a batch, prompts and new tokens, with padding.
    """

    max_new_tokens: int
    stop: tuple[str, ...]
    sampling: SamplingOptions
    seed: int
    batch_tokens: int


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    options: CompleteOptions,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Returns the text after each prompt, up to a stop id, a stop string, or the maximum number of tokens."""
    num_slots = max(map(len, prompts)) + options.max_new_tokens
    num_rows = min(len(prompts), max(1, options.batch_tokens // num_slots))
    batch = Batch(decoder, num_rows, tokenizer.stop_ids, num_slots=num_slots)
    # Batch numbers texts in the order of `add`. Longest first, so that texts which start together have similar lengths.
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    seeds = plan_seeds(prompts, options.seed)
    grown: list[list[int]] = [[] for _ in order]
    stops = _StopFinder(tokenizer, options.stop)
    num_added = num_ended = 0
    while num_ended < len(order):
        while batch.num_free and num_added < len(order):
            index = order[num_added]
            batch.add(Request(prompts[index], options.max_new_tokens, options.sampling, seeds[index]))
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
    texts = {
        index: cut_at(spell(tokenizer, ids, has_controls=False), options.stop)
        for index, ids in zip(order, grown, strict=True)
    }
    return [texts[index] for index in range(len(prompts))]


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
