"""The feed-forward part of a block, which a configuration chooses.

N  tokens, in any leading dimensions     D  model width     F  feed-forward width
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu, silu

from genesis.base.device import kind_of
from genesis.base.errors import UserError
from genesis.model.cut import MatrixShares, find_indivisible
from genesis.model.initial import InitialValues
from genesis.model.part import MATRICES, ParameterGroup, Part, Statistics, check_counts

_ACTIVATIONS: Final = ("silu", "gelu_tanh")


class FeedForward(Part):
    """The part of a block that processes each token by itself."""

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "*N D"], counted: Bool[Tensor, "*N"] | None = None
    ) -> tuple[Float[Tensor, "*N D"], Statistics | None]:
        """Returns the update of the residual stream, and the statistics of the tokens, if the part has any.

        Args:
            x: The tokens.
            counted: The tokens that the statistics contain; None if nobody reads the statistics.
        """

    def share_matrices(self, ranks: MatrixShares) -> bool:
        """Cuts the freshly built part among ranks, and returns whether it is cut.

        A part that is cut gets whole rows, with `counted`, and adds to the sum of all outputs. Its statistics are this
        rank's share of those of whole rows, as of its hidden units: ranks' are added. One that is not cut gets this
        rank's tokens.

        Args:
            ranks: The ranks that share the part.
        """
        return False


class FeedForwardConfig(ABC):
    """The choice of a feed-forward part: each is a frozen dataclass of plain values that is derived from this class.

    A recipe chooses one by `model.decoder.feed_forward: {class_path: ..., init_args: {...}}`.
    """

    def check(self, num_layers: int) -> None:  # noqa: B027 - most parts are the same in every layer
        """Checks that the part can be built for every layer of a decoder.

        Raises:
            UserError: It cannot.
        """

    def find_uncut(self, num_ranks: int) -> str | None:
        """Returns what of the part `num_ranks` ranks cannot share; None if they can, or if it is not cut."""
        return None

    @abstractmethod
    def build(self, dim: int, layer: int) -> FeedForward:
        """Builds the part.

        Args:
            dim: Model width.
            layer: The block's number, from 0, for parts that are not the same in every block.
        """


@dataclass(frozen=True)
class DenseConfig(FeedForwardConfig):
    """A gated linear unit: SwiGLU, or GeGLU with another activation.

    Args:
        ffn_dim: Width of the hidden layer.
        activation: The activation of the gate: `silu`, or `gelu_tanh`, GELU as its approximation by tanh.

    Raises:
        UserError: The width is no number above 0, or there is no such activation.
    """

    ffn_dim: int
    activation: str = "silu"

    def __post_init__(self) -> None:
        check_counts(self)
        if self.activation not in _ACTIVATIONS:
            raise UserError(f"activation is {self.activation!r}: it must be {' or '.join(map(repr, _ACTIVATIONS))}")

    def find_uncut(self, num_ranks: int) -> str | None:
        """Returns the width if the ranks do not divide it."""
        return find_indivisible({"ffn_dim": self.ffn_dim}, num_ranks)

    def build(self, dim: int, layer: int) -> "Dense":
        """Builds the part, the same in every block."""
        return Dense(dim, self.ffn_dim, self.activation)


class Dense(FeedForward):
    """A gated linear unit.

    References:
        Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, equation 6.
    """

    draws_random_numbers = False

    def __init__(self, dim: int, ffn_dim: int, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the three weights."""
        initial.fill("gate.weight", self.gate.weight)
        initial.fill("up.weight", self.up.weight)
        initial.fill_residual("down.weight", self.down.weight)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of each weight."""
        return dict.fromkeys(("gate.weight", "up.weight", "down.weight"), MATRICES)

    def share_matrices(self, ranks: MatrixShares) -> bool:
        """Gives each rank some of the hidden dimensions."""
        ranks.cut_linear(self.gate, 0)
        ranks.cut_linear(self.up, 0)
        ranks.cut_linear(self.down, 1)
        return True

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the weights, each of which multiplies every token."""
        return 6 * sum(linear.weight.numel() for linear in (self.gate, self.up, self.down))

    def forward(
        self, x: Float[Tensor, "*N D"], counted: Bool[Tensor, "*N"] | None = None
    ) -> tuple[Float[Tensor, "*N D"], None]:
        """Returns down(activation(gate x) * up x), without statistics."""
        gate, up = self.gate(x), self.up(x)
        if self.activation == "gelu_tanh":
            return self.down(gelu(gate, approximate="tanh") * up), None
        # torch.compile itself keeps only what its backward reads.
        is_eager_cpu = kind_of(x.device) == "cpu" and not torch.compiler.is_compiling()
        product = _GatedCPU.apply(gate, up) if is_eager_cpu else silu(gate) * up  # type: ignore[no-untyped-call]
        return self.down(product), None


class _GatedCPU(torch.autograd.Function):
    """silu(gate) * up, whose backward computes silu(gate) again: autograd would keep it for every token and layer."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (grad,) = grads
        return torch.ops.aten.silu_backward(grad * up, gate), silu(gate).mul_(grad)
