"""Adapters in a recipe of `genesis fit`: finds their base, from which a new run begins and to which saves refer."""

from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from genesis.base.errors import UserError
from genesis.generate.checkpoint_reference import LATEST, Reference
from genesis.huggingface.stored import list_nf4_tensors
from genesis.model.adapter import BaseFormat
from genesis.recipe.resolved import ResolvedRecipe
from genesis.train.adapter_base import AdapterBase, build_scope, find_adapter_base, read_format, read_start
from genesis.train.module import GenesisModule
from genesis_callbacks.base.run_directory import RunDirectory
from genesis_callbacks.checkpoint import list_committed, read_manifest


def find_base(
    recipe: ResolvedRecipe, reference: Reference | None, run_dir: Path
) -> tuple[AdapterBase | None, dict[str, Any]]:
    """Returns the base of the adapters, and the options that follow from it; None without adapters.

    A run that begins with no checkpoint of its own, or with the base, gets the weights of the base alone.

    Args:
        recipe: The recipe.
        reference: What `ckpt_path` is; None if it is not given.
        run_dir: The directory in which this run saves.

    Raises:
        UserError: The base is not found, is not the base of the adapters to continue with, or is this run itself.
    """
    if recipe.get("model.adapter") is None:
        return None, {}
    if recipe.get("checkpoint.scope.base") is not None:
        raise UserError("checkpoint.scope follows from model.adapter: leave it out, and give model.adapter.base")
    continued = None if reference is None else find_continued(reference)
    base = find_adapter_base(recipe.get("model.adapter.base"), continued)
    found: dict[str, Any] = {"model.adapter.base": str(base.path)}
    if continued is None or continued.resolve() == base.path:
        if base.path.parent == RunDirectory(run_dir.resolve()).checkpoints:
            raise UserError(
                f"run_dir is {run_dir}, the run of the base itself: give the adapters a run_dir of their own"
            )
        found |= {"ckpt_path": str(base.path), "checkpoint.restore": "weights"}
    scope = build_scope(
        base, has_magnitudes=recipe.get("model.adapter.dora"), also_train=recipe.get("model.adapter.also_train")
    )
    found["checkpoint.scope"] = {
        "base": str(scope.base),
        "in_base": list(scope.in_base),
        "not_in_base": list(scope.not_in_base),
        "base_hash": scope.base_hash,
    }
    return base, found


def note_frozen_head(recipe: ResolvedRecipe) -> None:
    """Logs that the score head of a reward model stays as it is beside adapters: a new one has random values."""
    is_frozen = recipe.get("model.adapter") is not None and "head" not in recipe.get("model.adapter.also_train")
    if is_frozen and recipe.get("model.decoder.num_scores") is not None:
        rank_zero_info(
            "the score head is frozen, and that of a model imported with --as reward_model is random: "
            "--model.adapter.also_train '[head]' trains it beside the adapters"
        )


def find_format(reference: Reference | None, *, is_fit: bool) -> BaseFormat:
    """Returns the format in which a model without adapters takes the weights of a checkpoint: float32, or NF4.

    Args:
        reference: What `ckpt_path` is; None if it is not given.
        is_fit: Whether the weights are trained.

    Raises:
        UserError: The weights are to be trained, and are in NF4.
    """
    checkpoint = None if reference is None else find_continued(reference)
    if checkpoint is None or not list_nf4_tensors(read_manifest(checkpoint)):
        return BaseFormat()
    if is_fit:
        raise UserError(
            f"{checkpoint} is a base in NF4, beside which adapters alone are trained: give --model.adapter.rank 16, or "
            "import the model with --dtype float32"
        )
    return read_format(checkpoint, read_manifest(checkpoint))


def find_continued(reference: Reference) -> Path | None:
    """Returns the checkpoint that `ckpt_path` names; None for `latest` of a run without checkpoints."""
    if reference.kind == "run" and reference.selector in (None, LATEST):
        committed = list_committed(reference.path) if reference.path.exists() else []
        if committed or reference.selector == LATEST:
            return committed[-1][0] if committed else None
    return reference.find_checkpoint(level="quick")


def check_has_adapters(checkpoint: Path, base: AdapterBase) -> None:
    """Refuses to validate the base alone with a recipe that has adapters.

    Raises:
        UserError: The checkpoint is the base.
    """
    if checkpoint.resolve() == base.path:
        raise UserError(
            f"{checkpoint} is the base, without adapters: give a checkpoint of the run with adapters, or "
            "--model.adapter null to validate the base alone"
        )


def start_adapter(model: GenesisModule, base: AdapterBase) -> None:
    """Prepares a module for its base, and reads the adapters that it begins with, if the recipe names some.

    Raises:
        UserError: These adapters cannot be used beside this base.
    """
    assert model.adapter_config is not None
    model.start = read_start(model.adapter_config, model.decoder_config, base)
