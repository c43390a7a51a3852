"""Options that a run takes from the run that it continues, where its recipe and the command line have none."""

from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_info

from genesis.base.run_directory import RunDirectory
from genesis.cli.adapter import find_continued
from genesis.cli.trainer import count_ranks
from genesis.data.packing import CUT_EVENLY
from genesis.data.sizes import AUTO, BATCH, SEQ_LEN, resolve_sizes
from genesis.generate.checkpoint_reference import Reference
from genesis.optim.build import NO_DECAY, read_adapter_decay
from genesis_callbacks.checkpoint import CheckpointError, Manifest, list_committed, read_manifest


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


def keep_choices(config: Namespace, continued: Manifest | None) -> None:
    """Completes a recipe, in place, by choices whose default is another for a new run.

    Args:
        config: The recipe, before anything is built of it.
        continued: The manifest of the checkpoint that the run continues from; None for a new run.
    """
    recipe = None if continued is None else continued.recipe
    if recipe is not None and config.get("data.packing") is None:
        config["data.packing"] = (recipe.get("data") or {}).get("packing", CUT_EVENLY)
    for name in (SEQ_LEN, BATCH):
        kept = None if recipe is None else (recipe.get("data") or {}).get(name)
        if kept is not None and config.get(f"data.{name}") == AUTO:
            config[f"data.{name}"] = kept
    key = "model.optimizer.adapter_weight_decay"
    if config.get("model.adapter") is not None and config.get(key) is None:
        config[key] = NO_DECAY if recipe is None else read_adapter_decay(recipe)


def start_sizes(config: Namespace, *, is_fit: bool) -> None:
    """Puts numbers in the place of `auto` sizes of sequences and batches, and logs them.

    Args:
        config: The recipe, whose corpus can be found.
        is_fit: Whether the command trains.
    """
    trainer, max_seq_len = config["trainer"], config.get("model.decoder.max_seq_len")
    num_ranks = count_ranks(trainer["devices"], trainer["accelerator"]) * int(trainer.get("num_nodes") or 1)
    sizes = resolve_sizes(config["data"].as_dict(), max_seq_len, num_ranks)
    if sizes is None:
        return
    config[f"data.{SEQ_LEN}"], config[f"data.{BATCH}"] = sizes.seq_len, sizes.global_batch_size
    if is_fit:
        rank_zero_info(
            f"data.{SEQ_LEN} is {sizes.seq_len} and data.{BATCH} {sizes.global_batch_size} (auto): {sizes.reason}"
        )
