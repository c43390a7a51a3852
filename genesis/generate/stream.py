"""Yields new tokens of several prompts as they are generated."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from genesis.base.errors import UserError
from genesis.generate.batch import Batch, Request, check_is_number, plan_budgets
from genesis.generate.grammar import TokenGrammar
from genesis.generate.sampling_options import SamplingOptions
from genesis.model.decoder import Decoder


@dataclass(frozen=True)
class GenerateOptions:
    """Options of text generation.

    Args:
        max_new_tokens: Upper bound for each prompt; None for 256 or the rest of the context, whichever is less.
        sampling: Which tokens may be sampled.
        seed: The seed of sampling. A prompt's text depends on the seed and the prompt, not on the other prompts; a
            repeated prompt gets a different text.
        grammar: What each text must follow, at its beginning; None for any text.
        has_cache: Whether to keep keys and values; otherwise every new token computes the whole text again.
    """

    max_new_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int = 0
    has_cache: bool = True
    grammar: TokenGrammar | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1")


class Token(NamedTuple):
    """One new token, the index of the prompt that it continues, and whether that prompt ends with it."""

    prompt: int
    id: int
    is_last: bool


def generate(
    decoder: Decoder, prompts: Sequence[Sequence[int]], options: GenerateOptions, stop_ids: Set[int]
) -> Iterator[Token]:
    """Continues all prompts together and yields their tokens step by step, with the stop token that ends a text.

    Args:
        decoder: The model, in evaluation mode.
        prompts: The ids of each prompt, at least one id each.
        options: Options of the generation.
        stop_ids: The tokens that end a text.

    Raises:
        UserError: A prompt is empty, or it and its new tokens are longer than the context. Raised at the call.
    """
    lengths = [len(prompt) for prompt in prompts]
    budgets = plan_budgets(lengths, options.max_new_tokens, decoder.config.max_seq_len)
    num_slots = max(length + budget for length, budget in zip(lengths, budgets, strict=True))
    batch = Batch(decoder, len(prompts), stop_ids, num_slots=num_slots, has_cache=options.has_cache)
    seeds = plan_seeds(prompts, options.seed)
    for prompt, budget, seed in zip(prompts, budgets, seeds, strict=True):
        grammar = None if options.grammar is None else options.grammar.copy()
        batch.add(Request(prompt, budget, options.sampling, seed, grammar=grammar))
    return _stream(batch)


def plan_seeds(prompts: Sequence[Sequence[int]], seed: int) -> list[int]:
    """Returns the seed of each prompt's generator, from `seed`, the prompt, and its number of earlier occurrences."""
    num_before: Counter[str] = Counter()
    seeds = []
    for text in (str(list(prompt)) for prompt in prompts):
        seeds.append(_derive_seed(seed, text, num_before[text]))
        num_before[text] += 1
    return seeds


def derive_seed(seed: int, prompt: Sequence[int], index: int) -> int:
    """Returns the seed of the text number `index` of a prompt, the same in `genesis generate` and `genesis serve`."""
    return _derive_seed(seed, str(list(prompt)), index)


def _derive_seed(seed: int, text: str, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {index} {text}".encode()).digest()[:8], "little") >> 1


def _stream(batch: Batch) -> Iterator[Token]:
    while tokens := batch.step():
        # Sorted by request: rows move when a text ends, and the output must not depend on that.
        for token in sorted(tokens, key=lambda token: token.request):
            check_is_number(token)
            yield Token(token.request, token.id, token.is_last)
