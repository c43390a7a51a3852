"""Muon: matrices move in the direction of the nearest semi-orthogonal matrix, other parameters by another algorithm."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

import torch
from jaxtyping import BFloat16
from torch import Tensor

from genesis.base.device import CPU
from genesis.base.errors import UserError
from genesis.model.part import ParameterGroup
from genesis.optim.adamw import AdamW
from genesis.optim.algorithm import Algorithm, Parts, check_shares

# The coefficients of torch's own Muon: a quintic whose slope at zero is as steep as convergence allows.
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
EPS: Final = 1e-7
NUM_STEPS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Muon(Algorithm):
    """Muon for the blocks' matrices, and for stacks of matrices such as those of experts; AdamW for the rest.

    Args:
        lr: Learning rate of the matrices.
        weight_decay: Weight decay of the matrices.
        adapter_lr: Learning rate of the matrices of adapters; by default `lr`.
        adapter_weight_decay: Weight decay of the matrices of adapters; by default none.
        momentum: Decay of the momentum (Nesterov's).
        lr_scaling: The factor of `lr` for a matrix shape: `original`, or `match_rms_adamw`, under which AdamW's
            learning rates can be used.
        others: The algorithm of embeddings, output weight, norms and biases.

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024, https://kellerjordan.github.io/posts/muon/
    """

    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    whole_matrices: ClassVar[bool] = True

    lr: float = 0.02
    momentum: float = 0.95
    lr_scaling: Literal["original", "match_rms_adamw"] = "original"
    others: Algorithm = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares({"momentum": self.momentum})
        if self.others.whole_matrices:
            raise UserError(
                f"optimizer.others is {type(self.others).__name__}, which updates whole matrices alone: give one for "
                "vectors, such as genesis.optim.AdamW"
            )

    def of(self, group: ParameterGroup) -> Algorithm:
        """Returns this algorithm for matrices, and the other one for the rest."""
        return self if group.kind == "matrix" else self.others.of(group)

    def update_options(self) -> dict[str, Any]:
        """Returns the options with the keys of torch's own groups, so that torch's Muon can go on from a state."""
        torchs = {"nesterov": True, "ns_coefficients": COEFFICIENTS, "eps": EPS, "ns_steps": NUM_STEPS}
        return {"momentum": self.momentum, **torchs, "adjust_lr_fn": self.lr_scaling}

    def update(self, options: Mapping[str, Any], parts: Parts) -> None:
        """Adds the gradients to the momentum, decays the weights, and leaves Nesterov's sum in the gradients' place."""
        (buffers,) = parts.moments
        torch._foreach_lerp_(buffers, parts.gradients, 1 - options["momentum"])
        torch._foreach_lerp_(parts.gradients, buffers, options["momentum"])
        # Decoupled decay scales only the parameter and never enters the momentum.
        torch._foreach_mul_(parts.weights, 1 - options["lr"] * options["weight_decay"])

    def direct(self, matrices: BFloat16[Tensor, "N rows columns"]) -> BFloat16[Tensor, "N rows columns"]:
        """Returns matrices with the same singular vectors and singular values near 1, by Newton-Schulz iterations."""
        if matrices.device.type == CPU:
            return _direct_on_cpu(matrices)
        a, b, c = COEFFICIENTS
        # The Frobenius norm bounds the spectral norm, which has to be at most 1.
        matrices = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
        for _ in range(NUM_STEPS):
            gram = matrices @ matrices.mT
            matrices = torch.baddbmm(matrices, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), matrices, beta=a)
        return matrices

    def step_size(self, options: Mapping[str, Any], shape: Sequence[int]) -> float:
        """Returns the negative learning rate for a shape.

        `original` (and None) scales by Jordan's sqrt(max(1, rows / columns)). `match_rms_adamw` gives updates the size
        of AdamW's, so that its learning rate and weight decay fit (Liu et al., Muon is Scalable for LLM Training, 2025,
        section 2.2).
        """
        rows, columns = shape
        if options["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        else:
            ratio = math.sqrt(max(1, rows / columns))
        return -float(options["lr"]) * ratio


def _direct_on_cpu(matrices: BFloat16[Tensor, "N rows columns"]) -> BFloat16[Tensor, "N rows columns"]:
    """Returns what `Muon.direct` returns, by products in float32, each of which is rounded to bfloat16.

    Many CPUs have no kernel for products of bfloat16, and take more than twenty times as long for them.
    """
    a, b, c = COEFFICIENTS

    def rounded(sums: Tensor) -> Tensor:
        return sums.bfloat16().float()

    matrices = rounded(matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS))
    for _ in range(NUM_STEPS):
        gram = rounded(matrices @ matrices.mT)
        factor = rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
        matrices = rounded(torch.baddbmm(matrices, factor, matrices, beta=a))
    return matrices.bfloat16()
