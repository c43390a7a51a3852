"""Finds the reference of preferences in a recipe of `genesis fit`, by which a resume is checked."""

from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError, check_is_named
from genesis.base.run_directory import RunDirectory
from genesis.objectives.objective import RecipeContext
from genesis.recipe.resolved import ResolvedRecipe
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.checkpoint import Manifest, read_manifest

REFERENCE: Final = "reference"
"""The entry of a checkpoint's identity: the hash of the reference's manifest, or `BASE`."""
BASE: Final = "base of the adapters"

_OPTION: Final = "model.objective.init_args.reference"
_HASH_SHOWN: Final = 23


def resolve_reference(recipe: ResolvedRecipe, start: RecipeContext) -> tuple[dict[str, str], dict[str, str]]:
    """Returns what identifies the reference of a recipe in checkpoints, and values of options that follow.

    A run of all weights that begins with no checkpoint gets the weights of its reference.

    Args:
        recipe: The recipe, with the base of its adapters.
        start: What the run continues with.

    Raises:
        UserError: There is no reference, or another one than that of the run that continues.
    """
    continued = start.find_continued()
    manifest = None
    if continued is not None:
        is_own = continued.resolve().parent == RunDirectory(start.run_dir.resolve()).checkpoints
        # A run that takes the weights alone is a new one, with a reference of its own.
        manifest = read_manifest(continued) if is_own or recipe.get("checkpoint.restore") != "weights" else None
    recorded = None if manifest is None else manifest.identity.get(REFERENCE)
    given = recipe.get(_OPTION)
    if given is not None:
        check_is_named(given, _OPTION)
        found = start.find_recorded(given, recorded)
    elif recorded is not None and recorded != BASE:
        assert manifest is not None
        found = _find_recorded(manifest, recorded)
    elif recipe.get("model.adapter") is None:
        if continued is None:
            raise UserError(
                f"preference optimisation has no reference: give the run or checkpoint to start from by --{_OPTION}, "
                "or by --ckpt_path with --checkpoint.restore weights"
            )
        found = continued
    elif recipe.get("model.adapter.also_train"):  # these change without adapters as well
        found = Path(recipe.get("model.adapter.base"))
    else:
        _check_same(BASE, recorded)
        return {REFERENCE: BASE}, {}
    path = str(found.resolve())
    options = {_OPTION: path}
    if continued is None and recipe.get("model.adapter") is None:
        options |= {"ckpt_path": path, "checkpoint.restore": "weights"}
    found_hash = read_committed_hash(found)
    _check_same(found_hash, recorded)
    return {REFERENCE: found_hash}, options


def _check_same(found: str, recorded: str | None) -> None:
    if recorded is None or found == recorded:
        return
    now, before = (
        f"the {reference}" if reference == BASE else f"a checkpoint with manifest {reference[:_HASH_SHOWN]}"
        for reference in (found, recorded)
    )
    raise UserError(
        f"the reference is {now}, and the run that continues was trained with {before}: give that by --{_OPTION}, or "
        "start a new run from its weights (--checkpoint.restore weights, in another run_dir)"
    )


def _find_recorded(manifest: Manifest, recorded: str) -> Path:
    objective: Any = manifest.recipe.get("model", {}).get("objective") or {}
    path = Path(str(objective.get("init_args", {}).get(REFERENCE, "of the run before")))
    if not path.is_dir() or read_committed_hash(path) != recorded:
        raise UserError(
            f"the reference {path} with manifest {recorded[:_HASH_SHOWN]} is not there any more: give its new path by "
            f"--{_OPTION}"
        )
    return path
