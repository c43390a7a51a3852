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
        min_p: Only tokens with at least this share of the largest probability, after temperature and before top-k.
        presence_penalty: What the logit of a token loses if the new text has it.
        frequency_penalty: What the logit of a token loses each time that the new text has it.
        repetition_penalty: Divisor of the logit, or factor of a negative one, of a token that the prompt or the new
            text has.
        logit_bias: Tokens and what their logits gain.

    Raises:
        UserError: A value is out of its range.

    References:
        Holtzman et al., The Curious Case of Neural Text Degeneration, arXiv:1904.09751, section 3.1.
        Nguyen et al., Turning Up the Heat: Min-p Sampling, arXiv:2407.01082, section 3.
        Keskar et al., CTRL, arXiv:1909.05858, section 4.1, for the penalty of repetitions.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature is {self.temperature}: it must be a number of at least 0 (0: the most likely token)"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}: it must be at least 1")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise UserError(f"min_p is {self.min_p}: it must be from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)}: it must be a finite number")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise UserError(f"repetition_penalty is {self.repetition_penalty}: it must be above 0 and finite")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are sampled from other logits than the model's."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0) or bool(self.logit_bias)

    @property
    def is_ranked(self) -> bool:
        """Whether a token must be among the most likely tokens to be sampled."""
        return not self.is_greedy and (self.top_k is not None or self.top_p < 1.0)
