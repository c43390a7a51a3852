"""A feed-forward part of the tests: a mixture of experts, each of which sees every token.

It has what no part of the product has yet: weights of three dimensions, groups and initial values of its own, an
auxiliary loss, counts for the log, and blocks that are not all alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from genesis.model.feed_forward import DenseConfig, FeedForward, FeedForwardConfig
from genesis.model.initial import InitialValues
from genesis.model.part import ParameterGroup, Statistics

EXPERTS, ROUTERS = ParameterGroup("experts", "matrix"), ParameterGroup("routers", "vector")


@dataclass(frozen=True)
class MixtureConfig(FeedForwardConfig):
    """The first `num_dense_layers` blocks are dense.

    Args:
        num_experts: Experts of a block.
        ffn_dim: Width inside an expert.
        num_dense_layers: Blocks without experts.
        loss_weight: Of the auxiliary loss.
    """

    num_experts: int
    ffn_dim: int
    num_dense_layers: int = 0
    loss_weight: float = 0.1

    def build(self, dim: int, layer: int) -> FeedForward:
        return DenseConfig(self.ffn_dim).build(dim, layer) if layer < self.num_dense_layers else Mixture(self, dim)


class Mixture(FeedForward):
    def __init__(self, config: MixtureConfig, dim: int) -> None:
        super().__init__()
        self.loss_weight = config.loss_weight
        self.router = nn.Parameter(torch.empty(config.num_experts, dim))
        self.up = nn.Parameter(torch.empty(config.num_experts, config.ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(config.num_experts, dim, config.ffn_dim))

    def init_weights(self, initial: InitialValues) -> None:
        nn.init.zeros_(self.router)
        initial.fill("up", self.up)
        initial.fill_residual("down", self.down)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        return {"router": ROUTERS, "up": EXPERTS, "down": EXPERTS}

    @property
    def flops_per_token(self) -> int:
        return 6 * (self.router.numel() + self.up.numel() + self.down.numel())

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Statistics]:
        scores = linear(x, self.router)
        inner = silu(torch.einsum("...d,efd->...ef", x, self.up))
        out = torch.einsum("...ef,edf,...e->...d", inner, self.down, scores.softmax(-1))
        # Sums over tokens, each token by itself: micro-batches and ranks do not change them.
        loss_sum = self.loss_weight * (scores.float().logsumexp(-1) - 1.0).square().sum()
        load = torch.nn.functional.one_hot(x.detach()[..., : len(self.router)].argmax(-1), len(self.router))
        return out, Statistics({"load_tokens": load.flatten(0, -2).sum(0)}, loss_sum)
