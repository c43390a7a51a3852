"""Saves and restores a run by the checkpoint engine, in any Lightning project and under every stock strategy.

    checkpoint = AsyncProcessCheckpoint(run_dir="runs/mine", every_n_steps=500, keep_last=3)
    trainer = Trainer(callbacks=[checkpoint], ...)
    trainer.fit(model, ckpt_path=checkpoint.latest())

    logged                      unit and meaning, once for each save that mode `thread` or `process` committed
    checkpoint/stall_seconds    all time that the training thread spent in these hooks for the save
    checkpoint/staged_bytes     copied on this rank
    checkpoint/write_seconds    from the writer's begin to its end, behind the training
    checkpoint/num_skipped      saves that were due while the one before still ran (`when_busy="skip"`), so far
    checkpoint/step             of the save; the row is that of the step at which it was known to be committed

It talks over a gloo group of its own, made once for a fit: one small reduction for each step, in the background. A save
in mode `sync` has three exchanges; in the others the first save, and one after a change of the tensors, has one.
Nothing of it runs on the group that trains.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch.optim import Optimizer

from ._best_watch import BestWatch
from ._boundary import Boundary
from ._compat import (
    LoadCheckpoint,
    NothingToRestore,
    route_load_checkpoint,
    shield_validation,
    unroute_load_checkpoint,
    unshield_validation,
)
from ._rank_watch import RankWatch
from ._signals import SignalFlag
from ._step_watch import StepWatch
from ._trainer_restore import Restore
from ._trainer_state import take_snapshot
from .checkpoint.background import BackgroundSaver, Progress, Staging
from .checkpoint.best import MonitorMode, find_best
from .checkpoint.collect import MODEL_PREFIX, name_parameters
from .checkpoint.commit import supersede
from .checkpoint.drift import DriftPolicy
from .checkpoint.errors import CheckpointError, SaveFailedError
from .checkpoint.job import Outcome
from .checkpoint.lineage import (
    CHECKPOINTS_NAME,
    DirectoryLock,
    find_latest,
    list_committed,
    remove_abandoned,
    wait_for_orphans,
)
from .checkpoint.manifest import COMMITTED_NAME, MANIFEST_NAME, Ancestor, checkpoint_name, is_checkpoint_name
from .checkpoint.plan import PartsCache
from .checkpoint.ranks import Ranks
from .checkpoint.retain import Retention
from .checkpoint.rng import apply_rng_state, read_rng_state
from .checkpoint.save import Origin, RetentionWarning, Saver, Snapshot
from .checkpoint.verify import VerifyLevel
from .checkpoint.writer_process import WriterProcess
from .restore_report import RestoreReport

LATEST = "latest"
_STALL = "checkpoint/stall_seconds"
_STAGED = "checkpoint/staged_bytes"
_WRITE = "checkpoint/write_seconds"
_SKIPPED = "checkpoint/num_skipped"
_STEP = "checkpoint/step"
# How long a run that ends by an exception waits for the save in flight, and a restart for orphaned writers.
_LEAVE_SECONDS = 10.0
_ORPHAN_SECONDS = 60.0
# How long ranks that end by an exception wait for one another's part of a save: who has not ended has none.
_ALONE_SECONDS = 60.0
_REFUSED_STRATEGIES: dict[type[Strategy], str] = {
    FSDPStrategy: "FSDP1 (FSDPStrategy): use ModelParallelStrategy with fully_shard",
    DeepSpeedStrategy: "DeepSpeed: use ModelParallelStrategy with fully_shard",
    XLAStrategy: "XLA: there is no support for it",
    SingleDeviceXLAStrategy: "XLA: there is no support for it",
}


def _siblings(trainer: Trainer) -> list["AsyncProcessCheckpoint"]:
    """All of the Trainer's callbacks of this kind: each has its own directory, one of them restores for all."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it
    return [callback for callback in callbacks if isinstance(callback, AsyncProcessCheckpoint)]


class SaveFailedWarning(UserWarning):
    """A save failed and training goes on, by `on_save_failure="warn"`; the message says why."""


class SaveSkippedWarning(UserWarning):
    """A save was due while the one before still ran, by `when_busy="skip"`."""


class LostRankWarning(UserWarning):
    """Training ended because the process of another rank is gone."""


class TornSnapshotWarning(UserWarning):
    """Training changed what was being staged; that save is made again, and staging is blocking from now on."""


def _refuse_strategy(strategy: Strategy) -> None:
    for kind, reason in _REFUSED_STRATEGIES.items():
        if isinstance(strategy, kind):
            raise CheckpointError(f"AsyncProcessCheckpoint cannot save a run under {reason}")


def _is_ours(path: Path) -> bool:
    return (path / MANIFEST_NAME).exists() or (path / COMMITTED_NAME).exists() or is_checkpoint_name(path.name)


def _read_mesh(strategy: Strategy) -> dict[str, int]:
    if not isinstance(strategy, ModelParallelStrategy):
        return {}
    mesh = strategy.device_mesh
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))


def _name_ancestor(start: Restore, directory: Path) -> Ancestor:
    """Returns the checkpoint that a run in `directory` goes on from, and where it lies if that is elsewhere."""
    if start.path.parent == directory:
        return start.ancestor
    return replace(start.ancestor, directory=os.path.relpath(start.path.parent, directory))


def _is_last_window(trainer: Trainer) -> bool:
    """Says whether training is known to end with this batch; a stop that a later hook decides is not known yet."""
    if trainer.should_stop or (trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps):
        return True
    is_last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
    return is_last_epoch and trainer.is_last_batch


class AsyncProcessCheckpoint(Checkpoint):
    """Saves all of a run at the end of an accumulation window, and gives it back through `Trainer.fit(ckpt_path=...)`.

    Works under one device, DDP and FSDP2 (ModelParallelStrategy) and their subclasses, with automatic and manual
    optimization; what one of them saved, any other restores, on any number of ranks. State is taken only after a
    batch that ended a window, and a signal waits for that moment. Checkpoints lie in
    `run_dir/checkpoints/step-XXXXXXXX`. One run holds the directory at a time.

    Every rank has one with the same arguments. It communicates as the module says. Not thread-safe.

    Args:
        run_dir: The run's directory, the same on all ranks and on a disk that they share.
        every_n_steps: Save when Lightning's global step is a multiple of it; None for not.
        every_n_minutes: Save when so many minutes have passed since the last save, by rank 0's clock; None for not.
        save_at_end: Save when training ends, if the last step is not saved yet.
        save_on_signal: On SIGTERM or SIGINT on any rank: all ranks save at the next step's end and stop
            (`stopped_by_signal`). A second SIGINT interrupts at once.
        save_on_exception: When training ends by an exception and nothing has been written since the last window's end,
            save that. With several ranks every rank must have met it, and `mode` must not be "sync".
        save_optimizer: Whether the optimizers' state is saved. Without it a checkpoint can only give its weights.
        monitor: Key of a metric that validation logs: after a validation that is the best so far, save (this never
            skips) and mark the checkpoint as the best, which stays. None for no best.
        monitor_mode: Whether a smaller ("min") or a larger value ("max") of it is better.
        keep_last: How many of the newest checkpoints stay, beside the best; None keeps all.
        keep_every_n_steps: Those whose step is a multiple of it stay for good; None for none.
        restore: What a checkpoint of another directory gives: "all", or its "weights" alone, so that a new run begins
            at step 0. One of this run's own always gives all.
        mode: Who writes: "sync" the training thread, "thread" a thread beside it, "process" a writer process for each
            rank, which has started before the first step.
        staging: In the other modes than "sync": "overlapped" copies while the next forward and backward run, and
            waits before the optimizer step; "blocking" copies at once. What is staged is compared with what was live;
            where training changed it, the save is made again and staging stays blocking.
        when_busy: What a due save does while the one before still runs: "wait" for it, or "skip" with a
            `SaveSkippedWarning` and a count. A save that ends the run always waits.
        save_timeout_seconds: After so long a writer that does not answer is killed, and its save has failed.
        lost_rank_seconds: When another rank's process is gone, this one is ended so long after, with the name of the
            lost one, if its process group has not noticed by itself; None never.
        on_save_failure: "raise" ends training with the error; "warn" goes on, with a `SaveFailedWarning`. The last good
            checkpoint stays in either case.
        verify_level: How much a restore verifies before it begins; what is placed is always compared by digest.
        recipe: The resolved recipe as plain JSON, for the manifest. May be set as an attribute until training starts.
        identity: What must be the same at restore (`tokenizer_hash`, ...), plain JSON; it may be set like `recipe`.
        allow_changed: Globs of keys that may differ at restore: dotted keys of `recipe`, names in `identity`.
        drift_policy: Which keys of `recipe` and `identity` may differ freely, and which never; by default each must be
            allowed by its key. It may be set like `recipe`. Other package versions only warn.

    Attributes:
        save_optimizer: As given.
        stopped_by_signal: Number of the signal that ended the last fit, or None. The caller makes the exit status.
        restore_report: What the last restore kept, rebuilt and started afresh, or None.
        last_saved: The newest checkpoint that this run has saved or restored, or None.
        num_failed_saves: In the last fit.
        num_skipped_saves: In the last fit, by `when_busy`.
        last_stall_seconds: All time that the training thread spent here for the last settled save.
        last_staged_bytes: What it copied on this rank.
        last_write_seconds: How long it was written.

    Raises:
        ValueError: An argument has no meaning.
    """

    def __init__(
        self,
        *,
        run_dir: str | Path,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        save_at_end: bool = True,
        save_on_signal: bool = True,
        save_on_exception: bool = False,
        save_optimizer: bool = True,
        monitor: str | None = None,
        monitor_mode: MonitorMode = "min",
        keep_last: int | None = 3,
        keep_every_n_steps: int | None = None,
        restore: Literal["all", "weights"] = "all",
        mode: Literal["sync", "thread", "process"] = "process",
        staging: Staging = "overlapped",
        when_busy: Literal["wait", "skip"] = "wait",
        save_timeout_seconds: float = 600.0,
        lost_rank_seconds: float | None = 10.0,
        on_save_failure: Literal["raise", "warn"] = "raise",
        verify_level: VerifyLevel = "full",
        recipe: dict[str, Any] | None = None,
        identity: dict[str, Any] | None = None,
        allow_changed: Sequence[str] = (),
        drift_policy: DriftPolicy | None = None,
    ) -> None:
        super().__init__()
        intervals = {
            "every_n_steps": every_n_steps,
            "every_n_minutes": every_n_minutes,
            "save_timeout_seconds": save_timeout_seconds,
            "lost_rank_seconds": lost_rank_seconds,
        }
        for name, interval in intervals.items():
            if interval is not None and interval <= 0:
                raise ValueError(f"{name} must be positive, or None, not {interval}")
        for name, choice, choices in (
            ("on_save_failure", on_save_failure, ("raise", "warn")),
            ("mode", mode, ("sync", "thread", "process")),
            ("staging", staging, ("blocking", "overlapped")),
            ("when_busy", when_busy, ("wait", "skip")),
            ("monitor_mode", monitor_mode, ("min", "max")),
            ("restore", restore, ("all", "weights")),
        ):
            if choice not in choices:
                raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {choice!r}")
        self.directory = Path(run_dir).resolve() / CHECKPOINTS_NAME
        self.recipe: Mapping[str, Any] = recipe or {}
        self.save_optimizer = save_optimizer
        self.identity: Mapping[str, Any] = identity or {}
        self.drift_policy = drift_policy or DriftPolicy()
        self.stopped_by_signal: int | None = None
        self.restore_report: RestoreReport | None = None
        self.last_saved: Path | None = None
        self.num_failed_saves = 0
        self.num_skipped_saves = 0
        self.last_stall_seconds = 0.0
        self.last_staged_bytes = 0
        self.last_write_seconds = 0.0
        self._mode = mode
        self._staging: Staging = staging
        self._when_busy = when_busy
        self._save_timeout_seconds = save_timeout_seconds
        self._every_n_steps = every_n_steps
        self._every_n_seconds = None if every_n_minutes is None else 60.0 * every_n_minutes
        self._has_save_at_end = save_at_end
        self._retention = Retention(keep_last, keep_every_n_steps)
        self._on_save_failure = on_save_failure
        self._verify_level: VerifyLevel = verify_level
        self._allow_changed = tuple(allow_changed)
        self._signals = SignalFlag() if save_on_signal else None
        self._has_save_on_exception = save_on_exception
        self._best = None if monitor is None else BestWatch(monitor, monitor_mode)
        self._restore_what = restore
        self._lost_rank_seconds = lost_rank_seconds
        # What follows lives from one fit's start to its end.
        self._ranks: Ranks | None = None
        self._ranks_world: Any = None
        self._lock: DirectoryLock | None = None
        self._saver: Saver | None = None
        self._writer: WriterProcess | None = None
        self._background: BackgroundSaver | None = None
        self._watch: StepWatch | None = None
        self._rank_watch: RankWatch | None = None
        self._boundary: Boundary | None = None
        self._rng_of_training: dict[str, Any] | None = None
        self._names: dict[int, str] = {}
        self._parts = PartsCache()
        self._updates_at_begin = 0
        self._updates_at_last = 0
        self._stall_seconds = 0.0
        self._stall_mark_seconds = 0.0
        self._has_told_memory = False
        self._restore: Restore | None = None
        self._started_from: Restore | None = None
        self._verified: Path | None = None
        self._votes: Callable[[], list[int]] | None = None
        self._last_step = 0
        self._last_saved_step: int | None = None
        self._last_save_seconds = 0.0

    @property
    def state_key(self) -> str:
        """Two of them may stand in one Trainer, each with a directory of its own."""
        return self._generate_state_key(run_dir=str(self.directory.parent))

    def latest(self) -> Path | None:
        """Returns the newest checkpoint of the run that verifies, or None: for `Trainer.fit(ckpt_path=...)`.

        Every rank calls it. Within a process group rank 0 looks and tells the others; before there is one, each rank
        looks for itself and comes to the same answer. A checkpoint that does not verify is put aside by rank 0, with
        a warning. `ckpt_path="latest"` means the same.
        """
        if dist.is_available() and dist.is_initialized():
            return self._agreed_latest(self._join())
        is_first = getattr(rank_zero_only, "rank", None) in (None, 0)
        wait_for_orphans(self.directory, _ORPHAN_SECONDS)
        self._verified = find_latest(self.directory, level=self._verify_level, put_aside=is_first)
        return self._verified

    def best(self) -> Path | None:
        """Returns the checkpoint that is marked as the best by `monitor`, or None. It does not verify, nor communicate.

        Raises:
            CorruptCheckpointError: The mark cannot be read.
        """
        return find_best(self.directory)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values: which step is the best."""
        return {} if self._best is None else {"best": self._best.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` returned."""
        if self._best is not None and "best" in state_dict:
            self._best.load_state_dict(state_dict["best"])

    def _agreed_latest(self, ranks: Ranks) -> Path | None:
        self._verified = ranks.attempt_and_gather(
            "looking for the latest checkpoint",
            lambda: self._find_latest() if ranks.is_first else None,
            error_type=CheckpointError,
        )[0]
        return self._verified

    def _find_latest(self) -> Path | None:
        wait_for_orphans(self.directory, _ORPHAN_SECONDS)
        return find_latest(self.directory, level=self._verify_level)

    def _join(self) -> Ranks:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._ranks is None or self._ranks_world is not world:
            self._ranks, self._ranks_world = Ranks(), world
        return self._ranks

    # ---- getting in and out of a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the directory and stands in for the strategy's `load_checkpoint`. Communicates."""
        ranks = self._join()
        self._restore = self._started_from = None
        if stage == TrainerFn.FITTING:
            _refuse_strategy(trainer.strategy)
            self.stopped_by_signal, self.restore_report = None, None
            self.num_failed_saves = self.num_skipped_saves = 0
            self._release()
            ranks.attempt("taking the checkpoint directory", self._take_directory, error_type=CheckpointError)
            if self._lost_rank_seconds is not None and ranks.world_size > 1:
                self._rank_watch = RankWatch(
                    self.directory.parent, ranks.rank, ranks.world_size, self._lost_rank_seconds
                )
            if self._mode == "process" and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning sets it
                self._writer = WriterProcess()  # it imports while the rest of the setup runs
        route_load_checkpoint(trainer.strategy, lambda original, path: self._load(trainer, pl_module, original, path))

    def _take_directory(self) -> None:
        if self._join().is_first:
            self._lock = DirectoryLock(self.directory)
            wait_for_orphans(self.directory, _ORPHAN_SECONDS)
            RankWatch.clear(self.directory.parent)

    def _load(
        self, trainer: Trainer, module: LightningModule, original: LoadCheckpoint, path: str | Path
    ) -> dict[str, Any]:
        """What a Trainer gets for `ckpt_path`; a path that is not the engine's goes to the strategy."""
        ranks = self._join()
        target = ranks.broadcast(None if path is None else str(path))
        if target == LATEST:
            found = self._agreed_latest(ranks)
            if found is None:
                return NothingToRestore({"pytorch-lightning_version": version("lightning")})
        elif not _is_ours(Path(target)):
            return original(path)
        else:
            found = Path(target).resolve()
        # What `latest` has just verified is not read a second time; what is placed is compared by digest in any case.
        restore = Restore(found, ranks, level="quick" if found == self._verified else self._verify_level)
        self._verified = None
        is_fit = trainer.state.fn == TrainerFn.FITTING
        restore.has_weights_alone = is_fit and self._restore_what == "weights" and found.parent != self.directory
        restore.check_drift(
            identity=self.identity,
            recipe=self.recipe if is_fit and not restore.has_weights_alone else {},
            policy=self.drift_policy,
            allow_changed=self._allow_changed,
        )
        if is_fit:
            restore.check_has_optimizer()
            self._restore = restore
            for sibling in _siblings(trainer):
                sibling._started_from = restore
        if restore.has_weights_alone:
            return NothingToRestore(restore.load_in_place(module, []))
        restore.combine_rank_states(trainer.datamodule)  # type: ignore[attr-defined]  # Lightning sets it
        if trainer.strategy.restore_checkpoint_after_setup:
            return restore.load_in_place(module, trainer.optimizers if is_fit else [])
        return restore.build_lightning_checkpoint(module, with_optimizers=is_fit)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks what was restored, tries the encoding of all state, and makes ready to save. Communicates."""
        ranks = self._join()
        restore = self._restore
        if restore is not None and not trainer.strategy.restore_checkpoint_after_setup:
            restore.check_after_lightning(pl_module, trainer.optimizers)
        ranks.attempt(
            "trying to encode the state",
            lambda: self._take_snapshot(trainer, pl_module),
            error_type=CheckpointError,
        )
        self._start_saver(trainer, pl_module, ranks)
        self._last_step = trainer.global_step
        self._last_save_seconds = time.monotonic()
        self._votes = None
        if restore is not None:
            restore.apply_rng()
            self.last_saved = restore.path
            self.restore_report = restore.build_report(trainer)
            rank_zero_info(self.restore_report.text)
            self._restore = None
        if self._signals is not None:
            self._signals.install()
        if self._rank_watch is not None:
            self._rank_watch.start()
        shield_validation(trainer, self._keep_generators)
        self._remember_boundary(trainer, pl_module)

    def _take_snapshot(
        self, trainer: Trainer, module: LightningModule, cache: PartsCache | None = None, rng: Any = None
    ) -> Snapshot:
        return take_snapshot(
            trainer, module, self._join().rank, cache, has_optimizer=self.save_optimizer, rng_state=rng
        )

    def _remember_boundary(self, trainer: Trainer, module: LightningModule) -> None:
        self._boundary = Boundary(trainer.global_step, module) if self._has_save_on_exception else None

    def _start_saver(self, trainer: Trainer, module: LightningModule, ranks: Ranks) -> None:
        before, start = self._saver, self._started_from
        self._started_from = None
        self._saver = Saver(
            self.directory,
            ranks,
            origin=Origin(self.identity, self.recipe, _read_mesh(trainer.strategy)),
            retention=self._retention,
        )
        last_step = -1
        if start is not None:
            self._saver.continue_from(_name_ancestor(start, self.directory), start.manifest.sequence)
            self._last_saved_step = start.manifest.step if start.path.parent == self.directory else None
            # The checkpoints of this run up to there, in whichever of its directories, are what it goes on from.
            is_this_run = any(start.path.parent == sibling.directory for sibling in _siblings(trainer))
            last_step = start.manifest.step if is_this_run else -1
        elif before is not None and trainer.global_step > 0:  # the same Trainer goes on with another fit
            self._saver.continue_from(before.previous, before.sequence)
            last_step = trainer.global_step
        else:
            self._last_saved_step = None
        sequence = self._saver.sequence
        ranks.attempt(
            "tidying the directory", lambda: self._tidy(ranks, sequence, last_step), error_type=CheckpointError
        )
        self._start_background(trainer, module, ranks)

    def _start_background(self, trainer: Trainer, module: LightningModule, ranks: Ranks) -> None:
        if self._mode == "sync" or self._saver is None:
            return
        writer, self._writer = self._writer, None
        self._background = BackgroundSaver(
            self._saver, writer=writer, staging=self._staging, time_limit_seconds=self._save_timeout_seconds
        )
        ranks.attempt("starting the writer", self._background.wait_ready)
        self._names = {parameter: MODEL_PREFIX + name for parameter, name in name_parameters(module).items()}
        self._parts = PartsCache()
        self._updates_at_begin = self._updates_at_last = 0
        self._watch = StepWatch(
            trainer.optimizers,
            # In automatic optimization the step begins with its closure; on_before_optimizer_step comes after that.
            before_step=None if module.automatic_optimization else self._wait_staged,
            has_scaler=getattr(trainer.precision_plugin, "scaler", None) is not None,
        )

    def _tidy(self, ranks: Ranks, sequence: int, last_step: int) -> None:
        """Clears away what is not of this run's lineage: abandoned saves, and a future that is now another's."""
        if not ranks.is_first:
            return
        remove_abandoned(self.directory)
        others = [
            path
            for path, manifest in list_committed(self.directory)
            if manifest.sequence > sequence or manifest.step > last_step
        ]
        target = supersede(others)
        if target is not None:
            rank_zero_warn(
                f"{len(others)} checkpoints in {self.directory} are no ancestors of this run: see {target.name}"
            )
        if self._best is not None:
            self._best.agree_with(self.directory)

    # ---- saving

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves if the batch ended a window and a save is due. Starts one small reduction; a save communicates more."""
        if trainer.global_step == self._last_step or self._saver is None:
            return
        self._last_step = trainer.global_step
        with self._stalling():
            signal_number, is_minute_due, agreed = self._vote()
            if signal_number:
                self.stopped_by_signal = signal_number
                # A limit from below would make Lightning train on in spite of should_stop.
                trainer.fit_loop.min_epochs = None
                trainer.fit_loop.epoch_loop.min_steps = None
                trainer.should_stop = True
            if self._background is not None:
                self._settle(trainer, pl_module, self._background.settle(agreed))
            is_step_due = self._every_n_steps is not None and trainer.global_step % self._every_n_steps == 0
            is_end_due = self._has_save_at_end and _is_last_window(trainer)
            if signal_number or is_minute_due or is_step_due or is_end_due:
                self._save(trainer, pl_module)
        self._remember_boundary(trainer, pl_module)

    @contextlib.contextmanager
    def _stalling(self) -> Iterator[None]:
        """Counts the time of a hook for the save that is in flight."""
        self._stall_mark_seconds = time.perf_counter()
        try:
            yield
        finally:
            self._count_stall()
            if self._background is None or self._background.step_in_flight is None:
                self._stall_seconds = 0.0

    def _count_stall(self) -> None:
        now_seconds = time.perf_counter()
        self._stall_seconds += now_seconds - self._stall_mark_seconds
        self._stall_mark_seconds = now_seconds

    def _vote(self) -> tuple[int, bool, int]:
        """Returns (signal, whether minutes have passed, what became of the save in flight) as all ranks agree.

        Alone: as it is now; otherwise as it was at the step before.
        """
        ranks = self._join()
        assert self._saver is not None
        elapsed_seconds = time.monotonic() - self._last_save_seconds
        is_due = ranks.is_first and self._every_n_seconds is not None and elapsed_seconds >= self._every_n_seconds
        ours = [
            self._signals.received if self._signals is not None else 0,
            int(is_due),
            self._background.poll() if self._background is not None else 0,
        ]
        if ranks.world_size == 1:
            signal_number, minutes, agreed = ours
        else:
            signal_number, minutes, agreed = self._votes() if self._votes is not None else [0, 0, 0]
            self._votes = ranks.start_maximum(ours)
        return signal_number, bool(minutes), agreed

    def _save(self, trainer: Trainer, module: LightningModule, *, may_skip: bool = True) -> None:
        is_dry = trainer.fast_dev_run  # type: ignore[attr-defined]  # Lightning sets it
        if is_dry or self._last_saved_step == trainer.global_step:
            return
        self._last_save_seconds = time.monotonic()
        if self._background is None:
            self._save_now(trainer, module)
        elif not self._is_busy(trainer, module, self._background, may_skip=may_skip):
            self._begin(trainer, module, self._background)

    def _save_now(self, trainer: Trainer, module: LightningModule) -> None:
        assert self._saver is not None
        try:
            saved = self._saver.save(lambda: self._take_snapshot(trainer, module))
        except CheckpointError as error:
            self._fail(trainer.global_step, error)
            return
        self._note_saved(saved.manifest.step)

    def _note_saved(self, step: int) -> None:
        self.last_saved, self._last_saved_step = self.directory / checkpoint_name(step), step
        if self._best is not None and self._join().is_first:
            self._best.mark(self.directory, step)

    def _is_busy(
        self, trainer: Trainer, module: LightningModule, background: BackgroundSaver, *, may_skip: bool
    ) -> bool:
        """Says whether there is nothing to begin: this step is on its way, or is skipped. It may wait, by policy."""
        if background.step_in_flight in (None, trainer.global_step):
            return background.step_in_flight is not None
        may_skip = may_skip and self._when_busy == "skip"
        if may_skip and not trainer.should_stop and not _is_last_window(trainer):
            self.num_skipped_saves += 1
            rank_zero_warn(
                f"the save at step {trainer.global_step} is skipped: that of step {background.step_in_flight} still "
                f"runs ({self.num_skipped_saves} skipped so far)",
                category=SaveSkippedWarning,
            )
            return True
        self._settle(trainer, module, background.finish())
        return background.step_in_flight is not None  # a save that is made again is one of this step

    def _begin(self, trainer: Trainer, module: LightningModule, background: BackgroundSaver) -> None:
        try:
            background.begin(
                trainer.global_step, lambda: self._take_snapshot(trainer, module, self._parts), self._progress()
            )
        except CheckpointError as error:
            self._fail(trainer.global_step, error)

    def _progress(self) -> Progress:
        watch = self._watch
        assert watch is not None
        self._updates_at_begin = watch.num_updates
        return Progress(lambda: watch.num_steps, watch.num_updates - self._updates_at_last, watch.moved(self._names))

    def _settle(self, trainer: Trainer, module: LightningModule, outcome: Outcome | None) -> None:
        """Takes note of how a save in the background ended, the same on all ranks."""
        if outcome is None:
            return
        background = self._background
        assert background is not None
        step = background.settled_step
        if outcome.kind == "committed":
            self._note_saved(step)
            self._updates_at_last = self._updates_at_begin
            if outcome.warning is not None:
                warnings.warn(outcome.warning, RetentionWarning, stacklevel=2)
            self._log(trainer, step, background.staged_bytes, outcome.write_seconds)
        elif outcome.kind == "failed":
            self._fail(step, SaveFailedError(outcome.text))
        else:
            if self._best is not None:
                self._best.drop(step)
            if outcome.kind == "torn":
                rank_zero_warn(
                    f"the save at step {step} is made again at step {trainer.global_step}, and staging is blocking "
                    f"from now on: {outcome.text}",
                    category=TornSnapshotWarning,
                )
            self._begin(trainer, module, background)

    def _log(self, trainer: Trainer, step: int, staged_bytes: int, write_seconds: float) -> None:
        self._count_stall()
        self.last_stall_seconds = self._stall_seconds
        self.last_staged_bytes, self.last_write_seconds = staged_bytes, write_seconds
        if not self._has_told_memory and self._background is not None:
            self._has_told_memory = True
            bound = self._background.memory_bytes / 1e6
            rank_zero_info(f"Saves in the background take at most {bound:,.0f} MB of memory on rank 0.")
        values = {
            _STALL: self.last_stall_seconds,
            _STAGED: float(staged_bytes),
            _WRITE: write_seconds,
            _SKIPPED: float(self.num_skipped_saves),
            _STEP: float(step),
        }
        # Under the step of now: a logger need not take a row of the past.
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        self._count_stall()  # the loggers' own time, which a figure that they write cannot hold
        self.last_stall_seconds, self._stall_seconds = self._stall_seconds, 0.0

    def _fail(self, step: int, error: CheckpointError) -> None:
        """Ends training with the error, or warns, by policy."""
        self.num_failed_saves += 1
        if self._best is not None:
            self._best.drop(step)
        if self._on_save_failure == "raise":
            raise error
        message = f"the save at step {step} failed, {self._describe_last()}: {error}"
        warnings.warn(message, SaveFailedWarning, stacklevel=2)

    def _describe_last(self) -> str:
        return "nothing is saved yet" if self.last_saved is None else f"the last good one is {self.last_saved.name}"

    def _wait_staged(self) -> None:
        """Holds training back until the save in flight has no more need of the live tensors."""
        if self._background is not None and self._background.step_in_flight is not None:
            with self._stalling():
                self._background.wait_staged()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Waits for what is left of the copy. No communication."""
        self._wait_staged()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the copy: others swap weights here. No communication."""
        self._wait_staged()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves, and marks what it saves, if the monitored metric is the best. Communicates if one is monitored."""
        is_dry = trainer.fast_dev_run  # type: ignore[attr-defined]  # Lightning sets it
        if self._rng_of_training is None or self._best is None or self._saver is None or is_dry:
            return
        apply_rng_state(self._rng_of_training)
        with self._stalling():
            self._save_if_best(trainer, pl_module, self._best)

    @contextlib.contextmanager
    def _keep_generators(self) -> Iterator[None]:
        """Gives training the generators that it had: who goes on from a step's save does not validate it again."""
        self._rng_of_training = read_rng_state()
        try:
            yield
        finally:
            apply_rng_state(self._rng_of_training)
            self._rng_of_training = None

    def _save_if_best(self, trainer: Trainer, module: LightningModule, best: BestWatch) -> None:
        ranks = self._join()
        value = best.read(trainer.callback_metrics)
        if ranks.broadcast(best.is_best(value)):
            best.take(trainer.global_step, value)
            self._save(trainer, module, may_skip=False)
            if self._last_saved_step == trainer.global_step and ranks.is_first:  # it was there before the validation
                best.mark(self.directory, trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the copy: others change weights here. No communication."""
        self._wait_staged()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves if the last step is not saved yet, and waits until it is. Communicates."""
        if self._votes is not None:
            self._votes()
            self._votes = None
        is_untouched = self._last_step == 0 or trainer.global_step == 0
        with self._stalling():
            self._finish(trainer, pl_module)
            if self._saver is not None and self._has_save_at_end and not is_untouched:
                self._save(trainer, pl_module)
                self._finish(trainer, pl_module)
        self._remove_signals()
        self._close_background(wait_seconds=0.0)

    def _finish(self, trainer: Trainer, module: LightningModule) -> None:
        while self._background is not None and self._background.step_in_flight is not None:
            self._settle(trainer, module, self._background.finish())

    # ---- leaving

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves by choice, gives everything back and says what is saved. It does not communicate.

        Other ranks may be gone: which, is said.
        """
        self._votes = None
        unroute_load_checkpoint(trainer.strategy)
        unshield_validation(trainer)
        if self._rank_watch is not None:
            self._rank_watch.stop(exception)
        wait_seconds = _LEAVE_SECONDS
        if self._has_save_on_exception and self._begin_alone(trainer, pl_module, exception):
            wait_seconds = self._save_timeout_seconds if self._join().world_size == 1 else _ALONE_SECONDS
        self._close_background(wait_seconds=wait_seconds)
        lost = None if self._rank_watch is None else self._rank_watch.describe_lost()
        if lost is not None:
            warnings.warn(f"{lost} is gone: without it no rank can go on", LostRankWarning, stacklevel=2)
        if self._saver is not None:
            rank_zero_warn(f"training ended with {type(exception).__name__}; {self._describe_last()}")
        self._release()

    def _begin_alone(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> bool:
        """Saves the last window's end without the other ranks, if it is still there, and says whether it began."""
        boundary, saver = self._boundary, self._saver
        if boundary is None or saver is None or boundary.step in (0, self._last_saved_step):
            return False
        reason = self._why_not_alone(trainer, boundary, exception)
        if reason is not None:
            rank_zero_warn(f"step {boundary.step} is not saved: {reason}", category=SaveFailedWarning)
            return False

        def take() -> Snapshot:
            return self._take_snapshot(trainer, module, rng=boundary.rng)

        try:
            if self._background is None:
                self._note_saved(saver.save(take).manifest.step)
                return False
            outcome = self._background.settle_alone(_LEAVE_SECONDS)
            if outcome is not None and outcome.kind == "committed":
                self._note_saved(self._background.settled_step)
            if boundary.step == self._last_saved_step:
                return False
            self._background.begin(boundary.step, take, self._progress())
        except CheckpointError as error:
            warnings.warn(f"step {boundary.step} is not saved: {error}", SaveFailedWarning, stacklevel=2)
            return False
        return True

    def _why_not_alone(self, trainer: Trainer, boundary: Boundary, exception: BaseException) -> str | None:
        if isinstance(exception, CheckpointError):
            return "it was a save that failed"
        if trainer.global_step != boundary.step or not boundary.is_untouched:
            return "parameters or buffers have been written since its end"
        if self._rank_watch is not None and self._rank_watch.has_lost_process():
            return "another rank's process is gone"
        if self._join().world_size > 1 and (self._background is None or not self._background.has_plan):
            return "several ranks cannot save without talking to one another before the first save in the background"
        return None

    def _close_background(self, *, wait_seconds: float) -> None:
        """Ends the writer, after the save in flight if that ends in time."""
        background, self._background = self._background, None
        if background is not None:
            step = background.step_in_flight
            outcome = background.close(wait_seconds)
            if step is not None and outcome is not None and outcome.kind == "committed":
                self._note_saved(step)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        self._parts = PartsCache()  # it holds tensors

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives everything back. No communication."""
        unroute_load_checkpoint(trainer.strategy)
        unshield_validation(trainer)
        self._release()

    def _remove_signals(self) -> None:
        if self._signals is not None:
            self._signals.remove()

    def _release(self) -> None:
        self._boundary = None
        if self._rank_watch is not None:
            self._rank_watch.stop()
            self._rank_watch = None
        self._remove_signals()
        self._close_background(wait_seconds=_LEAVE_SECONDS)
        if self._lock is not None:
            self._lock.release()
            self._lock = None
