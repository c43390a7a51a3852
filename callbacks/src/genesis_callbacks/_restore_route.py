"""Replaces a strategy's `load_checkpoint`: finds the checkpoint that a Trainer asks for, checks it and returns it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from ._compat import LoadCheckpoint, NothingToRestore
from ._fit_session import ORPHAN_SECONDS
from ._save_options import SaveOptions
from ._trainer_restore import Restore
from .base.checkpoint_errors import CheckpointError
from .base.run_directory import COMMITTED_NAME, MANIFEST_NAME, is_checkpoint_name
from .checkpoint.drift import DriftPolicy
from .checkpoint.lineage import find_holder, find_latest, list_checkpoints, wait_for_orphans
from .checkpoint.ranks import Ranks, WorldRanks
from .checkpoint.save_target import RunMetadata
from .checkpoint.verify import VerifyLevel

LATEST, LAST = "latest", "last"

BEST = "best"


def _is_ours(path: Path) -> bool:
    return (path / MANIFEST_NAME).exists() or (path / COMMITTED_NAME).exists() or is_checkpoint_name(path.name)


def _refuse_run(path: Path) -> None:
    """Refuses a run's directory, of which a strategy would report that it is one.

    Raises:
        CheckpointError: The directory has checkpoints.
    """
    found = list_checkpoints(path)
    if found:
        raise CheckpointError(
            f"{path} is the directory of a run: give one of its checkpoints, such as {found[-1]}, or, for the newest "
            "one of this run, ckpt_path='latest'"
        )


class RestoreRoute:
    """Restores a checkpoint of the engine into a Trainer, in place of its strategy.

    Args:
        options: The callback's.
        world: Gives the run's ranks.

    Attributes:
        restored: The restore that this route made for the fit that begins; None if it made none.
        started_from: The restore that the fit continues, whichever of the Trainer's callbacks made it.
    """

    def __init__(self, options: SaveOptions, world: WorldRanks) -> None:
        self.restored: Restore | None = None
        self.started_from: Restore | None = None
        self._options = options
        self._world = world
        self._verified: Path | None = None

    def reset(self) -> None:
        """Forgets what an earlier fit restored."""
        self.restored = self.started_from = None

    def find_latest(self) -> Path | None:
        """Returns the newest checkpoint of the run that verifies, or None.

        Every rank calls it. Within a process group rank 0 searches and broadcasts the result.
        """
        if dist.is_available() and dist.is_initialized():
            return self._agree_on_latest(self._world.join())
        # Before the process group exists, every rank searches. Only one of them may rename a damaged checkpoint.
        is_first = getattr(rank_zero_only, "rank", None) in (None, 0)
        self._verified = self._look(quarantine_bad=is_first)
        return self._verified

    def _locate(self, target: str, siblings: Sequence["RestoreRoute"]) -> Path:
        """Returns a checkpoint's directory; a link in a directory of the run, to another disk, stays the run's own."""
        path = Path(os.path.abspath(target))  # noqa: PTH100  # resolve() would follow the link
        place = path.parent.resolve() / path.name
        own = {self._options.directory, *(sibling._options.directory for sibling in siblings)}
        return place if place.parent in own and is_checkpoint_name(place.name) else path.resolve()

    def _agree_on_latest(self, ranks: Ranks) -> Path | None:
        self._verified = ranks.attempt_and_gather(
            "looking for the latest checkpoint",
            lambda: self._look(quarantine_bad=True) if ranks.is_first else None,
            error_type=CheckpointError,
        )[0]
        return self._verified

    def _look(self, *, quarantine_bad: bool) -> Path | None:
        directory = self._options.directory
        # The writer of another live run is not awaited, and its directory is not changed. A fit is refused there later.
        is_in_use = find_holder(directory) is not None
        if not is_in_use:
            wait_for_orphans(directory, ORPHAN_SECONDS, is_reported=quarantine_bad)
        return find_latest(
            directory,
            level=self._options.verify_level,
            quarantine_bad=quarantine_bad and not is_in_use,
            places=self._options.scope.places,
        )

    def load(
        self,
        trainer: Trainer,
        module: LightningModule,
        original: LoadCheckpoint,
        path: str | Path,
        *,
        run: RunMetadata,
        drift_policy: DriftPolicy,
        siblings: Sequence["RestoreRoute"],
    ) -> dict[str, Any]:
        """Returns what a Trainer gets for `ckpt_path`; a path that is not the engine's goes to the strategy.

        Every rank calls it. Communicates.

        Args:
            trainer: The Trainer that restores.
            module: Its model.
            original: The strategy's own `load_checkpoint`.
            path: As the user gave it.
            run: This run's identity, recipe and environment, to be compared with the checkpoint's.
            drift_policy: Which of these may differ.
            siblings: The routes of all callbacks of the Trainer: each callback saves into a directory of its own.

        Raises:
            CheckpointError: The checkpoint does not verify, does not fit, or differs; on every rank alike.
        """
        ranks = self._world.join()
        # Rank 0's path counts: ranks with different paths would restore different steps and train on.
        target = ranks.broadcast(str(path))
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if target in (LATEST, LAST):
            found = self._agree_on_latest(ranks)
            if found is None and not is_fit:
                raise CheckpointError(
                    f"ckpt_path is {target!r}, but {self._options.directory} has no checkpoint: give the path of one, "
                    "or leave ckpt_path out to use the model's weights as they are"
                )
            if found is None:
                rank_zero_info(f"There is no checkpoint in {self._options.directory} yet: training starts from step 0.")
                return NothingToRestore({"pytorch-lightning_version": version("lightning")})
        elif _is_ours(Path(target)):
            found = self._locate(target, siblings)
        else:
            _refuse_run(Path(target))
            return original(path)
        # `latest` has just verified this checkpoint, so its files are not read twice. The restored tensors are compared
        # by digest in any case.
        level: VerifyLevel = "quick" if found == self._verified else self._options.verify_level
        restore = Restore(found, ranks, trainer.strategy, level=level, scope=self._options.scope)
        self._verified = None
        is_elsewhere = found.parent != self._options.directory
        restore.has_weights_alone = is_fit and self._options.restore == "weights" and is_elsewhere
        # Also an own checkpoint without optimizer state, because there is no other way to continue from it.
        may_leave = is_elsewhere or not restore.manifest.has_optimizer
        restore.leaves_optimizer = is_fit and self._options.restore == "no_optimizer" and may_leave
        compared = run if is_fit and not restore.has_weights_alone else replace(run, recipe={})
        restore.check_drift(compared, drift_policy, self._options.allow_changed)
        if is_fit:
            restore.check_has_optimizer()
            self.restored = restore
            for sibling in siblings:
                sibling.started_from = restore
        if restore.has_weights_alone:
            return NothingToRestore(restore.load_in_place(module, []))
        restore.combine_rank_states(trainer.datamodule)  # type: ignore[attr-defined]  # Lightning sets it
        has_optimizers = is_fit and not restore.leaves_optimizer
        if trainer.strategy.restore_checkpoint_after_setup:
            return restore.load_in_place(module, trainer.optimizers if has_optimizers else [])
        return restore.build_lightning_checkpoint(module, with_optimizers=has_optimizers)


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
