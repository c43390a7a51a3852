"""Samples tokens for the rows of a batch, on the device that holds the logits, and from each row's own seed.

A token is found with one uniform number in the cumulative sum of weights that are whole numbers. Sums of whole numbers
have no rounding, so that the token does not depend on the other rows, on the device's order of summation, or on how
equal weights are sorted.

B  rows of a batch     V  vocabulary
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from genesis.base.device import send
from genesis.generate.sampling_options import SamplingOptions

_SUM_BITS = 62
"""Bits of the sum of all weights, and of a weight together with its token's id: each must fit int64."""
_LEAST_TEMPERATURE = 1e-30
"""A smaller temperature has no finite reciprocal in float32; it takes the most likely token."""

_CPU_LOGITS = 1 << 16
"""Number of logits whose data fit a CPU's caches: with all rows at once the same work takes twice as long."""


@dataclass(frozen=True)
class _Draws:
    """The rows of a batch that sample in the same way: among the most likely tokens, or from the whole vocabulary."""

    rows: Int64[Tensor, " n"] | None
    """Indices of the rows; None for all rows of the batch."""
    temperature: Float[Tensor, "n 1"]
    last_rank: Int64[Tensor, "n 1"] | None
    """The largest number of tokens that top-k keeps; None if neither top-k nor top-p is used."""
    top_p: Float64[Tensor, "n 1"]
    least_weight: Int64[Tensor, "n 1"] | None
    """The smallest weight that min-p keeps; None if no row uses min-p."""


class RowSampler:
    """Samples a token for each row of a batch, whose rows may have different options.

    The options are kept as vectors on the device. Neither building nor sampling waits for the device.

    Args:
        options: The options of each row.
        vocab_size: Number of columns of the logits.
        device: The device of the logits.
    """

    def __init__(self, options: Sequence[SamplingOptions], vocab_size: int, device: torch.device) -> None:
        self._index_bits = max(1, (vocab_size - 1).bit_length())
        self._weight_bits = _SUM_BITS - self._index_bits
        self._draws = []
        for is_ranked in (False, True):
            rows = [index for index, of_row in enumerate(options) if _needs_draw(of_row, is_ranked=is_ranked)]
            if rows:
                self._draws.append(self._build_draws(rows, options, vocab_size, device))

    def _build_draws(
        self, rows: Sequence[int], options: Sequence[SamplingOptions], vocab_size: int, device: torch.device
    ) -> _Draws:
        chosen = [options[row] for row in rows]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return send(torch.tensor(values, dtype=dtype).unsqueeze(1), device)

        last_ranks = [min(one.top_k or vocab_size, vocab_size) - 1 for one in chosen]
        least_weights = [math.ceil(one.min_p * 2**self._weight_bits) for one in chosen]
        return _Draws(
            rows=None if len(rows) == len(options) else send(torch.tensor(rows), device),
            temperature=column([max(one.temperature, _LEAST_TEMPERATURE) for one in chosen], torch.float32),
            last_rank=column(last_ranks, torch.int64) if chosen[0].is_ranked else None,
            top_p=column([one.top_p for one in chosen], torch.float64),
            least_weight=column(least_weights, torch.int64) if any(least_weights) else None,
        )

    @property
    def needs_uniforms(self) -> bool:
        """Whether any row needs a random number."""
        return bool(self._draws)

    def draw(self, logits: Float[Tensor, "B V"], uniforms: Float64[Tensor, " B"] | None) -> Int64[Tensor, " B"]:
        """Returns a token for each row. For a row with NaN or infinity the token is arbitrary, but in the vocabulary.

        A token whose logit is -infinity is never sampled.

        Args:
            logits: The logits in float32.
            uniforms: A random number in [0, 1) for each row; greedy rows ignore theirs. None if `needs_uniforms` is
                false.
        """
        tokens: Tensor = logits.max(dim=1).indices  # takes the first of equal logits; on a CPU faster than argmax
        for draws in self._draws:
            assert uniforms is not None
            if draws.rows is None:
                return self._draw(logits, uniforms.unsqueeze(1), draws)
            drawn = self._draw(logits[draws.rows], uniforms[draws.rows].unsqueeze(1), draws)
            tokens = tokens.index_copy(0, draws.rows, drawn)
        return tokens

    def _draw(
        self, logits: Float[Tensor, "n V"], uniforms: Float64[Tensor, "n 1"], draws: _Draws
    ) -> Int64[Tensor, " n"]:
        draw: Callable[..., Tensor] = self._draw_from_all if draws.last_rank is None else self._draw_by_rank
        inputs = [logits, uniforms, draws.temperature]
        if draws.last_rank is not None:
            inputs += [draws.top_p, draws.last_rank]
        if draws.least_weight is not None:
            inputs.append(draws.least_weight)
        if logits.device.type != "cpu":
            return draw(*inputs).squeeze(1)
        num_rows = max(1, _CPU_LOGITS // logits.shape[1])
        parts = zip(*(torch.split(part, num_rows) for part in inputs), strict=True)
        return torch.cat([draw(*of_part) for of_part in parts]).squeeze(1)

    def _draw_from_all(
        self, logits: Tensor, uniforms: Tensor, temperature: Tensor, least_weight: Tensor | None = None
    ) -> Int64[Tensor, "n 1"]:
        sums = self._weigh(logits, temperature, least_weight).cumsum(dim=1)
        return _find(sums, uniforms, sums[:, -1:]).clamp_(max=logits.shape[1] - 1)

    def _draw_by_rank(
        self,
        logits: Tensor,
        uniforms: Tensor,
        temperature: Tensor,
        top_p: Tensor,
        last_rank: Tensor,
        least_weight: Tensor | None = None,
    ) -> Int64[Tensor, "n 1"]:
        last = logits.shape[1] - 1
        ranked = self._rank(self._weigh(logits, temperature, least_weight))
        sums = ((1 << self._weight_bits) - (ranked >> self._index_bits)).cumsum(dim=1)
        total = sums.gather(1, last_rank)
        limit = torch.where(top_p < 1.0, (top_p * total.double()).ceil().to(torch.int64), total)
        last_rank = torch.searchsorted(sums, limit.clamp_(min=1)).clamp_(max=last)
        rank = _find(sums, uniforms, sums.gather(1, last_rank)).clamp_(max=last)
        return ranked.gather(1, rank) & ((1 << self._index_bits) - 1)

    def _weigh(
        self, logits: Float[Tensor, "n V"], temperature: Float[Tensor, "n 1"], least: Int64[Tensor, "n 1"] | None
    ) -> Int64[Tensor, "n V"]:
        """Returns each token's probability as a whole number; 0 for tokens that are never sampled, and for NaN."""
        # The largest logit becomes 0, so that a tiny temperature makes no infinity of it.
        scaled = (logits - logits.amax(dim=1, keepdim=True)).div_(temperature)
        weights = scaled.exp_().nan_to_num_(0.0).mul_(2.0**self._weight_bits).to(torch.int64)
        # The most likely token has the largest weight there is, so that min-p is a bound that no sum enters.
        return weights if least is None else weights.mul_(weights >= least)

    def _rank(self, weights: Int64[Tensor, "n V"]) -> Int64[Tensor, "n V"]:
        """Returns sort keys, most likely first: the largest weight minus the token's, with the id in the lowest bits.

        No two keys are equal: of tokens with equal weights the lower id comes first, with any sorting algorithm.
        """
        ids = torch.arange(weights.shape[1], device=weights.device)
        keys = ((1 << self._weight_bits) - weights).bitwise_left_shift_(self._index_bits).bitwise_or_(ids)
        if keys.device.type != "cpu":
            return keys.sort(dim=1).values
        keys.numpy().sort(axis=1)  # sorts in place, and is many times as fast as torch's sort
        return keys


def _needs_draw(options: SamplingOptions, *, is_ranked: bool) -> bool:
    return not options.is_greedy and options.is_ranked == is_ranked


def _find(
    sums: Int64[Tensor, "n V"], uniforms: Float64[Tensor, "n 1"], total: Int64[Tensor, "n 1"]
) -> Int64[Tensor, "n 1"]:
    """Returns the first index whose cumulative sum exceeds `uniforms` times `total`."""
    # The product may round up to the total, which no cumulative sum exceeds.
    target = torch.minimum((uniforms * total.double()).to(torch.int64), total - 1)
    return torch.searchsorted(sums, target, right=True)
