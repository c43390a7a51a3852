"""A mixture of experts: the feed-forward part in which each token is processed by few of many experts.

N  tokens, in any leading dimensions     K  experts of a token     D  model width
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import linear

from genesis.base.errors import UserError
from genesis.model.dispatch import combine, sort_by_expert, spread
from genesis.model.experts import Experts
from genesis.model.feed_forward import Dense, FeedForward, FeedForwardConfig
from genesis.model.initial import InitialValues
from genesis.model.part import ParameterGroup, Statistics, check_counts
from genesis.model.router import ROUTERS, Router

INDEX_BYTES: Final = 8
SCORES: Final = ("softmax", "sigmoid")
MAX_EXPERTS: Final = 1 << 16


@dataclass(frozen=True)
class MixtureConfig(FeedForwardConfig):
    """A mixture of experts, in all layers or in some.

    Every token is routed, without a limit of capacity. Statistics and auxiliary losses contain the tokens of the loss:
    not padding, and no prompts whose labels are ignored.

    Args:
        num_experts: Number of routed experts.
        top_k: Number of routed experts that see a token.
        ffn_dim: Width inside a routed expert.
        shared_ffn_dim: Width inside the shared expert, which sees every token; n shared experts of width w are one of
            n * w. None for no shared expert.
        has_shared_gate: Whether a sigmoid of the token scales the shared expert's output.
        scores: `softmax` over all experts, or `sigmoid` for each expert alone.
        has_normalized_weights: Whether the weights of a token's experts are divided by their sum.
        routed_scale: The factor of the routed experts' output.
        num_groups: Number of groups of experts, of which a token uses some.
        top_groups: Number of groups that a token uses; the score of a group is the sum of its best two.
        num_dense_layers: Number of first layers that are dense.
        mixture_every: Of the other layers, those whose number, counted from 1, is a multiple of this are mixtures.
        dense_ffn_dim: Width inside a dense layer; None if every layer is a mixture.
        has_balance_bias: Whether a bias for each expert, which only the choice of experts sees, balances their loads.
            After each window that was not skipped it grows for experts with less than the mean load.
        balance_bias_rate: The size of a step of that bias.
        balance_loss: The factor of the balance loss of each row of text.
        z_loss: The factor of the squared logarithm of the router's partition function.

    Raises:
        UserError: A value is invalid.
    """

    num_experts: int
    top_k: int
    ffn_dim: int
    shared_ffn_dim: int | None = None
    has_shared_gate: bool = False
    scores: str = "softmax"
    has_normalized_weights: bool = True
    routed_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    num_dense_layers: int = 0
    mixture_every: int = 1
    dense_ffn_dim: int | None = None
    has_balance_bias: bool = False
    balance_bias_rate: float = 0.001
    balance_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, may_be_zero=("num_dense_layers",))
        if self.num_experts > MAX_EXPERTS:
            raise UserError(f"num_experts is {self.num_experts}: it must be at most {MAX_EXPERTS:,}")
        if self.scores not in SCORES:
            raise UserError(f"scores is {self.scores!r}: it must be {' or '.join(map(repr, SCORES))}")
        if self.has_shared_gate and self.shared_ffn_dim is None:
            raise UserError("has_shared_gate is true, but there is no shared expert: give shared_ffn_dim")
        for name in ("routed_scale", "balance_bias_rate"):
            if not (getattr(self, name) > 0.0 and math.isfinite(getattr(self, name))):
                raise UserError(f"{name} is {getattr(self, name)}: it must be a finite number above 0")
        for name in ("balance_loss", "z_loss"):
            if not (getattr(self, name) >= 0.0 and math.isfinite(getattr(self, name))):
                raise UserError(f"{name} is {getattr(self, name)}: it must be a finite number of at least 0")
        self._check_groups()

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups:
            raise UserError(f"num_experts {self.num_experts} is not a multiple of num_groups {self.num_groups}")
        if self.top_groups > self.num_groups:
            raise UserError(f"top_groups is {self.top_groups}: it must be at most num_groups, {self.num_groups}")
        available = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > available:
            where = "num_experts" if self.num_groups == 1 else f"the experts of top_groups {self.top_groups}"
            raise UserError(f"top_k is {self.top_k}: it must be at most {where}, {available}")

    def check(self, num_layers: int) -> None:
        """Checks that some layer is a mixture, and that dense layers have a width.

        Raises:
            UserError: Neither is a mixture of experts.
        """
        # The first mixture, without a pass over the layers: a forged configuration may have any number of them.
        first = -(-(self.num_dense_layers + 1) // self.mixture_every) * self.mixture_every - 1
        if first >= num_layers:
            raise UserError(
                f"num_dense_layers is {self.num_dense_layers} and mixture_every is {self.mixture_every}, so that none "
                f"of {num_layers} layers is a mixture: lower them"
            )
        if first > 0 and self.dense_ffn_dim is None:
            raise UserError("layer 0 is dense: give dense_ffn_dim, the width inside a dense layer")

    def is_mixture(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, is a mixture."""
        return layer >= self.num_dense_layers and (layer + 1) % self.mixture_every == 0

    def build(self, dim: int, layer: int) -> FeedForward:
        """Builds the mixture or the dense part of a layer."""
        if self.is_mixture(layer):
            return Mixture(self, dim)
        assert self.dense_ffn_dim is not None, "the decoder's configuration has checked its layers"
        return Dense(dim, self.dense_ffn_dim)


class Flight(Protocol):
    """Rows on their way to the experts of other ranks."""

    def finish(self, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Returns the outputs of all rows that were sent; `run` computes this rank's experts."""


class Exchange(Protocol):
    """The way of rows to experts on other ranks (`genesis.strategies.expert_parallel`)."""

    def send(self, rows: Tensor, counts: Tensor) -> Flight:
        """Begins to send rows that are sorted by expert, given the number of each expert's."""


class Mixture(FeedForward):
    """Routed experts, and the shared expert if there is one.

    Args:
        config: The options.
        dim: Model width.

    Attributes:
        exchange: How rows reach experts on other ranks; None if this rank has all experts.
    """

    draws_random_numbers = False
    shared: Dense | None
    shared_gate: nn.Parameter | None

    def __init__(self, config: MixtureConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self.exchange: Exchange | None = None
        self.router = Router(config, dim)
        self.experts = Experts(config.num_experts, config.top_k, dim, config.ffn_dim)
        self.shared = None if config.shared_ffn_dim is None else Dense(dim, config.shared_ffn_dim)
        self.register_parameter("shared_gate", nn.Parameter(torch.empty(1, dim)) if config.has_shared_gate else None)

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the gate of the shared expert; router and experts are parts of their own."""
        if self.shared_gate is not None:
            initial.fill("shared_gate", self.shared_gate)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of the gate of the shared expert."""
        return {} if self.shared_gate is None else {"shared_gate": ROUTERS}

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the gate of the shared expert."""
        return 0 if self.shared_gate is None else 6 * self.shared_gate.numel()

    def forward(
        self, x: Float[Tensor, "*N D"], counted: Bool[Tensor, "*N"] | None = None
    ) -> tuple[Float[Tensor, "*N D"], Statistics | None]:
        """Returns the sum of the experts' outputs, and the statistics of the counted tokens."""
        routing = self.router(x, counted)
        tokens = x.flatten(0, -2)
        order = sort_by_expert(routing.experts, self.config.num_experts)
        # Cast before the copies are made, not after.
        rows = spread(tokens.to(self.experts.find_dtype(x.device)), order)
        if self.exchange is None:
            made = self.experts(rows, order.counts)
            shared = self._run_shared(x)
        else:  # the shared expert computes while rows travel
            flight = self.exchange.send(rows, order.counts)
            shared = self._run_shared(x)
            made = flight.finish(self.experts)
        out = combine(made, routing.weights, order).view(x.shape)
        return (out if shared is None else out + shared), routing.statistics

    def _run_shared(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"] | None:
        if self.shared is None:
            return None
        shared: Tensor = self.shared(x)[0]
        return shared if self.shared_gate is None else linear(x, self.shared_gate).sigmoid() * shared
