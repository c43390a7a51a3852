"""Continues texts together; each text joins and leaves the batch at any step.

Every text has a row of one key-value cache. Running texts have the first rows and new texts the rows behind them, so
that each forward sees a slice of the cache and nothing is gathered. If a text leaves, the last text takes its row.

B  texts of a forward     V  vocabulary
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from genesis.errors import UserError
from genesis.generate.sample import SamplingOptions, sample_token
from genesis.model.decoder import Decoder, KVCache

DEFAULT_NEW_TOKENS = 256
_NO_TOKEN = -1
"""In place of a token that could not be drawn."""


@dataclass(frozen=True)
class Request:
    """A text to continue.

    Args:
        prompt: Its ids, at least one.
        max_new_tokens: At most so many; None for 256 or what the context leaves, whichever is less.
        sampling: Which tokens may be drawn.
        seed: Of this text's own generator.
        num_top_logprobs: Of how many of the most likely tokens each new token brings the probabilities.
    """

    prompt: Sequence[int]
    max_new_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int = 0
    num_top_logprobs: int = 0


class NewToken(NamedTuple):
    """One new token.

    `log_prob` and `top_logprobs` (most likely first) are natural logarithms of the model's own distribution, before
    temperature, top-k and top-p. Where the model gives no numbers the text ends, and `log_prob` is NaN.
    """

    request: int
    """What `Batch.add` returned."""
    id: int
    log_prob: float
    top_logprobs: tuple[tuple[int, float], ...]
    is_last: bool


@dataclass
class _Row:
    handle: int
    request: Request
    text: list[int]
    end: int
    """Tokens of the text at which it is full."""
    generator: torch.Generator


class Batch:
    """Continues up to `num_rows` texts together. Computes on the calling thread, and is used by one at a time.

    What a text gives depends on its request, not on the others beside it, up to the rounding of other matrix shapes.

    Args:
        decoder: In evaluation mode.
        num_rows: Texts at a time.
        stop_ids: The tokens that end a text; the one that does is given out.
        num_slots: Tokens of the longest text, prompt included; None for the model's context.
        has_cache: Whether keys and values are kept, or each text is computed whole for every token.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_rows: int,
        stop_ids: Set[int],
        *,
        num_slots: int | None = None,
        has_cache: bool = True,
    ) -> None:
        assert not decoder.training, "dropout would be part of the text"
        self._decoder, self._num_rows, self._stop_ids = decoder, num_rows, frozenset(stop_ids)
        self._num_slots = decoder.config.max_seq_len if num_slots is None else num_slots
        weight = decoder.output_weight
        self._cache = (
            KVCache(decoder.config, num_rows, self._num_slots, weight.device, weight.dtype) if has_cache else None
        )
        self._rows: list[_Row] = []
        self._newcomers: list[_Row] = []
        self._num_added = 0

    @property
    def num_free(self) -> int:
        """How many more texts there is room for."""
        return self._num_rows - len(self._rows) - len(self._newcomers)

    def add(self, request: Request) -> int:
        """Takes a text in, from the next step on, and returns its handle. There must be room.

        Raises:
            UserError: The prompt is empty, or it and its new tokens are longer than the context.
        """
        assert self.num_free, "no row is free"
        (budget,) = plan_budgets([len(request.prompt)], request.max_new_tokens, self._num_slots)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        end = len(request.prompt) + budget
        row = _Row(self._num_added, request, list(request.prompt), end, generator)
        self._num_added += 1
        self._newcomers.append(row)
        return row.handle

    def remove(self, handle: int) -> None:
        """Removes a text that has not ended."""
        newcomers = [row for row in self._newcomers if row.handle != handle]
        if len(newcomers) < len(self._newcomers):
            self._newcomers = newcomers
        else:
            self._leave(next(index for index, row in enumerate(self._rows) if row.handle == handle))

    @torch.no_grad()
    def step(self) -> list[NewToken]:
        """Returns the next token of every text; those that end with it have left."""
        # Two forwards: running texts give one token each, new ones a whole prompt, and padding the former to the
        # length of a prompt would cost far more than a second call.
        num_old = len(self._rows)
        logits = []
        if num_old:
            logits.append(self._forward(0, [row.text[-1:] for row in self._rows]))
        self._rows += self._newcomers
        self._newcomers = []
        if len(self._rows) > num_old:
            logits.append(self._forward(num_old, [row.text for row in self._rows[num_old:]]))
        tokens = [
            self._draw(row, line)
            for row, line in zip(self._rows, (line for part in logits for line in part), strict=True)
        ]
        # From the end: a row that leaves is replaced by the last one, which has been visited by then.
        for index in reversed(range(len(tokens))):
            if tokens[index].is_last:
                self._leave(index)
        return tokens

    def _leave(self, index: int) -> None:
        last = self._rows.pop()
        if index < len(self._rows):
            self._rows[index] = last
            if self._cache is not None:
                self._cache.copy_row(len(self._rows), index)
        if self._cache is not None:
            self._cache.lengths[len(self._rows)] = 0  # a new text in this row starts at its first slot

    def _forward(self, start: int, fresh: Sequence[Sequence[int]]) -> Float[Tensor, "B V"]:
        """Returns the logits after the last token of the texts in the rows from `start` on.

        Args:
            start: Row of the first of them.
            fresh: Of each, the tokens that the cache does not have yet.
        """
        if self._cache is None:
            fresh = [row.text for row in self._rows[start : start + len(fresh)]]
        lengths = torch.tensor([len(tokens) for tokens in fresh])
        input_ids = torch.zeros((len(fresh), max(map(len, fresh))), dtype=torch.int64)  # padding is never attended
        for line, tokens in zip(input_ids, fresh, strict=True):
            line[: len(tokens)] = torch.tensor(tokens)
        device = self._decoder.output_weight.device
        lengths = lengths.to(device)
        cache = None if self._cache is None else self._cache.view(start, start + len(fresh))
        last = torch.arange(len(fresh), device=device) * input_ids.shape[1] + lengths - 1
        logits: Tensor = self._decoder(input_ids.to(device), cache=cache, logits_to_keep=last)
        if cache is not None:
            cache.advance(lengths)
        return logits.float().cpu()

    def _draw(self, row: _Row, logits: Float[Tensor, " V"]) -> NewToken:
        if not bool(logits.isfinite().all()):  # nothing can be drawn; the other texts go on
            return NewToken(row.handle, _NO_TOKEN, math.nan, (), is_last=True)
        token = sample_token(logits, row.request.sampling, row.generator)
        row.text.append(token)
        log_probs = logits.log_softmax(dim=0)
        top_logprobs = log_probs.topk(min(row.request.num_top_logprobs, len(log_probs)))
        return NewToken(
            row.handle,
            token,
            float(log_probs[token]),
            tuple(zip(top_logprobs.indices.tolist(), top_logprobs.values.tolist(), strict=True)),
            is_last=token in self._stop_ids or len(row.text) == row.end,
        )


def check_is_number(token: NewToken) -> None:
    """Refuses a token that could not be drawn.

    Raises:
        UserError: The model gave no numbers.
    """
    if math.isnan(token.log_prob):
        raise UserError("the model's logits are not numbers: its weights have diverged; use an earlier checkpoint")


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
                f"prompt {index} has {length:,} tokens, and {max_new_tokens or 1:,} more exceed the model's "
                f"context of {max_seq_len:,}: {remedy}"
            )
        budgets.append(max_new_tokens or min(DEFAULT_NEW_TOKENS, room))
    return budgets
