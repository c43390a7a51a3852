"""The balance of a mixture's experts: the bias that evens out their loads, and what the log says of them.

load_tokens         counted tokens that each expert sees, in a window over all ranks
imbalance           the largest load of a layer, relative to the mean: 1 if all are equal
router entropy      the entropy of the router's scores of a token in nats: log(num_experts) if all are equal
collapse            the tokens of a layer see hardly more than `top_k` experts
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from genesis.base.errors import numbered
from genesis.model.language_model import LanguageModel
from genesis.model.mixture import ENTROPY, LOAD, Router, find_routers
from genesis_callbacks.base.local_shards import local_shards

_COLLAPSED_SHARE: Final = 0.1
"""A router has collapsed if it uses less than this share of the experts beyond `top_k`."""
_MIN_TOKENS_PER_EXPERT: Final = 8
"""Fewer tokens cannot be spread evenly, so that they say nothing about a collapse."""


class RouterCollapseWarning(UserWarning):
    """A router sends nearly all tokens to the same experts."""


def has_balance_biases(model: nn.Module) -> bool:
    """Returns whether some router has a balance bias that training changes."""
    return any(_is_balanced(router) for router in find_routers(model).values())


def _is_balanced(router: Router) -> bool:
    # The bias belongs to the weight: where the weight is frozen, as in a base under adapters, no checkpoint has it.
    return router.balance_bias is not None and router.weight.requires_grad


@torch.no_grad()
def update_balance_biases(model: nn.Module, loads: Mapping[str, Tensor]) -> None:
    """Moves the balance bias of each router a step towards equal loads. Neither communicates nor waits for the device.

    The loads are exact counts, the same on every rank, so that the biases stay the same on every rank.

    Args:
        model: The decoder.
        loads: The loads of a window over all ranks in float64, by the canonical names of the mixtures.

    References:
        Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, arXiv:2408.15664, algorithm 1.
    """
    for name, router in find_routers(model).items():
        bias = router.balance_bias
        if bias is None or not _is_balanced(router):
            continue
        load = loads[name]
        step = (load.mean() - load).sign()
        # Only differences between the biases matter; without the mean they stay near zero for ever.
        step = (step - step.mean()) * router.config.balance_bias_rate
        for local in local_shards(name, bias, "parameter"):
            (start,), (size,) = local.part.offsets, local.part.sizes
            local.data.add_(step[start : start + size].to(local.data))


def split_loads(names: Sequence[str], values: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """Returns the loads among the figures of a window, by the canonical names of the mixtures.

    Args:
        names: The names of the figures, as `genesis.model.statistics.name_figures` gives them.
        values: The figures.
        prefix: What stands before each name.

    Example:
        >>> split_loads(["a.loss_sum", "a.load_tokens.0", "a.load_tokens.1"], torch.tensor([9.0, 1.0, 2.0]))
        {'a': tensor([1., 2.])}
    """
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        figure, _, index = name.removeprefix(prefix).rpartition(".")
        mixture, _, last = figure.rpartition(".")
        if last == LOAD and index.isdecimal():
            positions.setdefault(mixture, []).append(position)
    return {mixture: values[found[0] : found[-1] + 1] for mixture, found in positions.items()}


@dataclass(frozen=True)
class LayerBalance:
    """How evenly a window used the experts of one mixture.

    Args:
        loads: The number of tokens that each expert saw.
        entropy_nats: The mean entropy of the router's scores of a token; NaN without tokens.
        top_k: The number of experts of a token.
        is_frozen: Whether the router is not trained, as under adapters.
    """

    loads: Sequence[float]
    entropy_nats: float
    top_k: int
    is_frozen: bool = False

    @property
    def imbalance(self) -> float:
        """The largest load relative to the mean; NaN without tokens."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else math.nan

    @property
    def num_used(self) -> float:
        """The number of experts that would have this unevenness if all of them were used equally."""
        total = sum(self.loads)
        return math.exp(-sum(load / total * math.log(load / total) for load in self.loads if load)) if total else 0.0

    @property
    def is_collapsed(self) -> bool:
        """Whether hardly more than `top_k` experts see the tokens, of which there are enough to judge."""
        num_experts, total = len(self.loads), sum(self.loads)
        limit = self.top_k + _COLLAPSED_SHARE * (num_experts - self.top_k)
        is_judged = self.top_k < num_experts and total >= _MIN_TOKENS_PER_EXPERT * num_experts
        return is_judged and self.num_used <= limit

    def describe_collapse(self, mixture: str, step: int) -> RouterCollapseWarning:
        """Returns the warning of a collapsed router."""
        remedy = (
            "set has_balance_bias or balance_loss, raise balance_bias_rate or balance_loss if they are set, or lower "
            "the learning rate"
        )
        if self.is_frozen:
            remedy = (
                "it is frozen, so that only what comes before it changes its choices: lower the learning rate if "
                "earlier steps used more, else this data uses few experts of the base"
            )
        return RouterCollapseWarning(
            f"the router of {mixture} has collapsed at step {step}: of {numbered(len(self.loads), 'experts')} only "
            f"about {self.num_used:.1f} are used, with top_k {self.top_k}; {remedy}"
        )


def measure_balance(decoder: LanguageModel, figures: Mapping[str, float]) -> dict[str, LayerBalance]:
    """Returns the balance of each mixture by its canonical name.

    Args:
        decoder: The decoder; of the blocks that other ranks hold, too.
        figures: The statistics of the parts in one window over all ranks, by the names of part and figure.
    """
    loads = split_loads(list(figures), torch.tensor(list(figures.values()), dtype=torch.float64))
    measured = {}
    routers = find_routers(decoder)
    for number, block in decoder.blocks_elsewhere.items():
        routers |= {f"blocks.{number}.{name}": router for name, router in find_routers(block).items()}
    for name, router in routers.items():
        if name in loads:
            load: list[float] = loads[name].tolist()
            num_tokens = sum(load) / router.config.top_k
            entropy = figures[f"{name}.{ENTROPY}"] / num_tokens if num_tokens else math.nan
            measured[name] = LayerBalance(load, entropy, router.config.top_k, not router.weight.requires_grad)
    return measured
