"""From a model to its optimizer: which parameter is updated how."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from genesis.errors import UserError
from genesis.optim.optimizer import GroupedOptimizer


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest. Learning rates are the peaks.

    Args:
        name: `adamw` or `muon`.
        lr: AdamW's learning rate.
        betas: Decay of AdamW's first and second moment.
        eps: Added to the root of AdamW's second moment.
        weight_decay: AdamW's, of matrices; vectors (norms, biases) are never decayed.
        decayed: Whether the embedding table decays with the matrices.
        muon_lr: Muon's learning rate.
        muon_momentum: Muon's momentum (Nesterov's).
        muon_weight_decay: Muon's.
        muon_lr_scaling: By what `muon_lr` is multiplied for a shape: `original`, or `match_rms_adamw`, under which
            AdamW's learning rates serve.

    Raises:
        UserError: A value that no run can use.
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

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "muon_lr", "muon_weight_decay"):
            if not getattr(self, name) >= 0.0:
                raise UserError(f"optimizer.{name} is {getattr(self, name)}: it must be at least 0")
        for name, value in (("betas", self.betas[0]), ("betas", self.betas[1]), ("muon_momentum", self.muon_momentum)):
            if not 0.0 <= value < 1.0:
                raise UserError(f"optimizer.{name} has {value}: it must be at least 0 and below 1")


def build_optimizer(model: nn.Module, options: OptimizerOptions) -> GroupedOptimizer:
    """Builds the optimizer of a model's trainable parameters, in up to four named groups.

    `matrices` are the blocks' weights, `head` the output weight where it is not the embedding table, `embeddings` the
    table, `vectors` everything of one dimension. Only `matrices` may be Muon's: the rows of a table or of a head belong
    to tokens.
    """
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    head = id(getattr(model, "output_weight", None))
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "head": [], "embeddings": [], "vectors": []}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in tables:
            groups["embeddings"].append(parameter)
        elif parameter.ndim < 2:
            groups["vectors"].append(parameter)
        else:
            groups["head" if id(parameter) == head else "matrices"].append(parameter)
    return GroupedOptimizer(
        [{"name": name, "params": params, **_group_options(name, options)} for name, params in groups.items() if params]
    )


def _group_options(name: str, options: OptimizerOptions) -> dict[str, Any]:
    if name == "matrices" and options.name == "muon":
        return {
            "algorithm": "muon",
            "lr": options.muon_lr,
            "momentum": options.muon_momentum,
            "weight_decay": options.muon_weight_decay,
            "adjust_lr_fn": options.muon_lr_scaling,
        }
    is_decayed = name in ("matrices", "head") or (name == "embeddings" and options.decayed == "matrices_and_embeddings")
    return {
        "algorithm": "adamw",
        "lr": options.lr,
        "betas": options.betas,
        "eps": options.eps,
        "weight_decay": options.weight_decay if is_decayed else 0.0,
    }
