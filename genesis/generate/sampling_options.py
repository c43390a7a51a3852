"""The options of sampling; this module imports no torch, so that a process that reads requests starts fast."""

import math
from dataclasses import dataclass

from genesis.base.errors import UserError


@dataclass(frozen=True)
class SamplingOptions:
    """The options that decide which tokens may be sampled.

    Args:
        temperature: Divisor of the logits; 0 takes the most likely token, with the lowest id among equal ones.
        top_k: Only the k most likely tokens; None for all.
        top_p: Only the most likely tokens that together reach this probability, after temperature and top-k. The token
            that reaches it is one of them.

    Raises:
        UserError: A value is out of its range.

    References:
        Holtzman et al., The Curious Case of Neural Text Degeneration, arXiv:1904.09751, section 3.1.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature is {self.temperature}: it must be a number of at least 0 (0: the most likely token)"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}: it must be at least 1")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def is_ranked(self) -> bool:
        """Whether a token must be among the most likely tokens to be sampled."""
        return not self.is_greedy and (self.top_k is not None or self.top_p < 1.0)
