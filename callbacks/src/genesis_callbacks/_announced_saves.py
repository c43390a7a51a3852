"""Lists the checkpoints that a Trainer's callbacks report as saved."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ._checkpoint_watch import SavedCheckpoint
from .async_process_checkpoint import AsyncProcessCheckpoint
from .base.events import EventLog


def find_savers(trainer: Trainer) -> Iterator[AsyncProcessCheckpoint | ModelCheckpoint]:
    """Yields the Trainer's callbacks that save."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it
        if isinstance(callback, AsyncProcessCheckpoint | ModelCheckpoint):
            yield callback


def find_event_log(trainer: Trainer, path: Path) -> EventLog | None:
    """Returns the event log of the run that holds a checkpoint; None for a checkpoint that other code saved."""
    for saver in find_savers(trainer):
        if isinstance(saver, AsyncProcessCheckpoint) and saver.directory == path.parent:
            return saver.events
    return None


def find_newest(trainer: Trainer) -> tuple[Any, ...]:
    """Returns values that change when one of the callbacks has saved. It reads no disk, so it may run every batch."""
    return tuple(
        saver.last_saved
        if isinstance(saver, AsyncProcessCheckpoint)
        else (saver.best_model_path, saver.last_model_path, next(reversed(saver.best_k_models), None))
        for saver in find_savers(trainer)
    )


def find_announced(trainer: Trainer) -> Iterator[SavedCheckpoint]:
    """Yields the checkpoints that the Trainer's callbacks report as saved, on this machine's disks."""
    for saver in find_savers(trainer):
        if isinstance(saver, AsyncProcessCheckpoint):
            for path in saver.recent_saves:
                yield SavedCheckpoint(path, "all" if saver.save_optimizer else "weights")
            continue
        for name in dict.fromkeys((saver.best_model_path, saver.last_model_path, *saver.best_k_models)):
            # ModelCheckpoint has "" where it saved nothing; a URL names an object store, which is not verified.
            if name and "://" not in name:
                yield SavedCheckpoint(Path(name), "weights" if saver.save_weights_only else "all")
