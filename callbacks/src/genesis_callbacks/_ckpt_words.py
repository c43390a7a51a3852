"""What `ckpt_path="last"` and `"best"` mean where a Trainer has an `AsyncProcessCheckpoint`, and what its paths are."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ._restore_route import LAST, LATEST
from .base.checkpoint_errors import CheckpointError
from .checkpoint.best import find_best, read_best
from .checkpoint.lineage import list_checkpoints, list_committed

BEST = "best"


def find_last_path(directory: Path) -> str:
    """Returns the newest committed checkpoint in the lineage, not verified; empty if there is none."""
    committed = list_committed(directory)
    return str(committed[-1][0]) if committed else ""


def find_best_path(directory: Path, monitor: str | None) -> str:
    """Returns the best checkpoint by `monitor`, or the newest without one, as `ModelCheckpoint` does; empty if none."""
    if monitor is None:
        return find_last_path(directory)
    best = find_best(directory)
    return "" if best is None else str(best)


def read_best_score(directory: Path) -> Tensor | None:
    """Returns the metric of the best checkpoint, None if none is marked."""
    best = read_best(directory)
    # The type that `ModelCheckpoint` has; the value is the recorded one, bit for bit.
    return None if best is None else torch.tensor(best.value, dtype=torch.float64)


def choose_path(trainer: Any, ckpt_path: Any, original: Callable[[Any], Any], ours: Sequence[Any]) -> Any:
    """Returns what a Trainer loads for `ckpt_path`.

    Args:
        trainer: The Trainer.
        ckpt_path: As the user gave it.
        original: Lightning's own way.
        ours: The Trainer's callbacks of the class `AsyncProcessCheckpoint`.

    Raises:
        CheckpointError: No checkpoint is marked as the best.
    """
    if ours and ckpt_path == LAST:
        # Files of a `ModelCheckpoint` beside ours count only while there are none of ours.
        has_own = any(list_checkpoints(callback.directory) for callback in ours)
        has_theirs = any(isinstance(callback, ModelCheckpoint) for callback in trainer.checkpoint_callbacks)
        return LAST if has_own or not has_theirs else original(ckpt_path)
    first = trainer.checkpoint_callback
    if ckpt_path == BEST and first in ours:
        path = first.best_model_path
        if not path:
            metric = "" if first.monitor is None else f" that is marked as the best by {first.monitor}"
            raise CheckpointError(
                f"ckpt_path is {BEST!r}, but {first.directory} has no checkpoint{metric}: give ckpt_path={LATEST!r}, "
                "or leave it out"
            )
        if first.monitor is None:
            rank_zero_info(f"Without a monitor, ckpt_path={BEST!r} takes the newest checkpoint, {path}.")
        return path
    return original(ckpt_path)
