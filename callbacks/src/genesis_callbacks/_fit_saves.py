"""The saves of one fit: it begins each save, settles it when all ranks know how it ended, and records it."""

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ._best_watch import BestWatch
from ._save_options import SaveFailedWarning, SaveOptions, SaveSkippedWarning, SlowDeviceWarning, TornSnapshotWarning
from ._step_watch import StepWatch
from ._trainer_state import SnapshotCache, take_snapshot
from ._triggers import read_moment
from .base.checkpoint_errors import CheckpointError, SaveFailedError, UnreadableCheckpointError
from .base.run_directory import checkpoint_name
from .checkpoint.collect import MODEL_PREFIX, name_parameters
from .checkpoint.device import DevicePath, is_host
from .checkpoint.expect import format_bytes
from .checkpoint.job import Outcome
from .checkpoint.one_save import Progress
from .checkpoint.pipeline import SavePipeline
from .checkpoint.save_target import RetentionWarning, SaveTarget, Snapshot
from .checkpoint.writer_process import WriterProcess
from .phases import in_phase

_NUM_RECENT = 8


def describe_memory(copy_bytes: int, writer_bytes: int, scratch_bytes: int = 0) -> str:
    """Returns a sentence on the memory that saves in the background take on one rank.

    Example:
        >>> describe_memory(528, 0)
        'Background saves need 528 bytes of memory for copies (rank 0).'
    """
    text = f"Background saves need {format_bytes(copy_bytes)} of memory for copies"
    if scratch_bytes > 0:
        text += f", {format_bytes(scratch_bytes)} on the device for digests"
    if writer_bytes == 0:
        return f"{text} (rank 0)."
    writer = f"{format_bytes(writer_bytes)} for the writer process"
    return f"{text} and {writer} (rank 0; the latter whatever the model's size)."


class SaveStatistics:
    """Counts saves, and the training thread's time in the hooks while one is in flight.

    It outlives a fit. No communication.

    Attributes:
        num_failed: Saves that failed in this fit.
        num_skipped: Saves that were skipped in this fit.
        last_stall_seconds: All time that the training thread spent for the last settled save.
        last_staged_bytes: Bytes that this save copied on this rank.
        last_write_seconds: How long the writer took for this save.
    """

    def __init__(self) -> None:
        self.num_failed = 0
        self.num_skipped = 0
        self.last_stall_seconds = 0.0
        self.last_staged_bytes = 0
        self.last_write_seconds = 0.0
        self._stall_seconds = 0.0
        self._mark_seconds = 0.0
        self._has_told_memory = False

    def begin_fit(self) -> None:
        """Counts the saves of another fit."""
        self.num_failed = self.num_skipped = 0

    @contextlib.contextmanager
    def stalling(self, is_in_flight: Callable[[], bool]) -> Iterator[None]:
        """Counts the time of a hook for the save that is in flight at the hook's end."""
        # At the end, because a hook may settle one save and begin the next: `log` takes the first one's share inside.
        self._mark_seconds = time.perf_counter()
        try:
            yield
        finally:
            self._count()
            if not is_in_flight():
                self._stall_seconds = 0.0

    def _count(self) -> None:
        now_seconds = time.perf_counter()
        self._stall_seconds += now_seconds - self._mark_seconds
        self._mark_seconds = now_seconds

    def log(self, trainer: Trainer, pipeline: SavePipeline, write_seconds: float) -> None:
        """Logs the figures of the save that has just been settled."""
        self._count()
        self.last_stall_seconds = self._stall_seconds
        self.last_staged_bytes, self.last_write_seconds = pipeline.staged_bytes, write_seconds
        if pipeline.copy_bytes > 0 and not self._has_told_memory:
            self._has_told_memory = True
            rank_zero_info(describe_memory(pipeline.copy_bytes, pipeline.writer_bytes, pipeline.scratch_bytes))
        values = {
            "checkpoint/stall_seconds": self.last_stall_seconds,
            "checkpoint/staged_bytes": float(self.last_staged_bytes),
            "checkpoint/write_seconds": write_seconds,
            "checkpoint/num_skipped": float(self.num_skipped),
            "checkpoint/step": float(pipeline.settled_step),
        }
        # Under the current step: many loggers refuse or drop a row whose step lies behind the newest one.
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        self._count()  # the loggers' own time: the logged figure cannot include it, the attribute does
        self.last_stall_seconds, self._stall_seconds = self._stall_seconds, 0.0


@dataclass
class SaveHistory:
    """The saves of a run, kept from fit to fit.

    Attributes:
        target: The target of the last fit that made one: the next fit of the same Trainer continues from it.
        last_saved: The newest checkpoint that was saved or restored.
        recent: The last few checkpoints that were saved, oldest first: more than one save may be settled between two
            hooks of another callback.
        last_step: The step of `last_saved`, if that checkpoint lies in this run's directory.
    """

    target: SaveTarget | None = None
    last_saved: Path | None = None
    recent: deque[Path] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))
    last_step: int | None = None

    def describe(self) -> str:
        """Returns a phrase for a message: which checkpoint is the last good one."""
        return "nothing is saved yet" if self.last_saved is None else f"the last good one is {self.last_saved.name}"


class FitSaves:
    """Begins and settles the saves of one fit.

    Every rank has one and calls its methods at the same steps. It communicates through `target` alone.

    Args:
        trainer: The fit's.
        module: The fit's.
        options: The callback's.
        target: The directory, the ranks and the manifest's header of each save.
        history: Receives each commit.
        statistics: Receives the cost of each save.
        best: Receives which saves became checkpoints; None without a monitored metric.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        options: SaveOptions,
        target: SaveTarget,
        history: SaveHistory,
        statistics: SaveStatistics,
        best: BestWatch | None,
    ) -> None:
        self.pipeline: SavePipeline | None = None
        self.target = target
        self._trainer, self._module = trainer, module
        self._options = options
        self._history, self._statistics, self._best = history, statistics, best
        self._watch: StepWatch | None = None
        self._cache = SnapshotCache()
        self._updates_at_begin = 0
        self._updates_at_last = 0
        self._last_begin_seconds = time.monotonic()
        self._has_reserved = False
        self._has_writer = False

    def start_pipeline(self, writer: WriterProcess | None, device_path: DevicePath | None = None) -> None:
        """Prepares for saves and takes over `writer`, which mode `process` has. No communication."""
        self.pipeline = SavePipeline(
            self.target,
            # A dry run has no writer, and saves nothing.
            mode="thread" if self._options.mode == "process" and writer is None else self._options.mode,
            writer=writer,
            staging=self._options.staging,
            time_limit_seconds=self._options.save_timeout_seconds,
            device_path=device_path,
        )
        self._watch = StepWatch(
            self._trainer.optimizers,
            # In automatic optimization the optimizer's step runs the closure (forward and backward) first. A wait in
            # a pre-hook of the step would therefore end the overlap; Lightning's on_before_optimizer_step comes after
            # the closure. In manual optimization the user steps after the backward, so the pre-hook is the place.
            before_step=None if self._module.automatic_optimization else self.wait_staged,
            has_scaler=getattr(self._trainer.precision_plugin, "scaler", None) is not None,
            names={parameter: MODEL_PREFIX + name for parameter, name in name_parameters(self._module).items()},
        )

    def wait_writer(self) -> None:
        """Waits until the writer has finished its imports, which ran beside the first window. Communicates, once.

        Raises:
            SaveFailedError: The writer of some rank did not start; on every rank alike.
        """
        if self.pipeline is not None and not self._has_writer:
            with in_phase(self._trainer, "save"):
                self.target.ranks.attempt("starting the writer", self.pipeline.wait_ready)
            self._has_writer = True

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the last save or the fit began."""
        return time.monotonic() - self._last_begin_seconds

    @property
    def is_in_flight(self) -> bool:
        """Whether a save is not settled yet."""
        return self.pipeline is not None and self.pipeline.step_in_flight is not None

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Counts the time of a hook for the save that is in flight."""
        with self._statistics.stalling(lambda: self.is_in_flight):
            yield

    def take_snapshot(self, cache: SnapshotCache | None = None, rng: Any = None) -> Snapshot:
        """Returns this rank's state for a save. No communication."""
        return take_snapshot(
            self._trainer,
            self._module,
            self.target.ranks.rank,
            cache,
            has_optimizer=self._options.save_optimizer,
            rng_state=rng,
        )

    # ---- to begin

    def reserve(self) -> None:
        """Allocates the memory of the next saves, as soon as the optimizers have state. Communicates, once.

        On the CPU it does nothing: the first save allocates its memory there, which is quick.
        """
        is_dry = self._trainer.fast_dev_run  # type: ignore[attr-defined]  # Lightning sets it
        if self._has_reserved or self.pipeline is None or is_dry or self._trainer.global_step == 0:
            return
        self._has_reserved = True
        if not is_host(self._trainer.strategy.root_device):
            # The first save meets the same error, and `on_save_failure` decides there.
            with contextlib.suppress(CheckpointError, SaveFailedError):
                self.pipeline.reserve(lambda: self.take_snapshot(self._cache))

    def save(self, *, may_be_skipped: bool = True) -> None:
        """Saves this window's end, if that is not saved yet. Communicates at the first save, and where it waits.

        Raises:
            CheckpointError: It failed, by `on_save_failure="raise"`; on every rank alike.
            SaveFailedError: The writer of some rank did not start; on every rank alike.
        """
        is_dry = self._trainer.fast_dev_run  # type: ignore[attr-defined]  # Lightning sets it
        if is_dry or self._history.last_step == self._trainer.global_step:
            return
        # A validation may save before the first window ends. The save's thread then uses the channel to the writer.
        self.wait_writer()
        self._last_begin_seconds = time.monotonic()
        with in_phase(self._trainer, "save"):
            if self.pipeline is not None and not self._is_busy(self.pipeline, may_be_skipped=may_be_skipped):
                self._begin(self.pipeline)

    def save_if_best(self, best: BestWatch) -> None:
        """Saves, and marks what it saves, if the validation that just ended is among the best so far. Communicates."""
        step = self._trainer.global_step
        value = best.read(self._trainer.callback_metrics)
        # Rank 0 decides for all: a metric logged without sync_dist differs between ranks, and ranks that disagreed
        # would enter different collectives.
        if self.target.ranks.broadcast(best.is_among_best(step, value)):
            best.take(step, value)
            self.save(may_be_skipped=False)
            # The step may have been saved before its validation: then `save` had nothing to do, and no commit will
            # follow that would mark it.
            if self._history.last_step == step:
                self._mark(best, step)

    def _mark(self, best: BestWatch, step: int) -> None:
        if not best.keep(step) or not self.target.ranks.is_first:
            return
        try:
            best.mark(self._options.directory)
        except UnreadableCheckpointError as error:  # training continues; the next mark lists all of the best again
            warnings.warn(f"the best checkpoints are not marked: {error}", RetentionWarning, stacklevel=2)

    def _is_busy(self, pipeline: SavePipeline, *, may_be_skipped: bool) -> bool:
        """Returns whether no save should begin: this step's is in flight, or is skipped. It may wait, by policy."""
        step = self._trainer.global_step
        if pipeline.step_in_flight in (None, step):
            return pipeline.step_in_flight is not None
        # The last save of a run never is.
        is_last = read_moment(self._trainer).is_last_window
        if may_be_skipped and self._options.when_busy == "skip" and not is_last:
            self._statistics.num_skipped += 1
            rank_zero_warn(
                f"the save at step {step} is skipped: that of step {pipeline.step_in_flight} still "
                f"runs ({self._statistics.num_skipped} skipped so far)",
                category=SaveSkippedWarning,
            )
            return True
        self._settle(pipeline, pipeline.finish())
        return pipeline.step_in_flight is not None  # a torn save is repeated at this step, so this step is in flight

    def _begin(self, pipeline: SavePipeline) -> None:
        step = self._trainer.global_step
        try:
            pipeline.begin(step, lambda: self.take_snapshot(self._cache), self.progress())
        except (CheckpointError, SaveFailedError) as error:
            self._fail(step, error)
            return
        if pipeline.mode == "sync":
            self._settle(pipeline, pipeline.finish())

    def progress(self) -> Progress:
        """Returns the optimizers' progress since the last save, for the save that begins now."""
        watch = self._watch
        assert watch is not None
        self._updates_at_begin = watch.num_updates
        return Progress(
            lambda: watch.num_steps,
            watch.num_updates - self._updates_at_last,
            watch.sample_moved(since_updates=self._updates_at_last),
        )

    # ---- to settle

    def settle(self, agreed: int) -> None:
        """Settles the save in flight, if the ranks' vote `agreed` is about that save."""
        if self.pipeline is not None:
            self._settle(self.pipeline, self.pipeline.settle(agreed))

    def finish(self) -> None:
        """Waits for the save in flight, and for its repetitions. Communicates."""
        # A loop, because settling a torn save begins it again.
        while self.pipeline is not None and self.pipeline.step_in_flight is not None:
            with in_phase(self._trainer, "save"):
                self._settle(self.pipeline, self.pipeline.finish())

    def wait_staged(self) -> None:
        """Blocks training until the save in flight no longer reads the live tensors. No communication."""
        if self.pipeline is not None and self.pipeline.step_in_flight is not None:
            with self.stalling():
                self.pipeline.wait_staged()

    def _settle(self, pipeline: SavePipeline, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        step = pipeline.settled_step
        for notice in pipeline.take_notices():
            warnings.warn(notice, SlowDeviceWarning, stacklevel=2)
        if outcome.kind == "committed":
            self.note_saved(step)
            # Updates since the save *began*: those made while it was written are not in it.
            self._updates_at_last = self._updates_at_begin
            if outcome.warning is not None:
                warnings.warn(outcome.warning, RetentionWarning, stacklevel=2)
            self._statistics.log(self._trainer, pipeline, outcome.write_seconds)
        elif outcome.kind == "failed":
            failed = SaveFailedError(outcome.text)
            failed.ends_all_ranks = True  # the outcome is the one of all ranks
            self._fail(step, failed)
        else:
            if self._best is not None:
                self._best.drop(step)
            if outcome.kind == "torn":
                rank_zero_warn(
                    f"the save at step {step} is made again at step {self._trainer.global_step}, and staging is "
                    f"blocking from now on: {outcome.text}",
                    category=TornSnapshotWarning,
                )
            self._begin(pipeline)

    def note_saved(self, step: int) -> None:
        """Records a checkpoint of this run."""
        directory = self._options.directory
        self._history.last_saved, self._history.last_step = directory / checkpoint_name(step), step
        self._history.recent.append(directory / checkpoint_name(step))
        if self._best is not None:
            self._mark(self._best, step)

    def _fail(self, step: int, error: CheckpointError | SaveFailedError) -> None:
        """Ends training with the error, or warns, by policy."""
        # All ranks come here with the same outcome, so all of them raise at the same step or none does.
        self._statistics.num_failed += 1
        if self.target.events is not None and self.target.ranks.is_first:
            path = self._options.directory / checkpoint_name(step)
            self.target.events.write("failed", step=step, checkpoint=path, error=error)
        if self._best is not None:
            self._best.drop(step)
        if self._options.on_save_failure == "raise":
            raise error
        message = f"the save at step {step} failed, {self._history.describe()}: {error}"
        warnings.warn(message, SaveFailedWarning, stacklevel=2)

    def close(self, *, wait_seconds: float) -> Outcome | None:
        """Ends the writer, after the save in flight if that ends in time; returns its outcome. No communication."""
        pipeline, self.pipeline = self.pipeline, None
        outcome = None
        if pipeline is not None:
            step = pipeline.step_in_flight
            outcome = pipeline.close(wait_seconds)
            if step is not None and outcome is not None and outcome.kind == "committed":
                self.note_saved(step)
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        self._cache = SnapshotCache()  # it holds tensors
        return outcome
