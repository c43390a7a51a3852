"""Options that a run takes from the run that it continues, where its recipe and the command line have none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightning.pytorch.utilities import rank_zero_info

from genesis.base.run_directory import RunDirectory
from genesis.cli.adapter import find_continued
from genesis.cli.trainer import count_ranks
from genesis.data.packing import CUT_EVENLY
from genesis.data.sizes import AUTO, BATCH, SEQ_LEN, resolve_sizes
from genesis.generate.checkpoint_reference import Reference
from genesis.objectives.find import find_objective
from genesis.optim.algorithm import NO_DECAY
from genesis.optim.recipe import read_adapter_decay
from genesis.recipe.resolved import ResolvedRecipe
from genesis_callbacks.checkpoint import CheckpointError, Manifest, list_committed, read_manifest

DROPOUTS: Final = ("model.decoder.dropout", "model.adapter.dropout")
KEEPS_DROPOUT: Final = "model.keeps_dropout"


def read_continued(reference: Reference | None, run_dir: Path, restore: str) -> Manifest | None:
    """Returns the manifest of the checkpoint that a run continues from; None for a new run.

    Args:
        reference: What `ckpt_path` is; None if it is not given.
        run_dir: The directory in which the run saves.
        restore: `checkpoint.restore`. The weights of another run are a new run's beginning, and no part of its past.
    """
    continued = None if reference is None else find_continued(reference)
    if continued is None:
        return None
    is_own = RunDirectory.of(continued).path.resolve() == run_dir.resolve()
    if restore == "weights" and not is_own:
        return None
    return next(filter(None, map(_read, (continued, *_list_older(continued)))), None)


def _list_older(checkpoint: Path) -> list[Path]:
    """Returns the checkpoints of a run before one of it, newest first: a restore takes them if that one is damaged."""
    paths = [path for path, _ in list_committed(checkpoint.parent)]
    return paths[: paths.index(checkpoint)][::-1] if checkpoint in paths else []


def _read(checkpoint: Path) -> Manifest | None:
    try:
        return read_manifest(checkpoint)
    except (CheckpointError, OSError):
        return None  # the restore reports it


def keep_choices(recipe: ResolvedRecipe, recorded: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns choices of a recipe whose default is another for a new run.

    Args:
        recipe: The recipe.
        recorded: The recipe of the run that continues; None for a new run.
    """
    found: dict[str, Any] = {}
    data = None if recorded is None else recorded.get("data") or {}
    if data is not None and recipe.get("data.packing") is None:
        found["data.packing"] = data.get("packing", CUT_EVENLY)
    for name in (SEQ_LEN, BATCH):
        if data is not None and data.get(name) is not None and recipe.get(f"data.{name}") == AUTO:
            found[f"data.{name}"] = data[name]
    if not recipe.get(KEEPS_DROPOUT) and find_objective(recipe.get("model.objective")).compares_forwards:
        # A run of a version without the option goes on with its dropout, at each of its resumes.
        if recorded is not None and (recorded.get("model") or {}).get("keeps_dropout", True):
            found[KEEPS_DROPOUT] = True
        else:
            found |= {name: 0.0 for name in DROPOUTS if recipe.get(name)}
    key = "model.optimizer.init_args.adapter_weight_decay"
    if recipe.get("model.adapter") is not None and recipe.get(key) is None:
        found[key] = NO_DECAY if recorded is None else read_adapter_decay(recorded)
    return found


def note_dropout(recipe: ResolvedRecipe, kept: Mapping[str, Any]) -> None:
    """Logs which dropout of a recipe `keep_choices` has switched off."""
    given = " and ".join(f"{name} {recipe.get(name):g}" for name in DROPOUTS if name in kept)
    if given:
        name = find_objective(recipe.get("model.objective")).__name__
        rank_zero_info(
            f"dropout is off ({given} in the recipe): {name} compares the probabilities of two forwards, which dropout "
            f"would make differ; {KEEPS_DROPOUT} true keeps it"
        )


def choose_sizes(recipe: ResolvedRecipe, *, is_fit: bool) -> dict[str, Any]:
    """Returns numbers for `auto` sizes of sequences and batches, and logs them.

    Args:
        recipe: The recipe, whose corpus can be found.
        is_fit: Whether the command trains.
    """
    num_ranks = count_ranks(recipe) * recipe.count("trainer.num_nodes")
    sizes = resolve_sizes(recipe, num_ranks, find_objective(recipe.get("model.objective")).learns_from)
    if sizes is None:
        return {}
    if is_fit:
        rank_zero_info(
            f"data.{SEQ_LEN} is {sizes.seq_len} and data.{BATCH} {sizes.global_batch_size} (auto): {sizes.reason}"
        )
    return sizes.options
