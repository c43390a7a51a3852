"""AdamW, by torch's fused kernel."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch.optim.adamw import adamw

from genesis.base.errors import UserError
from genesis.model.part import ParameterGroup
from genesis.optim.algorithm import Algorithm, Parts, RateProposal, check_shares


@dataclass(frozen=True, kw_only=True)
class AdamW(Algorithm):
    """AdamW for all parameters.

    Args:
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        decayed: Whether the embedding table decays with the matrices.

    References:
        Loshchilov and Hutter, Decoupled weight decay regularization, 2019, https://arxiv.org/abs/1711.05101
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    counts_steps: ClassVar[bool] = True

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decayed: Literal["matrices", "matrices_and_embeddings"] = "matrices"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps >= 0.0:
            raise UserError(f"optimizer.eps is {self.eps}: it must be at least 0")
        for beta in self.betas:
            check_shares({"betas": beta})

    def decays(self, group: ParameterGroup) -> bool:
        """Returns whether weight decay is for a group."""
        is_decayed_table = group.kind == "embedding" and self.decayed == "matrices_and_embeddings"
        return is_decayed_table or super().decays(group)

    def update_options(self) -> dict[str, Any]:
        """Returns the options with the keys of torch's own groups, so that torch's AdamW can go on from a state."""
        torchs = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}
        return {"betas": self.betas, "eps": self.eps, **torchs, "fused": True, "decoupled_weight_decay": True}

    def propose_rate(self, factor: float) -> RateProposal:
        """Returns the options for a global batch `factor` times as large, by the square-root scaling rule.

        References:
            Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, arXiv:2205.10287, definition
            5.3.

        Example:
            >>> AdamW(lr=3e-4).propose_rate(4.0).lr
            0.0006
        """
        first, second = (1.0 - factor * (1.0 - beta) for beta in self.betas)
        is_valid = 0.0 <= first < 1.0 and 0.0 <= second < 1.0
        betas = (first, second) if is_valid else None
        return RateProposal(factor, self.lr * math.sqrt(factor), betas, self.eps / math.sqrt(factor))

    def divides(self, options: Mapping[str, Any]) -> bool:
        """Returns whether the kernel is the fused one."""
        return bool(options["fused"])

    def update(self, options: Mapping[str, Any], parts: Parts) -> None:
        """Updates element by element, and adds 1 to the steps."""
        averages, squares = parts.moments
        adamw(
            parts.weights,
            parts.gradients,
            averages,
            squares,
            [],
            parts.steps,
            foreach=options["foreach"],
            fused=options["fused"],
            grad_scale=parts.divisor,
            amsgrad=False,
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=False,
        )
