"""Tokens from prompts, as they come.

B  prompts     S  tokens of the longest     V  vocabulary
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genesis.errors import UserError
from genesis.generate.sample import SamplingOptions, sample_token
from genesis.model.decoder import Decoder, KVCache

DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class GenerateOptions:
    """How text is continued.

    Args:
        max_new_tokens: At most so many for each prompt; None for 256 or what the context leaves, whichever is less.
        sampling: Which tokens may be drawn.
        seed: What a prompt gives depends on it and the prompt, not on the other prompts; one that stands there again
            is another draw.
        has_cache: Whether keys and values are kept, or the whole text is computed for every token.
    """

    max_new_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int = 0
    has_cache: bool = True

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1")


class Token(NamedTuple):
    """One new token, the index of the prompt that it continues, and whether that prompt ends with it."""

    prompt: int
    id: int
    is_last: bool


def generate(
    decoder: Decoder, prompts: Sequence[Sequence[int]], options: GenerateOptions, eos_id: int
) -> Iterator[Token]:
    """Continues all prompts together and yields their tokens round by round; `eos_id` ends a prompt and is yielded.

    Args:
        decoder: In evaluation mode.
        prompts: The ids of each, at least one.
        options: How.
        eos_id: The token that ends a text.

    Raises:
        UserError: A prompt is empty, or it and its new tokens are longer than the context. Raised at the call.
    """
    assert not decoder.training, "dropout would be part of the text"
    budgets = plan_budgets([len(prompt) for prompt in prompts], options.max_new_tokens, decoder.config.max_seq_len)
    return _stream(decoder, prompts, options, eos_id, budgets)


def plan_budgets(prompt_lengths: Sequence[int], max_new_tokens: int | None, max_seq_len: int) -> list[int]:
    """Returns how many new tokens each prompt may get.

    Raises:
        UserError: There is no prompt, one is empty, or what was asked does not fit the context.
    """
    if not prompt_lengths:
        raise UserError("no prompt to continue")
    budgets = []
    for index, length in enumerate(prompt_lengths, start=1):
        room = max_seq_len - length
        if length == 0:
            raise UserError(f"prompt {index} has no token; begin it with bos")
        if room < (max_new_tokens or 1):
            remedy = f"ask for at most {room:,} new tokens" if room > 0 else "shorten the prompt"
            raise UserError(
                f"prompt {index} has {length:,} tokens, and {max_new_tokens or 1:,} more do not fit the model's "
                f"context of {max_seq_len:,}: {remedy}"
            )
        budgets.append(max_new_tokens or min(DEFAULT_NEW_TOKENS, room))
    return budgets


def _stream(
    decoder: Decoder, prompts: Sequence[Sequence[int]], options: GenerateOptions, eos_id: int, budgets: list[int]
) -> Iterator[Token]:
    texts = [list(prompt) for prompt in prompts]
    generators = _build_generators(texts, options.seed)
    weight = decoder.output_weight
    cache = None
    if options.has_cache:
        num_slots = max(len(text) + budget for text, budget in zip(texts, budgets, strict=True))
        cache = KVCache(decoder.config, len(texts), num_slots, weight.device, weight.dtype)
    fresh = texts  # what the model has not seen yet
    is_live = [True] * len(texts)
    while any(is_live):
        logits = _next_logits(decoder, fresh if cache is not None else texts, cache)
        fresh = []
        for index, text in enumerate(texts):
            if not is_live[index]:
                fresh.append([])  # the row stays in the batch; nobody reads what it says
                continue
            token = sample_token(logits[index], options.sampling, generators[index])
            text.append(token)
            is_live[index] = token != eos_id and len(text) < len(prompts[index]) + budgets[index]
            fresh.append([token] if is_live[index] else [])
            yield Token(index, token, is_last=not is_live[index])


def _build_generators(texts: Sequence[Sequence[int]], seed: int) -> list[torch.Generator]:
    num_before: Counter[str] = Counter()
    generators = []
    for text in map(str, texts):
        digest = hashlib.sha256(f"{seed} {num_before[text]} {text}".encode()).digest()
        generators.append(torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1))
        num_before[text] += 1
    return generators


@torch.no_grad()
def _next_logits(decoder: Decoder, texts: Sequence[Sequence[int]], cache: KVCache | None) -> Float[Tensor, "B V"]:
    """Returns the logits after the last token of each text, which follows what the cache holds of it."""
    device = decoder.output_weight.device
    lengths = torch.tensor([len(text) for text in texts], device=device)
    input_ids = torch.zeros(
        (len(texts), max(map(len, texts))), dtype=torch.int64
    )  # padded on the right: never attended
    for row, text in zip(input_ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    logits: Tensor = decoder(input_ids.to(device), cache=cache, head=partial(_project_last, lengths=lengths))
    if cache is not None:
        cache.advance(lengths)
    return logits


def _project_last(
    hidden: Float[Tensor, "B S D"], weight: Float[Tensor, "V D"], lengths: Int64[Tensor, " B"]
) -> Float[Tensor, "B V"]:
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1] @ weight.t()
