"""Text after prompts, up to a string that stops it."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from genesis.generate.batch import Batch, Request, check_is_number
from genesis.generate.sample import SamplingOptions
from genesis.generate.stream import plan_seeds
from genesis.model.decoder import Decoder
from genesis.tokenizer.tokenizer import Tokenizer

_MORE_TOKENS: Final = 2
"""How many more tokens than by encode a stop string may have and is still seen at once; a longer one is cut later."""


class CompleteOptions(NamedTuple):
    """How prompts are continued.

    Args:
        max_new_tokens: Of each; with its prompt it must fit the context.
        stop: Strings that end a text; it is cut before them.
        sampling: Which tokens may be drawn.
        seed: Of the draws.
        batch_tokens: Of all prompts of a batch with their new tokens, padding counted.
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
    """Returns what follows each prompt: up to a stop id, a stop string, or its number of tokens."""
    num_slots = max(map(len, prompts)) + options.max_new_tokens
    num_rows = min(len(prompts), max(1, options.batch_tokens // num_slots))
    batch = Batch(decoder, num_rows, tokenizer.stop_ids, num_slots=num_slots)
    # Batch numbers texts as they are added. Longest first: those that begin together are alike in length.
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
    """Returns the text of new tokens as the exported tokenizer gives it, with control symbols spelled or left out."""
    # A model may have more ids than its tokenizer, which are no text.
    return tokenizer.spell([token for token in ids if token < tokenizer.vocab_size], has_controls=has_controls)


class _StopFinder:
    """Says whether new tokens end with a stop string, by the last few of them, as the `hf` backend looks for one."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [(string, len(tokenizer.encode(string)) + _MORE_TOKENS) for string in stop if string]

    def end(self, ids: Sequence[int]) -> bool:
        """Whether one of the strings lies in the text of the last ids; it may be spelled otherwise than by encode."""
        return any(
            string in spell(self._tokenizer, ids[-num_tokens:], has_controls=True) for string, num_tokens in self._stop
        )
