"""Text after prompts, up to a string that stops it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from genesis.generate.batch import Batch, Request
from genesis.generate.sample import SamplingOptions
from genesis.generate.stream import plan_seeds
from genesis.model.decoder import Decoder
from genesis.tokenizer.tokenizer import Tokenizer


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
    """Returns what follows each prompt. A text ends with eos, before a stop string, or after its number of tokens."""
    num_slots = max(map(len, prompts)) + options.max_new_tokens
    num_rows = min(len(prompts), max(1, options.batch_tokens // num_slots))
    batch = Batch(decoder, num_rows, tokenizer.eos_id, num_slots=num_slots)
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
            grown[token.request].append(token.id)
            if not token.is_last and stops.end(grown[token.request]):
                batch.remove(token.request)
                ended += 1
            ended += token.is_last
        num_ended += ended
        on_progress(ended)
    texts = {index: cut_at(tokenizer.decode(ids), options.stop) for index, ids in zip(order, grown, strict=True)}
    return [texts[index] for index in range(len(prompts))]


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first of each stop string, one string after the other."""
    for string in stop:
        text = text.split(string)[0] if string else text
    return text


class _StopFinder:
    """Says whether ids end with a stop string; control symbols are spelled, as a stop string may name one."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [string.encode() for string in stop if string]
        self._reach = max(map(len, self._stop), default=0)

    def end(self, ids: Sequence[int]) -> bool:
        """Whether a stop string lies in the text of `ids` and reaches into the last of them."""
        tail = b""
        for token in reversed(ids):
            tail = self._spell(token) + tail
            if len(tail) >= self._reach + len(self._spell(ids[-1])):
                break
        return any(string in tail for string in self._stop)

    def _spell(self, token: int) -> bytes:
        if self._tokenizer.is_control(token):
            return self._tokenizer.pieces[token].encode()
        return self._tokenizer.decode_bytes([token])
