"""Counts what the saves of a run cost and how they ended, and logs it to the Trainer's loggers."""

import contextlib
import time
from collections.abc import Callable, Iterator

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from .checkpoint.expect import format_bytes
from .checkpoint.pipeline import SavePipeline

STALL = "checkpoint/stall_seconds"
STAGED = "checkpoint/staged_bytes"
WRITE = "checkpoint/write_seconds"
SKIPPED = "checkpoint/num_skipped"
STEP = "checkpoint/step"


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
            STALL: self.last_stall_seconds,
            STAGED: float(self.last_staged_bytes),
            WRITE: write_seconds,
            SKIPPED: float(self.num_skipped),
            STEP: float(pipeline.settled_step),
        }
        # Under the current step: many loggers refuse or drop a row whose step lies behind the newest one.
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        self._count()  # the loggers' own time: the logged figure cannot include it, the attribute does
        self.last_stall_seconds, self._stall_seconds = self._stall_seconds, 0.0
