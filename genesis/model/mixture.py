"""A mixture of experts: the feed-forward part in which each token is processed by few of many experts.

N, T  tokens, in any leading dimensions     K  experts of a token     G  experts     D  model width
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, Self

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import linear

from genesis.base.errors import UserError, numbered
from genesis.model.cut import find_indivisible
from genesis.model.dispatch import combine, sort_by_expert, spread
from genesis.model.experts import Experts
from genesis.model.feed_forward import Dense, FeedForward, FeedForwardConfig
from genesis.model.initial import InitialValues
from genesis.model.part import VECTORS, ParameterGroup, Part, Statistics, check_counts

SCORES: Final = ("softmax", "sigmoid")
MAX_EXPERTS: Final = 1 << 16
ROUTERS: Final = ParameterGroup("routers", "head")
LOAD: Final = "load_tokens"
"""The figure of a mixture with the number of counted tokens that each expert sees."""
ENTROPY: Final = "router_entropy_nats"
"""The figure of a mixture with the entropy of the router's scores, a sum over the counted tokens."""
_TINY: Final = 1e-20  # DeepSeek-V3's, for sigmoid scores that are all zero


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
        top_groups: Number of groups that a token uses.
        group_top: Number of a group's best experts whose scores are added up as the score of the group.
        num_dense_layers: Number of first layers that are dense.
        mixture_every: Of the other layers, those whose number, counted from 1, is a multiple of this are mixtures.
        dense_ffn_dim: Width inside a dense layer; None if every layer is a mixture.
        has_balance_bias: Whether a bias for each expert, which only the choice of experts sees, balances their loads.
            After each window that was not skipped it grows for experts with less than the mean load.
        balance_bias_rate: The size of a step of that bias.
        balance_loss: The factor of the balance loss of each row of text.
        z_loss: The factor of the squared logarithm of the router's partition function.
        has_biases: Whether the router and the three products of routed experts have biases.
        gate_limit: The limit of GPT-OSS's clamped activation in routed experts
            (`genesis.model.expert_products.activate`); None for SwiGLU.

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
    group_top: int = 2
    num_dense_layers: int = 0
    mixture_every: int = 1
    dense_ffn_dim: int | None = None
    has_balance_bias: bool = False
    balance_bias_rate: float = 0.001
    balance_loss: float = 0.0
    z_loss: float = 0.0
    has_biases: bool = False
    gate_limit: float | None = None

    def __post_init__(self) -> None:
        check_counts(self, may_be_zero=("num_dense_layers",))
        if self.num_experts > MAX_EXPERTS:
            raise UserError(f"num_experts is {self.num_experts}: it must be at most {MAX_EXPERTS:,}")
        if self.scores not in SCORES:
            raise UserError(f"scores is {self.scores!r}: it must be {' or '.join(map(repr, SCORES))}")
        if self.has_shared_gate and self.shared_ffn_dim is None:
            raise UserError("has_shared_gate is true, but there is no shared expert: give shared_ffn_dim")
        for name in ("routed_scale", "balance_bias_rate", "gate_limit"):
            value = getattr(self, name)
            if value is not None and not (value > 0.0 and math.isfinite(value)):
                raise UserError(f"{name} is {value}: it must be a finite number above 0")
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
                f"of {numbered(num_layers, 'layers')} is a mixture: lower them"
            )
        if first > 0 and self.dense_ffn_dim is None:
            raise UserError("layer 0 is dense: give dense_ffn_dim, the width inside a dense layer")

    def is_mixture(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, is a mixture."""
        return layer >= self.num_dense_layers and (layer + 1) % self.mixture_every == 0

    def find_uncut(self, num_ranks: int) -> str | None:
        """Returns the width of dense layers if the ranks do not divide it; mixtures see this rank's tokens, uncut."""
        return (
            None if self.dense_ffn_dim is None else find_indivisible({"dense_ffn_dim": self.dense_ffn_dim}, num_ranks)
        )

    def build(self, dim: int, layer: int) -> FeedForward:
        """Builds the mixture or the dense part of a layer."""
        if self.is_mixture(layer):
            return Mixture(self, dim)
        assert self.dense_ffn_dim is not None, "the decoder's configuration has checked its layers"
        return Dense(dim, self.dense_ffn_dim)


class Routing(NamedTuple):
    """The experts of each token."""

    experts: Int64[Tensor, "T K"]
    weights: Float[Tensor, "T K"]
    """The factors of the experts' outputs, in float32."""
    statistics: Statistics | None
    """The statistics of the counted tokens, if they were asked for."""


class Router(Part):
    """Scores every expert for every token and chooses the best.

    It computes in float32 under any precision: its parameters keep their dtype when a model is cast, and autocast does
    not reach it.

    Args:
        config: The options of the mixture.
        dim: Model width.

    Attributes:
        sum_over_row: Adds what each rank has counted of its tokens of a row, where ranks share rows; None elsewhere.

    References:
        Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538. Wang et al., Auxiliary-Loss-Free Load
        Balancing, arXiv:2408.15664. DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, section 2.1.2. Zoph et al., ST-MoE,
        arXiv:2202.08906, equation 5.
    """

    draws_random_numbers = False
    keeps_float32 = True
    bias: nn.Parameter | None
    balance_bias: nn.Parameter | None

    def __init__(self, config: MixtureConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, dim, dtype=torch.float32))
        bias = torch.empty(config.num_experts, dtype=torch.float32)
        self.register_parameter("bias", nn.Parameter(bias) if config.has_biases else None)
        # A parameter without a gradient, so that ranks compare it and shard it as they do with parameters.
        balance = nn.Parameter(torch.empty_like(bias), requires_grad=False) if config.has_balance_bias else None
        self.register_parameter("balance_bias", balance)
        self.sum_over_row: Callable[[Tensor], Tensor] | None = None

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the weight; biases are zero."""
        initial.fill("weight", self.weight)
        for bias in (self.bias, self.balance_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.to(dtype)` casts by this method; a rounded bias would no longer add up its small steps.
        def apply(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]  # torch's
        return self

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of the weight, whose rows belong to experts as those of a head belong to tokens."""
        biases = [name for name in ("bias", "balance_bias") if getattr(self, name) is not None]
        return {"weight": ROUTERS} | dict.fromkeys(biases, VECTORS)

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the weight."""
        return 6 * self.weight.numel()

    def forward(self, x: Float[Tensor, "*T D"], counted: Bool[Tensor, "*T"] | None = None) -> Routing:
        """Returns the experts of each token.

        Args:
            x: The tokens; the last dimension before the width is that of a row of text.
            counted: The tokens in the statistics; None for no statistics.
        """
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = linear(x.to(dtype), self.weight.to(dtype), bias).view(-1, config.num_experts)
            scores = logits.sigmoid() if config.scores == "sigmoid" else logits.softmax(-1)
            experts = self._choose(scores.detach())
            weights = scores.gather(1, experts)
            if config.has_normalized_weights:
                weights = weights / (weights.sum(1, keepdim=True) + _TINY)
            weights = weights * config.routed_scale
            statistics = None if counted is None else self._count(logits, scores, experts, counted)
        return Routing(experts, weights, statistics)

    def _choose(self, scores: Float[Tensor, "T G"]) -> Int64[Tensor, "T K"]:
        """Returns the best experts by score and balance bias, within the best groups."""
        config = self.config
        if self.balance_bias is not None:
            scores = scores + self.balance_bias
        if config.top_groups < config.num_groups:
            by_group = scores.view(-1, config.num_groups, config.num_experts // config.num_groups)
            best = by_group.topk(min(config.group_top, by_group.shape[2]), dim=2).values.sum(2)
            left = best.topk(config.top_groups, dim=1).indices
            is_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, left, False)
            scores = by_group.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)
        return scores.topk(config.top_k, dim=1).indices

    def _count(
        self,
        logits: Float[Tensor, "T G"],
        scores: Float[Tensor, "T G"],
        experts: Int64[Tensor, "T K"],
        counted: Bool[Tensor, "*T"],
    ) -> Statistics:
        config = self.config
        is_counted = counted.flatten()
        mask = is_counted.to(logits.dtype)
        used = is_counted.to(torch.int64).unsqueeze(1).expand_as(experts)
        load = used.new_zeros(config.num_experts).scatter_add_(0, experts.flatten(), used.flatten())
        shares = scores / (scores.sum(1, keepdim=True) + _TINY) if config.scores == "sigmoid" else scores
        entropies = torch.special.entr(shares.detach()).sum(1)
        losses: list[Tensor] = []
        if config.z_loss:
            losses.append(config.z_loss * (logits.logsumexp(1).square() * mask).sum())
        if config.balance_loss:
            num_rows = counted.shape[:-1].numel()
            losses.append(config.balance_loss * self._sum_balance(shares, experts, mask.view(num_rows, -1)))
        return Statistics(
            {LOAD: load, ENTROPY: (entropies * mask).sum()}, torch.stack(losses).sum() if losses else None
        )

    def _sum_balance(
        self, shares: Float[Tensor, "T G"], experts: Int64[Tensor, "T K"], mask: Float[Tensor, "B S"]
    ) -> Tensor:
        """Returns the balance loss of each row of text times its tokens, summed over the rows.

        A row's loss is the sum over experts of f * P: f is the share of the row's tokens that see the expert, relative
        to an even share, and P its mean score. No other row takes part, so that neither the micro-batch nor the number
        of ranks changes the sum.
        """
        config, num_rows = self.config, len(mask)
        used = (mask / config.top_k).unsqueeze(2).expand(*mask.shape, config.top_k)
        choices = mask.new_zeros(num_rows, config.num_experts)
        choices = choices.scatter_add_(1, experts.view(num_rows, -1), used.reshape(num_rows, -1))
        sums = (shares.view(*mask.shape, -1) * mask.unsqueeze(2)).sum(1)
        num_tokens = mask.sum(1, keepdim=True)
        if self.sum_over_row is not None:
            # Both without a gradient: it flows through `sums` alone, of which each rank adds its own tokens'.
            counts = self.sum_over_row(torch.cat((choices, num_tokens), dim=1))
            choices, num_tokens = counts[:, :-1], counts[:, -1:]
        return (config.num_experts * choices * sums / num_tokens.clamp(min=1.0)).sum()


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
        self.experts = Experts(
            *(config.num_experts, config.top_k, dim, config.ffn_dim),
            has_biases=config.has_biases,
            gate_limit=config.gate_limit,
        )
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
        rows = spread(tokens.to(self.experts.find_dtype(x)), order)
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


def find_routers(model: nn.Module) -> dict[str, Router]:
    """Returns the routers of a model by the canonical names of their mixtures."""
    return {name.rpartition(".")[0]: module for name, module in model.named_modules() if isinstance(module, Router)}


def list_figures(mixture: str, num_experts: int) -> list[str]:
    """Returns the names of the loads of a mixture's experts among the figures of a window."""
    return [f"{mixture}.{LOAD}.{expert}" for expert in range(num_experts)]
