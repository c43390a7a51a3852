"""Lion, as a user would add it: this file is all that it needs. A recipe names it by `class_path: MODULE.Lion`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from genesis.optim import Algorithm, Parts


@dataclass(frozen=True, kw_only=True)
class Lion(Algorithm):
    """Lion for all parameters.

    Args:
        betas: Weight of the momentum in the direction, and its decay.

    References:
        Chen et al., Symbolic discovery of optimization algorithms, 2023, https://arxiv.org/abs/2302.06675, algorithm 2.
    """

    moments: ClassVar[tuple[str, ...]] = ("momentum",)

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)

    def update(self, options: Mapping[str, Any], parts: Parts) -> None:
        """Moves each element by the learning rate, in the direction of a sign."""
        (momenta,) = parts.moments
        share, decay = options["betas"]
        signs = [torch.lerp(g, m, share).sign_() for g, m in zip(parts.gradients, momenta, strict=True)]
        torch._foreach_mul_(parts.weights, 1.0 - options["lr"] * options["weight_decay"])
        torch._foreach_add_(parts.weights, signs, alpha=-options["lr"])
        torch._foreach_lerp_(momenta, parts.gradients, 1.0 - decay)
