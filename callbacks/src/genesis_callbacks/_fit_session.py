"""The state of `AsyncProcessCheckpoint` from one fit's start to its end: directory, writer, signals and saves."""

import contextlib
import math
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from ._best_watch import BestWatch
from ._exception_save import ALONE_SECONDS, Boundary, begin_alone
from ._fit_saves import FitSaves, SaveHistory, SaveStatistics
from ._rank_watch import RankWatch
from ._save_options import SaveFailedWarning, SaveOptions
from ._trainer_restore import Restore
from ._trainer_state import read_counters, take_snapshot
from ._triggers import Vote, VoteExchange
from .base.checkpoint_errors import CheckpointError, ExistingCheckpointsError
from .base.events import EventLog
from .base.manifest import Ancestor
from .checkpoint.collect import MODEL_PREFIX, SWAPPED_PREFIX, name_parameters, read_mesh
from .checkpoint.commit import supersede
from .checkpoint.device import DevicePath, apply_rng_state, read_rng_state
from .checkpoint.job import Outcome
from .checkpoint.lineage import (
    DirectoryLock,
    describe_existing,
    list_checkpoints,
    list_committed,
    remove_abandoned,
    wait_for_orphans,
)
from .checkpoint.ranks import Ranks
from .checkpoint.save_target import RunMetadata, SaveTarget
from .checkpoint.scope import BoundScope, SaveScope, bind_scope
from .checkpoint.writer_process import WriterProcess

WATCHED_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# How long a restart waits for orphaned writers.
ORPHAN_SECONDS = 60.0
# How long a run that ends by an exception waits for the save in flight.
_LEAVE_SECONDS = 10.0


class SignalFlag:
    """Remembers the first signal that arrives while it is installed; a later SIGINT goes to the previous handler.

    Only the main thread can install it; in other threads `install` does nothing.

    Args:
        is_announced: Whether a line on standard error answers the first signal.
    """

    def __init__(self, *, is_announced: bool = False) -> None:
        self._is_announced = is_announced
        self._previous: dict[int, Any] = {}
        self.received = 0
        """Number of the signal, 0 for none."""
        self.is_validating = False
        """Whether the fit validates, so that the save comes later."""

    def install(self) -> None:
        """Installs handlers for the watched signals, and forgets an earlier signal."""
        self.received = 0
        # Python allows `signal.signal` in the main thread alone.
        if threading.current_thread() is threading.main_thread() and not self._previous:
            for number in WATCHED_SIGNALS:
                self._previous[number] = signal.signal(number, self._remember)

    def remove(self) -> None:
        """Restores the previous handlers; a second call does nothing."""
        while self._previous:
            number, previous = self._previous.popitem()
            # None stands for a handler that was not installed from Python, which Python cannot put back.
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Nothing else happens here: the handler may run in the middle of an optimizer step or of a collective, and
        # a save there would be torn. Lightning's own handler reduces over ranks, which hangs if only one rank gets it.
        previous = self._previous.get(number)
        if self.received and number == signal.SIGINT and callable(previous):
            previous(number, frame)
        if not self.received and self._is_announced:
            when = "this validation and one more step" if self.is_validating else "this step"
            answer = f"{signal.Signals(number).name}: saving after {when}; Ctrl-C again to stop without a save\n"
            # By the descriptor: the handler may run in the middle of a print, which cannot be entered again.
            with contextlib.suppress(OSError):
                os.write(2, answer.encode())
        self.received = self.received or number


def stop_training(trainer: Trainer) -> None:
    """Makes a fit end after the current batch; every rank calls it at the same batch."""
    # A limit from below would make Lightning train on in spite of should_stop.
    trainer.fit_loop.min_epochs = None
    trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True


class FitEvents:
    """The events of one fit, from `start` on. Before that nothing is written: the directory may be another run's.

    Args:
        run_dir: The run's directory.
        ranks: The run's.

    Attributes:
        log: Writes them.
    """

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self.log = EventLog(run_dir, ranks.rank)
        self._ranks = ranks
        self._is_open = False
        self._metrics_before: dict[str, Any] = {}

    def start(self) -> None:
        """Writes that this fit has taken the run's directory."""
        self._is_open = True
        rank, world_size = self._ranks.rank, self._ranks.world_size
        self.log.write("started", text=f"rank {rank} of {world_size}, process {os.getpid()} on {socket.gethostname()}")

    def verify(self, path: Path, step: int, level: str) -> None:
        """Writes that the checkpoint that is about to be restored verifies."""
        if self._is_open and self._ranks.is_first:
            self.log.write("verified", step=step, checkpoint=path, text=f"{level}, before it is restored")

    def restore(self, restore: Restore) -> None:
        """Writes that all of a checkpoint is in place."""
        if self._is_open and self._ranks.is_first:
            what = "only its weights" if restore.has_weights_alone else "all of its state"
            manifest = restore.manifest
            self.log.write("restored", step=manifest.step, clocks=manifest.counters, checkpoint=restore.path, text=what)

    def begin_validation(self, trainer: Trainer) -> None:
        """Remembers the metrics so far, to tell them from those that this validation logs."""
        self._metrics_before = dict(trainer.callback_metrics)

    def end_validation(self, trainer: Trainer) -> None:
        """Writes the metrics that a validation has logged; reading a value waits for the device."""
        before, self._metrics_before = self._metrics_before, {}
        now = trainer.callback_metrics  # on all ranks alike: a metric that is not computed yet may communicate
        if not self._is_open or not self._ranks.is_first or trainer.sanity_checking:
            return
        # By identity: training metrics stay in the dict, and a validation may log the same number as the one before.
        logged = {name: value for name, value in now.items() if value is not before.get(name)}
        metrics = {name: float(value) for name, value in logged.items()}
        text = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items() if math.isfinite(value))
        self.log.write("validated", step=trainer.global_step, clocks=read_counters(trainer), metrics=metrics, text=text)

    def fail(self, trainer: Trainer, error: BaseException) -> None:
        """Writes which error ends the fit on this rank."""
        if self._is_open:
            self._is_open = False
            self.log.write("failed", step=trainer.global_step, clocks=read_counters(trainer), error=error)

    def end(self, trainer: Trainer, signal_number: int | None) -> None:
        """Writes that the fit has ended, by itself or because of a signal."""
        if self._is_open:
            self._is_open = False
            text = "finished" if signal_number is None else f"stopped by {signal.Signals(signal_number).name}"
            self.log.write("ended", step=trainer.global_step, clocks=read_counters(trainer), text=text)


def _name_ancestor(start: Restore, directory: Path) -> Ancestor:
    """Returns the checkpoint that a run in `directory` continues, and its directory if that is another one."""
    if start.path.parent == directory:
        return start.ancestor
    # Relative, so that both runs may be moved together without breaking the lineage.
    return replace(start.ancestor, directory=os.path.relpath(start.path.parent, directory))


def _list_verified(start: Restore | None, scope: SaveScope) -> tuple[str, ...]:
    """Returns the hash of the manifest of the scope's base if a restore has just verified it, at that very place."""
    if start is None or scope.base is None:
        return ()
    hashes = {os.path.realpath(start.path): start.ancestor.manifest_hash}
    if start.manifest.base is not None:
        hashes[os.path.realpath(start.manifest.base.path)] = start.manifest.base.manifest_hash
    # By the place: the restore may have read another copy, because this one is damaged.
    place = os.path.realpath(scope.base)
    return (hashes[place],) if place in hashes else ()


class FitSession:
    """Everything that lives from `setup` to the end of one fit.

    Every rank makes one, then calls `open`, `start`, and at the end `release`, in this order. The docstring of a method
    that communicates mentions it.

    Args:
        options: The options of the callback.
        ranks: The ranks of the run.
        history: The run's.
        statistics: The run's.
        best: Follows the monitored metric; None without one.
    """

    def __init__(
        self,
        options: SaveOptions,
        ranks: Ranks,
        *,
        history: SaveHistory,
        statistics: SaveStatistics,
        best: BestWatch | None,
    ) -> None:
        self.ranks = ranks
        self.saves: FitSaves | None = None
        self.rng_of_training: dict[str, Any] | None = None
        """The generators as training left them, while a validation runs."""
        self._options = options
        self._directory = options.directory
        self._history, self._statistics, self._best = history, statistics, best
        self._lock: DirectoryLock | None = None
        self._rank_watch: RankWatch | None = None
        self.events: FitEvents | None = None
        """None for a dry run, which leaves nothing behind."""
        self._writer: WriterProcess | None = None
        self._signals = SignalFlag(is_announced=ranks.rank == 0) if options.save_on_signal else None
        self._votes = VoteExchange(ranks)
        self._boundary: Boundary | None = None
        self._last_step = 0
        self._has_swapped = False
        self._is_finished = False
        self._is_dry = False

    # ---- getting in

    def open(self, trainer: Trainer) -> None:
        """Takes the directory, and starts the writer process, which imports while the rest of the setup runs.

        Communicates.

        Raises:
            CheckpointError: The directory cannot be taken; on every rank alike.
        """
        # `attempt` gathers each rank's error before any rank raises, so that no rank waits forever for one that
        # has failed. It also keeps the other ranks here until rank 0 has cleared the files of the rank watch.
        self.ranks.attempt("taking the checkpoint directory", self._take_directory, error_type=CheckpointError)
        self._is_dry = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # Lightning sets it
        if self._best is not None:
            self._best.read_measure(trainer)
        run_dir, lost_rank_seconds = self._directory.parent, self._options.lost_rank_seconds
        if lost_rank_seconds is not None and self.ranks.world_size > 1:
            self._rank_watch = RankWatch(run_dir, self.ranks.rank, self.ranks.world_size, lost_rank_seconds)
        if not self._is_dry:
            self.events = FitEvents(run_dir, self.ranks)
            self.events.start()
        if self._options.mode == "process" and not self._is_dry:
            self._writer = WriterProcess()

    def _take_directory(self) -> None:
        if self.ranks.is_first:
            # The lock comes first. A killed trainer frees it, but its writer processes may still commit: they are
            # awaited before anything in the directory is read or removed.
            self._lock = DirectoryLock(self._directory)
            wait_for_orphans(self._directory, ORPHAN_SECONDS)
            RankWatch.clear(self._directory.parent)

    def start(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        run: RunMetadata,
        device_path: DevicePath,
        start: Restore | None,
        run_directories: Sequence[Path],
    ) -> None:
        """Tries to encode all state, tidies the directory and prepares for saves. Communicates.

        Args:
            trainer: The fit's.
            module: The fit's.
            run: For the manifest, without the mesh.
            device_path: The path that saves take on the device.
            start: The restored checkpoint that training continues, if there is one.
            run_directories: All directories that this run saves into: a checkpoint in any of them is its own.

        Raises:
            CheckpointError: One of these steps fails; on every rank alike.
        """
        # State that cannot be saved without pickle must end the run now, and not at the first save hours later.
        trial = self.ranks.attempt(
            "trying to encode the state",
            lambda: take_snapshot(trainer, module, self.ranks.rank, has_optimizer=self._options.save_optimizer),
            error_type=CheckpointError,
        )
        self._has_swapped = any(part.part.name.startswith(SWAPPED_PREFIX) for part in trial.parts)
        scope = bind_scope(
            self._options.scope,
            trial.parts,
            _name_updated(module, trainer.optimizers),
            self.ranks,
            level=self._options.verify_level,
            verified=_list_verified(start, self._options.scope),
        )
        del trial  # it refers to live tensors, which would keep memory that training frees
        before = self._history.target
        target = self._history.target = SaveTarget(
            self._directory,
            self.ranks,
            origin=replace(run, mesh=_read_axes(trainer, module)),
            retention=self._options.retention,
            events=None if self.events is None else self.events.log,
            scope=scope,
        )
        # Between the decision what this run continues and its first save: the directory must hold one lineage only,
        # or `latest` after a kill could find a checkpoint of the abandoned future.
        last_step = self._go_on(target, before, trainer.global_step, start, run_directories)
        if last_step < 0 and self._options.on_existing == "refuse" and not self._is_dry:
            refusal, *_ = self.ranks.attempt_and_gather(
                "looking for checkpoints",
                lambda: describe_existing(self._directory) if self.ranks.is_first else None,
                error_type=CheckpointError,
            )
            if refusal is not None:
                self._history.target = before  # this fit is not one of the run
                raise ExistingCheckpointsError(refusal)
        self.ranks.attempt(
            "cleaning the directory",
            lambda: self._tidy(target.sequence, last_step, scope, start),
            error_type=CheckpointError,
        )
        self.saves = FitSaves(
            trainer,
            module,
            options=self._options,
            target=target,
            history=self._history,
            statistics=self._statistics,
            best=self._best,
        )
        writer, self._writer = self._writer, None
        self.saves.start_pipeline(writer, device_path)
        self.saves.reserve()
        self._last_step = trainer.global_step

    def _go_on(
        self,
        target: SaveTarget,
        before: SaveTarget | None,
        global_step: int,
        start: Restore | None,
        run_directories: Sequence[Path],
    ) -> int:
        """Gives the target the checkpoint that the run continues; returns the last step of this run that stays."""
        if start is not None:
            target.continue_from(_name_ancestor(start, self._directory), start.manifest.sequence)
            self._history.last_step = start.manifest.step if start.path.parent == self._directory else None
            # The run continues from its checkpoints up to this step, in any of its directories.
            return start.manifest.step if start.path.parent in run_directories else -1
        if before is not None and global_step > 0:  # the same Trainer runs another fit
            target.continue_from(before.previous, before.sequence)
            return global_step
        self._history.last_step = None
        return -1

    def _tidy(self, sequence: int, last_step: int, scope: BoundScope | None, start: Restore | None) -> None:
        """Removes abandoned saves, and moves checkpoints aside that are not of this run's lineage."""
        if not self.ranks.is_first or self._is_dry:
            return
        remove_abandoned(self._directory)
        is_own = last_step >= 0
        others = [
            path
            for path, manifest in list_committed(self._directory)
            if manifest.sequence > sequence or manifest.step > last_step
        ]
        if not is_own:
            others = list_checkpoints(self._directory)  # damaged ones, too, as `latest` would look at them
        if scope is not None and any(path.samefile(scope.base) for path in others):
            raise CheckpointError(
                f"the base {scope.base} lies in this run's directory, but this run does not continue from it: give the "
                "run its own run_dir, or resume from the base"
            )
        target = supersede(others)
        if target is not None:
            whose = "newer" if is_own else "earlier"
            what = f"{len(others)} {whose} checkpoints were" if len(others) > 1 else f"1 {whose} checkpoint was"
            begin = (
                f"training continues from the older step {last_step}"
                if is_own
                else f"training starts over {'from step 0' if start is None else f'from {start.path}'}"
            )
            rank_zero_warn(f"{begin}: {what} moved to {target}, and nothing was deleted")
        line = None if self._best is None else self._best.agree_with(self._directory)
        if line is not None:
            rank_zero_info(line)

    def watch(self) -> None:
        """Starts to watch signals and the other ranks. No communication."""
        if self._signals is not None:
            self._signals.install()
        if self._rank_watch is not None:
            self._rank_watch.start()

    # ---- while training runs

    @contextlib.contextmanager
    def keep_generators(self) -> Iterator[None]:
        """Restores training's generators after a validation.

        A run that resumes from a save after the validation does not validate that step, so it would draw other numbers.
        """
        self.rng_of_training = read_rng_state()
        self._note_validating(True)
        try:
            yield
        finally:
            self._note_validating(False)
            apply_rng_state(self.rng_of_training)
            self.rng_of_training = None

    def _note_validating(self, is_validating: bool) -> None:
        if self._signals is not None:
            self._signals.is_validating = is_validating

    def note_verified(self, restore: Restore) -> None:
        """Records that the checkpoint of `restore` was verified. No communication."""
        if self.events is not None:
            self.events.verify(restore.path, restore.manifest.step, self._options.verify_level)

    def end_validation(self, trainer: Trainer) -> None:
        """Saves and marks a checkpoint if the metric is among the best. Communicates if there is a metric."""
        if self.events is not None:
            self.events.end_validation(trainer)
        if self.saves is None or self.rng_of_training is None or self._best is None or self._is_dry:
            return
        # The shield around the validation restores the generators after this hook. A save here must not record the
        # state in which the validation left them, because a run that resumes from it does not repeat the validation.
        apply_rng_state(self.rng_of_training)
        with self.saves.stalling():
            self.saves.save_if_best(self._best)

    def remember_boundary(self, trainer: Trainer, module: LightningModule) -> None:
        """Records a window's end, for a save on an exception."""
        self._boundary = Boundary(trainer.global_step, module) if self._options.save_on_exception else None

    def take_window(self, step: int) -> bool:
        """Returns whether a batch ended a window: `step` differs from the step of the batch before."""
        # By the step and not by accumulate_grad_batches: manual optimization steps whenever the module wants to.
        is_new, self._last_step = step != self._last_step, step
        return is_new

    def vote(self, saves: FitSaves) -> Vote:
        """Returns what all ranks agree on at a window's end. Starts one small reduction."""
        # Clocks differ between ranks, so only rank 0's votes; a signal or a save's outcome may come from any rank.
        every_n_seconds = self._options.every_n_seconds
        is_due = every_n_seconds is not None and saves.elapsed_seconds >= every_n_seconds
        ours = Vote(
            self._signals.received if self._signals is not None else 0,
            self.ranks.is_first and is_due,
            saves.pipeline.poll() if saves.pipeline is not None else 0,
        )
        return self._votes.exchange(ours)

    # ---- getting out

    def finish(self, global_step: int) -> None:
        """Saves the last step if it is not saved yet, and waits until it is. Communicates."""
        self._is_finished = True
        # First the vote under way: gloo matches collectives by their order, on every rank.
        self._votes.finish()
        is_untouched = self._last_step == 0 or global_step == 0
        saves = self.saves
        assert saves is not None
        with saves.stalling():
            saves.finish()
            if self._options.save_at_end and not is_untouched:
                saves.save()
                saves.finish()
        if self._best is not None and not self._best.best and not (is_untouched or self._is_dry):
            rank_zero_warn(
                f"no validation has logged a finite value of the monitor {self._options.monitor!r}: no checkpoint is "
                "marked as the best"
            )

    def end(self, *, wait_seconds: float = 0.0) -> None:
        """Gives back the signals, the writer and the references to tensors. No communication.

        Args:
            wait_seconds: How long the save in flight may take to end.
        """
        if self._signals is not None:
            self._signals.remove()
        self._close_saves(wait_seconds=wait_seconds)

    def _close_saves(self, *, wait_seconds: float) -> Outcome | None:
        outcome = None if self.saves is None else self.saves.close(wait_seconds=wait_seconds)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        return outcome

    def has_lost_process(self) -> bool:
        """Returns whether the process of another rank ended without recording a failure."""
        return self._rank_watch is not None and self._rank_watch.has_lost_process()

    def claims_to_report_lost(self) -> bool:
        """Returns whether this rank reports which ranks are gone; one rank of each node does."""
        return self._rank_watch is not None and self._rank_watch.claims_to_report()

    def leave(self, trainer: Trainer, exception: BaseException) -> str | None:
        """Saves, if asked to, when training ends by an exception; returns which ranks are gone. No communication."""
        if self.events is not None:
            self.events.fail(trainer, exception)
        # Nothing from here on may wait for another rank: it may be gone, or hang in a collective of the training.
        self._votes.abandon()
        # Before the save: the other ranks learn why this one ends, and its own watch cannot end the process meanwhile.
        if self._rank_watch is not None:
            self._rank_watch.stop(exception)
        seconds = self._save_alone(trainer, exception)
        outcome = self._close_saves(wait_seconds=_LEAVE_SECONDS if seconds is None else seconds)
        if seconds is not None and outcome is not None and outcome.text:
            warnings.warn(f"the last window's end is not saved: {outcome.text}", SaveFailedWarning, stacklevel=2)
        return None if self._rank_watch is None else self._rank_watch.describe_lost()

    def _save_alone(self, trainer: Trainer, exception: BaseException) -> float | None:
        """Begins a save of the last window's end, if asked to; returns how long to wait for it, None if none began."""
        saves, boundary = self.saves, self._boundary
        if saves is None or boundary is None:
            return None
        # Averaging callbacks write through `.data`, which torch does not count: the boundary cannot see it.
        is_swapped = self._has_swapped and (trainer.validating or self._is_finished)
        if not begin_alone(
            saves, self._history, boundary, self._rank_watch, exception, trainer.global_step, is_swapped=is_swapped
        ):
            return None
        return self._options.save_timeout_seconds if self.ranks.world_size == 1 else ALONE_SECONDS

    def release(self) -> None:
        """Gives everything back; a second call does nothing. No communication."""
        self._boundary = None
        # An ExitStack calls all of them even if one raises, the last one first: the lock is freed when no writer of
        # this process can still touch the directory.
        with contextlib.ExitStack() as stack:
            if self._lock is not None:
                stack.callback(self._lock.release)
                self._lock = None
            stack.callback(self.end, wait_seconds=_LEAVE_SECONDS)
            if self._rank_watch is not None:
                stack.callback(self._rank_watch.stop)
                self._rank_watch = None


def _name_updated(module: LightningModule, optimizers: Sequence[Optimizer]) -> frozenset[str]:
    """Returns the full names of the parameters that optimizers train."""
    names = name_parameters(module)
    parameters = [
        parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]
    return frozenset(
        MODEL_PREFIX + names[id(parameter)]
        for parameter in parameters
        if parameter.requires_grad and id(parameter) in names
    )


def _read_axes(trainer: Trainer, module: LightningModule) -> dict[str, int]:
    """Returns the degrees of parallelism for the manifest: those of the strategy, or those that parameters show."""
    degrees = getattr(trainer.strategy, "parallel_degrees", None)
    return read_mesh(module) if degrees is None else dict(degrees)
