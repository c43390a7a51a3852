"""Samples a token from logits: the probabilities are a pure function, and the draw uses a seeded generator.

V  vocabulary
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from genesis.errors import UserError


@dataclass(frozen=True)
class SamplingOptions:
    """Which tokens may be drawn.

    Args:
        temperature: What logits are divided by; 0 takes the most likely token.
        top_k: Only the k most likely tokens; None for all.
        top_p: Only the most likely tokens that together reach this probability.

    Raises:
        UserError: A value is out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0.0:
            raise UserError(f"temperature is {self.temperature}: it must be at least 0 (0: the most likely token)")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}: it must be at least 1")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1")


def token_probabilities(logits: Float[Tensor, " V"], options: SamplingOptions) -> Float[Tensor, " V"]:
    """Returns the probability with which each token is drawn: temperature, then top-k, then top-p of what is left.

    Top-p keeps the token that crosses the threshold, so that one always remains.

    References:
        Holtzman et al., The Curious Case of Neural Text Degeneration, arXiv:1904.09751, section 3.1.
    """
    if options.temperature == 0.0:
        return torch.zeros_like(logits).scatter_(0, logits.argmax(dim=0, keepdim=True), 1.0)
    # The largest is 0, so that a tiny temperature makes no infinity of it.
    all_probs = ((logits - logits.max()) / options.temperature).softmax(dim=0)
    if options.top_k is None and options.top_p == 1.0:
        return all_probs
    probs, order = all_probs.sort(descending=True, stable=True)
    if options.top_k is not None:
        probs[options.top_k :] = 0.0
        probs /= probs.sum()
    if options.top_p < 1.0:
        before = probs.cumsum(dim=0) - probs
        probs = probs.masked_fill(before >= options.top_p, 0.0)
        probs /= probs.sum()
    return torch.zeros_like(probs).scatter_(0, order, probs)


def sample_token(logits: Float[Tensor, " V"], options: SamplingOptions, generator: torch.Generator) -> int:
    """Returns one token, drawn on the CPU so that a seed means the same on every device."""
    probs = token_probabilities(logits.float().cpu(), options)
    return int(torch.multinomial(probs, 1, generator=generator))
