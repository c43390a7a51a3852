"""The router of a mixture of experts: which experts see a token, with which weights, and how evenly they are used.

T  tokens, in any leading dimensions     K  experts of a token     G  experts     D  model width
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import linear

from genesis.model.initial import InitialValues
from genesis.model.part import VECTORS, ParameterGroup, Part, Statistics

if TYPE_CHECKING:
    from genesis.model.mixture import MixtureConfig

ROUTERS: Final = ParameterGroup("routers", "head")
LOAD: Final = "load_tokens"
"""The figure of a mixture with the number of counted tokens that each expert sees."""
ENTROPY: Final = "router_entropy_nats"
"""The figure of a mixture with the entropy of the router's scores, a sum over the counted tokens."""
_TINY: Final = 1e-20  # DeepSeek-V3's, for sigmoid scores that are all zero
_GROUP_TOP: Final = 2


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

    References:
        Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538. Wang et al., Auxiliary-Loss-Free Load
        Balancing, arXiv:2408.15664. DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, section 2.1.2. Zoph et al., ST-MoE,
        arXiv:2202.08906, equation 5.
    """

    draws_random_numbers = False
    keeps_float32 = True
    balance_bias: nn.Parameter | None

    def __init__(self, config: "MixtureConfig", dim: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, dim, dtype=torch.float32))
        bias = None
        if config.has_balance_bias:
            # A parameter without a gradient, so that ranks compare it and shard it as they do with parameters.
            bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False)
        self.register_parameter("balance_bias", bias)

    def init_weights(self, initial: InitialValues) -> None:
        """Initializes the weight; the balance bias is zero."""
        initial.fill("weight", self.weight)
        if self.balance_bias is not None:
            nn.init.zeros_(self.balance_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.to(dtype)` casts by this method; a rounded bias would no longer add up its small steps.
        def apply(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]  # torch's
        return self

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        """Returns the group of the weight, whose rows belong to experts as those of a head belong to tokens."""
        groups = {"weight": ROUTERS}
        return groups if self.balance_bias is None else {**groups, "balance_bias": VECTORS}

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
            logits = linear(x.to(dtype), self.weight.to(dtype)).view(-1, config.num_experts)
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
            best = by_group.topk(min(_GROUP_TOP, by_group.shape[2]), dim=2).values.sum(2)
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
        num_tokens = mask.sum(1, keepdim=True).clamp(min=1.0)
        return (config.num_experts * choices * sums / num_tokens).sum()


def find_routers(model: nn.Module) -> dict[str, Router]:
    """Returns the routers of a model by the canonical names of their mixtures."""
    return {name.rpartition(".")[0]: module for name, module in model.named_modules() if isinstance(module, Router)}


def list_figures(mixture: str, num_experts: int) -> list[str]:
    """Returns the names of the loads of a mixture's experts among the figures of a window."""
    return [f"{mixture}.{LOAD}.{expert}" for expert in range(num_experts)]
