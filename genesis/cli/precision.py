"""`trainer.precision: auto`: what a fit resolves it to, before anything is built."""

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer

from genesis.checkpoint_reference import Reference
from genesis.errors import UserError
from genesis.precision import AUTO, choose_precision, unify_precision
from genesis_callbacks.checkpoint import CheckpointError, read_manifest

PrecisionName = Literal["auto", "bf16-mixed", "32-true", "16-mixed", "bf16-true", "bf16", "32", "16", 32, 16]


class GenesisTrainer(Trainer):
    """Lightning's Trainer, which also takes `auto` as a precision.

    Args:
        precision: `auto` for `bf16-mixed` on CUDA devices that have bfloat16 and `32-true` elsewhere; a run that goes
            on keeps its own. `bf16-mixed`, `32-true`, `16-mixed` and `bf16-true` as in Lightning.
        kwargs: Of Lightning's Trainer.
    """

    def __init__(self, *, precision: PrecisionName | None = "auto", **kwargs: Any) -> None:
        resolved: Any = choose_precision("auto") if precision == AUTO else precision
        super().__init__(precision=resolved, **kwargs)


def resolve_precision(precision: Any, accelerator: Any, restored: Reference | None) -> Any:
    """Returns the precision of a run that is about to start.

    Args:
        precision: As given.
        accelerator: As given.
        restored: The checkpoint from which the run continues; its precision replaces `auto`.
    """
    if precision != AUTO:
        return precision
    recipe = None if restored is None else _read_recipe(restored)
    if recipe is None:
        return choose_precision(accelerator)
    return unify_precision({"trainer": {}} | recipe)["trainer"].get("precision")


def _read_recipe(restored: Reference) -> dict[str, Any] | None:
    """Returns the recipe in the checkpoint that is meant, as it is; None where there is none that can be read.

    Whether the checkpoint is whole is found out, and reported, when the run is restored from it.
    """
    try:
        path: Path = restored.find_checkpoint(level=None)
        recipe = read_manifest(path).recipe
    except (UserError, CheckpointError, OSError):
        return None
    return recipe or None
