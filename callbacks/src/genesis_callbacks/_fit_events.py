"""Writes a fit's events on one rank; the table in `events.py` lists which rank writes which kind. No communication."""

import math
import os
import signal
import socket
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from ._trainer_restore import Restore
from ._trainer_state import read_counters
from .base.events import EventLog
from .checkpoint.ranks import Ranks


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
