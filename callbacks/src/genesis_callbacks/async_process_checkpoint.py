"""Saves and restores a run with the checkpoint engine, in any Lightning project: one device, DDP, FSDP2.

    checkpoint = AsyncProcessCheckpoint(run_dir="runs/mine", every_n_steps=500, keep_last=3)
    trainer = Trainer(callbacks=[checkpoint], ...)
    trainer.fit(model, ckpt_path=checkpoint.latest())

    logged                      unit and meaning, once for each save that was committed
    checkpoint/stall_seconds    all time that the training thread spent in these hooks for the save
    checkpoint/staged_bytes     copied on this rank
    checkpoint/write_seconds    from the writer's begin to its end: behind the training, but in mode `sync`
    checkpoint/num_skipped      saves that were due while the one before still ran (`when_busy="skip"`), so far
    checkpoint/step             of the save; the row is that of the step at which it was known to be committed

It communicates over a gloo group of its own, made once for a fit: one small reduction for each step, in the background.
A save in mode `sync` has three exchanges; in the other modes the first save, and a save after a change of the tensors,
has one. On an accelerator there is one more, when the memory for saves is allocated. No collective runs on the group
that trains.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from ._argument_types import explaining
from ._best_watch import BestWatch
from ._compat import (
    LoadCheckpoint,
    finish_before_hooks,
    give_methods_back,
    route_ckpt_path,
    route_load_checkpoint,
    shield_validation,
    watch_loaders,
)
from ._data_position import OnLostDataPosition
from ._fit_saves import SaveHistory, SaveStatistics
from ._fit_session import FitSession, stop_training
from ._rank_watch import say_gone
from ._refused_strategies import refuse_to_save
from ._restore_route import LATEST, RestoreRoute, choose_path
from ._save_options import (
    LostRankWarning,
    OnExisting,
    OnSaveFailure,
    RestoredState,
    SaveFailedWarning,
    SaveOptions,
    SaveSkippedWarning,
    SlowDeviceWarning,
    TornSnapshotWarning,
    WhenBusy,
)
from ._start_notices import describe_start
from ._trainer_restore import RestoreReport
from ._triggers import is_save_due, read_moment
from .base.events import EventLog
from .base.run_directory import RunDirectory, read_run_dir
from .checkpoint.best import MonitorMode, find_best, read_best
from .checkpoint.device import read_rng_state
from .checkpoint.device_proof import DeviceProof, DeviceReport, prove_device
from .checkpoint.drift import DriftPolicy
from .checkpoint.lineage import list_committed
from .checkpoint.pipeline import SaveMode, Staging
from .checkpoint.ranks import WorldRanks
from .checkpoint.save_target import RunMetadata
from .checkpoint.scope import SaveScope
from .checkpoint.verify import VerifyLevel
from .phases import find_callbacks

__all__ = [
    "LATEST",
    "AsyncProcessCheckpoint",
    "LostRankWarning",
    "SaveFailedWarning",
    "SaveSkippedWarning",
    "SlowDeviceWarning",
    "TornSnapshotWarning",
]


def _siblings(trainer: Any) -> list["AsyncProcessCheckpoint"]:
    """Returns the Trainer's callbacks of this kind: each has its own directory, and one of them restores for all."""
    return find_callbacks(trainer, AsyncProcessCheckpoint)


route_ckpt_path(_CheckpointConnector, lambda trainer, path, own: choose_path(trainer, path, own, _siblings(trainer)))


class AsyncProcessCheckpoint(Checkpoint):
    """Saves all of a run at the end of an accumulation window, and gives it back through `Trainer.fit(ckpt_path=...)`.

    Works under one device, DDP and FSDP2 (ModelParallelStrategy) and their subclasses, with automatic and manual
    optimization; what one of them saved, any other restores, on any number of ranks. State is taken only after a
    batch that ended a window, and a signal waits for that moment. Checkpoints lie in
    `run_dir/checkpoints/step-XXXXXXXX`. One run holds the directory at a time.

    Every rank has one with the same arguments. It communicates as the module says. Not thread-safe.

    Args:
        run_dir: The run's directory, the same on all ranks and on a disk that they share.
        every_n_steps: Save when Lightning's global step is a multiple of it; None for not. That counts optimizer steps,
            as `ModelCheckpoint.every_n_train_steps` does: with `accumulate_grad_batches=4` one step is four batches.
        every_n_epochs: Save after the last step of an epoch, once in this number of epochs; None for not.
        every_n_minutes: Save this number of minutes after the last save, by rank 0's clock; None for not.
        save_at_end: Save when training ends, if the last step is not saved yet.
        save_on_signal: On SIGTERM or SIGINT on any rank: all ranks save at the next step's end and stop
            (`stopped_by_signal`). SIGINT after the first signal interrupts at once.
        save_on_exception: When training ends by an exception and nothing has been written since the last window's end,
            save that. With several ranks every rank must have met it, after a first save.
        save_optimizer: Save the optimizers' state. Without it a checkpoint can only provide weights.
        monitor: Key of a metric that validation logs: after a validation that is among the `keep_best` best so far,
            save (this never skips) and mark the checkpoint, which stays. None for no best.
        monitor_mode: Whether a smaller ("min") or a larger value ("max") of it is better.
        keep_best: Number of best checkpoints by `monitor` to keep, from 1 to 100. Ties keep the earlier one. A
            checkpoint that drops out is deleted after the next save, unless another rule keeps it.
        keep_last: Number of newest checkpoints to keep, in addition to the best; None keeps all.
        keep_every_n_steps: Keep every checkpoint whose step is a multiple of this; None for no such rule.
        restore: What to restore from another run's checkpoint: "all"; "no_optimizer", all but the optimizer's moments,
            which start from zero; or "weights", with which a new run begins at step 0. A run's own checkpoints are
            always restored in full.
        on_existing: What a fit does that would not continue the checkpoints in `run_dir`, because its `ckpt_path` is
            None or another run's: "refuse"; or "start_over", which moves them to `superseded-<n>` and begins.
        mode: Who writes: "sync" the training thread, "thread" a thread beside it, "process" a writer process for each
            rank, which starts before the first step and imports beside it.
        staging: In the other modes than "sync": "overlapped" copies while the next forward and backward run, and
            waits before the optimizer step; "blocking" copies at once. What is staged is compared with what was live;
            where training changed it, the save is made again and staging stays blocking.
        when_busy: What a due save does while the one before still runs: "wait" for it, or "skip" with a
            `SaveSkippedWarning` and a count. A save that ends the run always waits.
        save_timeout_seconds: Time after which a writer that does not answer is killed; its save has then failed.
        lost_rank_seconds: When another rank's process has ended, this rank ends after this time and names the lost
            rank, unless the process group has noticed by itself; None disables this watch.
        on_save_failure: "raise" ends training with the error; "warn" gives a `SaveFailedWarning`. The last good
            checkpoint stays in either case.
        on_lost_data_position: The action if a data loader does not accept its saved state, or if another number of
            ranks had saved it: "raise" refuses; "warn" continues, with a `LostDataPositionWarning`.
        verify_level: How much a restore verifies before it begins; what is placed is always compared by digest. Below
            "deep", `latest` stops at a checkpoint whose hashes are right and whose tensors are not.
        recipe: The resolved recipe as plain JSON, for the manifest. May be set as an attribute until training starts.
        identity: What must be the same at restore (`tokenizer_hash`, ...), plain JSON; it may be set like `recipe`.
        allow_changed: Globs of keys that may differ at restore: dotted keys of `recipe`, names in `identity`.
        drift_policy: Which keys of `recipe` and `identity` may differ freely, and which never; by default each must be
            allowed by its key. It may be set like `recipe`. Other package versions only warn.
        scope: Which tensors of the model each save leaves to a base checkpoint, so that it does not hold them itself;
            None for none: everything is held. They must be frozen, and be what the base holds; a save in which one is
            not fails.

    Attributes:
        save_optimizer, monitor, on_existing: As given.
        scope: The tensors that each save leaves to a base checkpoint, whose path is absolute; None for none.
        device_proofs: What the application wants to know of an accelerator, beside what saves need. They are proved at
            each start, and may be set until then.
        stopped_by_signal: Number of the signal that ended the last fit, or None. The caller makes the exit status.
        lost_ranks: Which ranks had ended when the last fit ended by an exception, as "rank 1 (process 42) is gone", or
            None. None, too, where all ranks agreed to end.
        reports_lost_ranks: Whether this rank warned of `lost_ranks`; one rank of each node does.
        restore_report: The parts that the last restore kept, rebuilt and reset; None before a restore.
        statistics: What saves cost: `num_failed` and `num_skipped` of the last fit, and of the last settled save
            `last_stall_seconds` (all time that the training thread spent here), `last_staged_bytes` (copied on this
            rank) and `last_write_seconds`.

    Raises:
        ValueError: An argument has no meaning.
    """

    @explaining
    def __init__(
        self,
        *,
        run_dir: str | Path,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        every_n_minutes: float | None = None,
        save_at_end: bool = True,
        save_on_signal: bool = True,
        save_on_exception: bool = False,
        save_optimizer: bool = True,
        monitor: str | None = None,
        monitor_mode: MonitorMode = "min",
        keep_best: int = 1,
        keep_last: int | None = 3,
        keep_every_n_steps: int | None = None,
        restore: RestoredState = "all",
        on_existing: OnExisting = "refuse",
        mode: SaveMode = "process",
        staging: Staging = "overlapped",
        when_busy: WhenBusy = "wait",
        save_timeout_seconds: float = 600.0,
        lost_rank_seconds: float | None = 10.0,
        on_save_failure: OnSaveFailure = "raise",
        on_lost_data_position: OnLostDataPosition = "raise",
        verify_level: VerifyLevel = "deep",
        recipe: dict[str, Any] | None = None,
        identity: dict[str, Any] | None = None,
        allow_changed: Sequence[str] = (),
        drift_policy: DriftPolicy | None = None,
        scope: SaveScope | None = None,
    ) -> None:
        super().__init__()
        self._options = SaveOptions(
            directory=RunDirectory(read_run_dir(run_dir).resolve()).checkpoints,
            every_n_steps=every_n_steps,
            every_n_epochs=every_n_epochs,
            every_n_minutes=every_n_minutes,
            save_at_end=save_at_end,
            save_on_signal=save_on_signal,
            save_on_exception=save_on_exception,
            save_optimizer=save_optimizer,
            monitor=monitor,
            monitor_mode=monitor_mode,
            keep_best=keep_best,
            keep_last=keep_last,
            keep_every_n_steps=keep_every_n_steps,
            restore=restore,
            on_existing=on_existing,
            mode=mode,
            staging=staging,
            when_busy=when_busy,
            save_timeout_seconds=save_timeout_seconds,
            lost_rank_seconds=lost_rank_seconds,
            on_save_failure=on_save_failure,
            on_lost_data_position=on_lost_data_position,
            verify_level=verify_level,
            allow_changed=tuple(allow_changed),
            scope=(scope or SaveScope.everything()).resolve(),
        )
        self.directory = self._options.directory
        self.save_optimizer = save_optimizer
        self.monitor = monitor
        self.on_existing = on_existing
        self.scope = self._options.scope
        self.recipe: Mapping[str, Any] = recipe or {}
        self.identity: Mapping[str, Any] = identity or {}
        self.drift_policy = drift_policy or DriftPolicy()
        self.device_proofs: Sequence[DeviceProof] = ()
        self.stopped_by_signal: int | None = None
        self.lost_ranks: str | None = None
        self.reports_lost_ranks = False
        self.restore_report: RestoreReport | None = None
        self._world = WorldRanks()
        self._route = RestoreRoute(self._options, self._world)
        self._history = SaveHistory()
        self.statistics = SaveStatistics()
        self._best = None if monitor is None else BestWatch(monitor, monitor_mode, keep_best)
        self._session: FitSession | None = None  # from a fit's setup to its end
        self._proved = DeviceReport()

    @property
    def has_signal_votes(self) -> bool:
        """Whether ranks agree at each window's end on the signals that some of them got."""
        return self._options.save_on_signal

    @property
    def state_key(self) -> str:
        """The key of this callback's state. It holds the directory, because a Trainer may have several of them."""
        return self._generate_state_key(run_dir=str(self.directory.parent))

    @property
    def last_saved(self) -> Path | None:
        """The newest checkpoint that this run has saved or restored, or None."""
        return self._history.last_saved

    @property
    def recent_saves(self) -> tuple[Path, ...]:
        """The last few checkpoints that this callback has saved, oldest first."""
        return tuple(self._history.recent)

    @property
    def best_model_path(self) -> str:
        """The best checkpoint on the disk, as `best()`; the newest without a `monitor`. Empty if there is none."""
        if self.monitor is None:  # as `ModelCheckpoint` does
            return self.last_model_path
        best = self.best()
        return "" if best is None else str(best)

    @property
    def best_model_score(self) -> Tensor | None:
        """The value of `monitor` of the best checkpoint on the disk, or None."""
        best = read_best(self.directory)
        # The type that `ModelCheckpoint` has; the value is the recorded one, bit for bit.
        return None if best is None else torch.tensor(best.value, dtype=torch.float64)

    @property
    def last_model_path(self) -> str:
        """The newest committed checkpoint on the disk, which is not verified. Empty if there is none."""
        committed = list_committed(self.directory)
        return str(committed[-1][0]) if committed else ""

    @property
    def events(self) -> EventLog | None:
        """The event log of this rank during a fit, otherwise None."""
        session = self._session
        return None if session is None or session.events is None else session.events.log

    def latest(self) -> Path | None:
        """Returns the newest checkpoint of the run that verifies, or None: for `Trainer.fit(ckpt_path=...)`.

        Every rank calls it. Within a process group rank 0 searches and informs the others; before there is one, each
        rank looks for itself and comes to the same answer. Rank 0 quarantines a checkpoint that does not verify,
        with a warning; in the directory of another live run it is passed over. `ckpt_path="latest"` means the same.
        """
        return self._route.find_latest()

    def best(self) -> Path | None:
        """Returns the checkpoint that is marked as the best by `monitor`, or None. It does not verify, nor communicate.

        Raises:
            CorruptCheckpointError: The mark cannot be read.
        """
        return find_best(self.directory)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values: which steps are the best."""
        return {} if self._best is None else {"best": self._best.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` returned."""
        if self._best is not None and "best" in state_dict:
            self._best.load_state_dict(state_dict["best"])

    # ---- getting in and out of a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the directory and replaces the strategy's `load_checkpoint`. Communicates."""
        # The first hook with a process group and the last one before Lightning restores, under every strategy.
        ranks = self._world.join()
        self._route.reset()
        if stage == TrainerFn.FITTING:
            refuse_to_save(trainer.strategy)
            self.stopped_by_signal, self.lost_ranks, self.restore_report = None, None, None
            self.reports_lost_ranks = False
            self.statistics.begin_fit()
            self._release()
            self._session = FitSession(
                self._options, ranks, history=self._history, statistics=self.statistics, best=self._best
            )
            self._session.open(trainer)
            self._proved = prove_device(trainer.strategy.root_device, self.device_proofs)
            for failure in self._proved.failures:
                warnings.warn(failure, SlowDeviceWarning, stacklevel=2)
        route_load_checkpoint(trainer.strategy, lambda original, path: self._load(trainer, pl_module, original, path))

    def _load(
        self, trainer: Trainer, module: LightningModule, original: LoadCheckpoint, path: str | Path
    ) -> dict[str, Any]:
        loaded = self._route.load(
            trainer,
            module,
            original,
            path,
            run=self._describe_run(),
            drift_policy=self.drift_policy,
            siblings=[sibling._route for sibling in _siblings(trainer)],
        )
        if self._route.restored is not None and self._session is not None:
            self._session.note_verified(self._route.restored)
        return loaded

    def _describe_run(self) -> RunMetadata:
        return RunMetadata(self.identity, self.recipe, environment=self._proved.environment)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the restored state, tries to encode all state, and prepares for saves. Communicates."""
        # Not in `on_fit_start`: under FSDP2 Lightning restores after that hook. Here every strategy has restored.
        session, restore, start = self._session, self._route.restored, self._route.started_from
        assert session is not None
        if restore is not None and not trainer.strategy.restore_checkpoint_after_setup:
            restore.check_after_lightning(pl_module, trainer.optimizers)
        if restore is not None:
            restore.keep_rates(trainer)
        # Before `place_data`, which restarts the iterators: the watch has to see the first fetch after that.
        watch_loaders(trainer, read_rng_state)
        session.start(
            trainer,
            pl_module,
            run=self._describe_run(),
            device_path=self._proved.path,
            start=start,
            run_directories=[sibling.directory for sibling in _siblings(trainer)],
        )
        if restore is not None:
            restore.place_data(trainer, self._options.on_lost_data_position)
            restore.apply_rng()  # after the loaders: their iterators may draw from the same generators
            self._history.last_saved = restore.path
            self.restore_report = restore.build_report(trainer)
            rank_zero_info(self.restore_report.text)
            if session.events is not None:
                session.events.restore(restore)
        is_own = start is not None and start.path.resolve().parent in [each.directory for each in _siblings(trainer)]
        self._route.reset()
        for notice in describe_start(trainer, self._options):
            rank_zero_info(notice)
        session.watch()
        shield_validation(
            trainer,
            session.keep_generators,
            validates_restored=is_own,
            is_stopped=lambda: self.stopped_by_signal is not None,
        )
        finish_before_hooks(trainer, lambda: session.finish(trainer.global_step))
        session.remember_boundary(trainer, pl_module)

    # ---- saving

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves if the batch ended a window and a save is due. Starts one small reduction; a save communicates more.

        The first window's end also waits for the writers of all ranks, unless a validation has saved before.
        """
        session = self._session
        if session is None or session.saves is None or not session.take_window(trainer.global_step):
            return
        with session.saves.stalling():
            session.saves.wait_writer()
            vote = session.vote(session.saves)
            # The vote is the same on all ranks, so they stop, settle and save at the same window.
            if vote.signal_number:
                self.stopped_by_signal = vote.signal_number
                stop_training(trainer)
            session.saves.settle(vote.outcome)
            session.saves.reserve()
            if is_save_due(read_moment(trainer), vote, self._options):
                session.saves.save()
            if trainer.is_last_batch:
                # Other callbacks may change weights in on_train_epoch_end. Lightning calls theirs before this one's,
                # since `Checkpoint` callbacks run last, so a wait in that hook alone would come too late.
                session.saves.wait_staged()
        session.remember_boundary(trainer, pl_module)

    def _wait_staged(self) -> None:
        if self._session is not None and self._session.saves is not None:
            self._session.saves.wait_staged()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Waits for the rest of the copy. No communication."""
        # The latest hook before parameters change: forward and backward only read them, so the copy overlaps both.
        self._wait_staged()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the copy, because averaging callbacks swap weights here. No communication."""
        self._wait_staged()
        if self._session is not None and self._session.events is not None:
            self._session.events.begin_validation(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves and marks a checkpoint if the monitored metric is among the best. Communicates if there is a metric."""
        if self._session is not None:
            self._session.end_validation(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the copy, because other callbacks change weights here. No communication."""
        self._wait_staged()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the writer. The last step has been saved before any callback's `on_train_end`. No communication."""
        if self._session is not None:
            self._session.end()

    # ---- leaving

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves if asked to, releases everything, and warns which ranks are gone and what is saved.

        It does not communicate, because other ranks may be gone. Lightning does not call `teardown` after this hook.
        """
        give_methods_back(trainer)
        try:
            self._leave(trainer, exception)
        except Exception as error:  # a failed device, for example: it must not hide the error that ended training
            text = f"{type(error).__name__}: {error}"
            warnings.warn(f"an operation at the end of training failed: {text}", SaveFailedWarning, stacklevel=2)
        finally:
            self._release()

    def _leave(self, trainer: Trainer, exception: BaseException) -> None:
        session = self._session
        lost = None if session is None else session.leave(trainer, exception)
        # Ranks that have agreed to end miss nobody, unless a process is gone.
        is_agreed = getattr(exception, "ends_all_ranks", False)
        if session is not None and lost is not None and (not is_agreed or session.has_lost_process()):
            self.lost_ranks = say_gone(lost)
            self.reports_lost_ranks = session.claims_to_report_lost()
            if self.reports_lost_ranks:
                warnings.warn(f"{self.lost_ranks}: no rank can continue", LostRankWarning, stacklevel=2)
        if self._history.target is not None:
            verb = "stopped" if isinstance(exception, KeyboardInterrupt) else "failed"
            rank_zero_warn(f"Training {verb} ({type(exception).__name__}); {self._history.describe()}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Releases everything. No communication."""
        give_methods_back(trainer)
        if self._session is not None and self._session.events is not None:
            self._session.events.end(trainer, self.stopped_by_signal)
        self._release()

    def _release(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.release()
