"""Builds the optimizer of a model: assigns each parameter to a group and its algorithm."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from torch import nn

from genesis.base.errors import UserError
from genesis.model.part import ADAPTERS, EMBEDDINGS, HEAD, MATRICES, VECTORS, ParameterGroup
from genesis.optim.optimizer import GroupedOptimizer

NO_DECAY: Final = 0.0
"""The weight decay of adapters, if none is given: it would pull their update to zero, which is the base."""
_OF_ADAPTERS: Final = ("adapter_lr", "adapter_weight_decay")


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest. Learning rates are the peaks.

    Args:
        name: `adamw` or `muon`.
        lr: AdamW's learning rate.
        betas: Decay of AdamW's first and second moment.
        eps: Added to the root of AdamW's second moment.
        weight_decay: AdamW's weight decay of matrices; vectors (norms, biases) are never decayed.
        decayed: Whether the embedding table decays with the matrices.
        muon_lr: Muon's learning rate.
        muon_momentum: Muon's momentum (Nesterov's).
        muon_weight_decay: Muon's weight decay.
        adapter_lr: AdamW's learning rate of adapters; by default `lr`, which replaces it on the command line.
        adapter_weight_decay: Weight decay of adapters; by default none, and a run that continues keeps its own.
        muon_lr_scaling: The factor of `muon_lr` for a matrix shape: `original`, or `match_rms_adamw`, under which
            AdamW's learning rates can be used.

    Raises:
        UserError: A value is out of its range.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decayed: Literal["matrices", "matrices_and_embeddings"] = "matrices"
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.1
    muon_lr_scaling: Literal["original", "match_rms_adamw"] = "original"
    adapter_lr: float | None = None
    adapter_weight_decay: float | None = None

    def __post_init__(self) -> None:
        for name in (*("lr", "eps", "weight_decay", "muon_lr", "muon_weight_decay"), *_OF_ADAPTERS):
            if getattr(self, name) is not None and not getattr(self, name) >= 0.0:
                raise UserError(f"optimizer.{name} is {getattr(self, name)}: it must be at least 0")
        for name, value in (("betas", self.betas[0]), ("betas", self.betas[1]), ("muon_momentum", self.muon_momentum)):
            if not 0.0 <= value < 1.0:
                raise UserError(f"optimizer.{name} has {value}: it must be at least 0 and below 1")


def read_adapter_decay(recipe: Mapping[str, Any]) -> float:
    """Returns the weight decay of adapters in the recipe of a checkpoint; if it has none, that of matrices."""
    options = (recipe.get("model") or {}).get("optimizer") or {}
    defaults = OptimizerOptions()
    name = "muon_weight_decay" if options.get("name") == "muon" else "weight_decay"
    given = options.get("adapter_weight_decay")
    return float(options.get(name, getattr(defaults, name)) if given is None else given)


class GroupedModule(Protocol):
    """A module that knows the group of each of its parameters, as `genesis.model.decoder.Decoder` does."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields every parameter by its name."""

    def parameter_groups(self) -> Mapping[str, ParameterGroup]:
        """Returns the group of each parameter by its name."""


def build_optimizer(model: GroupedModule, options: OptimizerOptions) -> GroupedOptimizer:
    """Builds the optimizer of a model's trainable parameters, in the groups that its parts name.

    The four usual groups come first, in the order of checkpoints: `matrices`, the only group for Muon, `head`
    (the output weight if it is not the embedding table), `embeddings` and `vectors`. Additional groups of parts follow.

    Muon treats a parameter of three dimensions as a stack of matrices along the first, such as one for each expert.

    Raises:
        UserError: Muon is chosen, and a part has matrices of other dimensions.
    """
    # The order is part of the format of checkpoints: Lightning's states go by the positions of groups and parameters.
    groups: dict[ParameterGroup, list[nn.Parameter]] = {MATRICES: [], HEAD: [], EMBEDDINGS: [], VECTORS: []}
    group_of = model.parameter_groups()
    for name, parameter in model.named_parameters():
        group = group_of[name]
        if not parameter.requires_grad:
            continue
        groups.setdefault(group, []).append(parameter)
        if options.name == "muon" and group.kind == "matrix" and parameter.ndim not in (2, 3):
            raise UserError(
                f"optimizer.name is 'muon', which updates matrices and stacks of matrices, and {name} has "
                f"{parameter.ndim} dimensions: use adamw"
            )
    # Beside adapters, whose base is frozen, the only vectors are DoRA's magnitudes.
    of_adapters = (ADAPTERS, VECTORS) if groups.get(ADAPTERS) else ()
    return GroupedOptimizer(
        [
            {"name": group.name, "params": params, **_group_options(group, options), **_adapter_options(group, options)}
            if group in of_adapters
            else {"name": group.name, "params": params, **_group_options(group, options)}
            for group, params in groups.items()
            if params
        ]
    )


def _adapter_options(group: ParameterGroup, options: OptimizerOptions) -> dict[str, Any]:
    """Returns what differs for the parameters of adapters."""
    has_muon = options.name == "muon" and group.kind == "matrix"
    rate = {} if has_muon or options.adapter_lr is None else {"lr": options.adapter_lr}
    decay = NO_DECAY if options.adapter_weight_decay is None else options.adapter_weight_decay
    return rate if group.kind == "vector" else {**rate, "weight_decay": decay}


def _group_options(group: ParameterGroup, options: OptimizerOptions) -> dict[str, Any]:
    if group.kind == "matrix" and options.name == "muon":
        return {
            "algorithm": "muon",
            "lr": options.muon_lr,
            "momentum": options.muon_momentum,
            "weight_decay": options.muon_weight_decay,
            "adjust_lr_fn": options.muon_lr_scaling,
        }
    is_decayed = group.kind in ("matrix", "head") or (
        group.kind == "embedding" and options.decayed == "matrices_and_embeddings"
    )
    return {
        "algorithm": "adamw",
        "lr": options.lr,
        "betas": options.betas,
        "eps": options.eps,
        "weight_decay": options.weight_decay if is_decayed else 0.0,
    }
