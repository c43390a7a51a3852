"""The log-probabilities of a prompt's own tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from genesis.model.decoder import Decoder

_CHUNK_TOKENS = 256
"""Number of positions whose logits are computed at a time: all logits of a long prompt would take gigabytes."""


class ScoredToken(NamedTuple):
    """A token of a prompt.

    `log_prob` and `top_logprobs` (most likely first) are natural logarithms of the model's distribution after the
    tokens before it. The first token has no log-probability.
    """

    id: int
    log_prob: float | None
    top_logprobs: tuple[tuple[int, float], ...]


@torch.no_grad()
def score_prompt(decoder: Decoder, ids: Sequence[int], num_top_logprobs: int) -> list[ScoredToken]:
    """Returns each token of a prompt with its log-probability.

    Args:
        decoder: The model, in evaluation mode.
        ids: The ids of the prompt: at least one, at most the model's context.
        num_top_logprobs: Number of the most likely tokens at each position, with their log-probabilities.
    """
    first = ScoredToken(ids[0], None, ())
    if len(ids) == 1:
        return [first]
    tokens = torch.tensor([list(ids)], device=decoder.output_weight.device)

    def score(hidden: Float[Tensor, "1 S D"], weight: Float[Tensor, "V D"]) -> list[list[float]]:
        figures: list[list[float]] = []
        num_top = min(num_top_logprobs, weight.shape[0])
        for start in range(0, len(ids) - 1, _CHUNK_TOKENS):
            stop = min(start + _CHUNK_TOKENS, len(ids) - 1)
            log_probs = torch.nn.functional.linear(hidden[0, start:stop], weight).float().log_softmax(dim=1)
            own = log_probs.gather(1, tokens[0, start + 1 : stop + 1].unsqueeze(1))
            values, places = log_probs.topk(num_top, dim=1)
            figures += torch.cat([own.double(), places.double(), values.double()], dim=1).cpu().tolist()
        return figures

    scored = [first]
    for token, (log_prob, *top) in zip(ids[1:], decoder(tokens, head=score), strict=True):
        half = len(top) // 2
        scored.append(ScoredToken(token, log_prob, tuple(zip(map(int, top[:half]), top[half:], strict=True))))
    return scored
