"""RMSNorm, the norm before or after each part.

B  sequences of a micro-batch     S  tokens of a sequence     D  width of what is normalised
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm

from genesis.base.device import kind_of
from genesis.base.errors import UserError
from genesis.model.cut import MatrixShares, held
from genesis.model.initial import InitialValues
from genesis.model.part import VECTORS, ParameterGroup, Part


@dataclass(frozen=True)
class NormConfig:
    """RMSNorm.

    Args:
        eps: Added to the mean square.
        placement: Whether the norms of a block apply to the inputs of its parts (`before`), their outputs (`after`), or
            `both`, each with a weight of its own.
        has_offset: Whether a norm scales by 1 plus its weight, which then begins at 0, as in Qwen3-Next.

    Raises:
        UserError: A value is invalid.
    """

    eps: float = 1e-5
    placement: str = "before"
    has_offset: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.eps < math.inf:
            raise UserError(f"norm_eps is {self.eps}: it must be above 0 and finite")
        if self.placement not in ("before", "after", "both"):
            raise UserError(f"placement of norms is {self.placement!r}: it must be 'before', 'after' or 'both'")

    def build(self, dim: int) -> "RMSNorm":
        """Builds the norm of vectors of `dim` elements."""
        return RMSNorm(dim, self.eps, has_offset=self.has_offset)


class RMSNorm(Part):
    """Divides by the root of the mean square, then scales each dimension.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4.
    """

    draws_random_numbers = False

    def __init__(self, dim: int, eps: float, *, has_offset: bool = False) -> None:
        super().__init__()
        self.eps, self.has_offset = eps, has_offset
        self.weight = nn.Parameter(torch.ones(dim))
        self._ranks: MatrixShares | None = None

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the weight, so that the norm scales by one."""
        nn.init.constant_(self.weight, 0.0 if self.has_offset else 1.0)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of the weight."""
        return {"weight": VECTORS}

    def share_matrices(self, ranks: MatrixShares) -> None:
        """Gives each rank some of the dimensions of the vectors that are normalised."""
        self._ranks = ranks
        ranks.cut(self, "weight")

    @property
    def flops_per_token(self) -> int:
        """Returns 0, because a norm multiplies no matrix."""
        return 0

    def forward(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        """Returns `x` normalised over its last dimension."""
        out: Tensor
        if self._ranks is not None:
            return self._normalise_part(x, self._ranks)
        # In float32: bfloat16 would round the sum.
        weight = 1.0 + self.weight.float() if self.has_offset else self.weight
        # torch.compile itself fuses torch's own form into few passes.
        is_eager_cpu = kind_of(x.device) == "cpu" and not torch.compiler.is_compiling()
        if is_eager_cpu and x.dtype == weight.dtype == torch.float32:
            out = _RMSNormCPU.apply(x, weight, self.eps)  # type: ignore[no-untyped-call]  # torch's
        elif self.has_offset:
            out = rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)
        elif kind_of(x.device) != "cpu" and x.dtype != weight.dtype:
            # The fused kernel takes one dtype: that which autocast of torch 2.12 and later chooses by itself. Without
            # the casts torch 2.11 computes norms of queries and keys in separate operations.
            wide = torch.promote_types(x.dtype, weight.dtype)
            out = rms_norm(x.to(wide), weight.shape, weight.to(wide), self.eps)
        else:
            out = rms_norm(x, weight.shape, weight, self.eps)
        return out

    def _normalise_part(self, x: Float[Tensor, "B S D"], ranks: MatrixShares) -> Float[Tensor, "B S D"]:
        """Returns this rank's dimensions of vectors that ranks share."""
        weight = 1.0 + held(self.weight).float() if self.has_offset else held(self.weight)
        squares = ranks.sum(x.float().square().sum(-1, keepdim=True))
        scale = torch.rsqrt(squares / (x.shape[-1] * ranks.size) + self.eps)
        return (x.float() * scale * weight).to(x.dtype)


class _RMSNormCPU(torch.autograd.Function):
    """RMSNorm in few passes over memory; on CPU torch's own consists of separate operations at four times the cost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        (grad,) = grads
        normed = x * scale
        products = (grad * normed).flatten(0, -2)
        is_trained = ctx.needs_input_grad[1]  # a frozen model with adapters needs no such gradient
        with torch.autocast("cpu", enabled=False):
            grad_weight = products.new_ones(products.shape[0]) @ products if is_trained else None
            inner = (products @ weight).view(scale.shape).div_(-x.shape[-1])
        return (grad * weight).addcmul_(normed, inner).mul_(scale), grad_weight, None
