"""What one rank writes of a fit into the run's events: `events.py` says which rank writes what. No communication."""

import math
import os
import signal
import socket
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from ._trainer_restore import Restore
from ._trainer_state import read_counters
from .checkpoint.ranks import Ranks
from .events import EventLog


class FitEvents:
    """The events of one fit, from `start` on; before that, nothing is written: the directory may be another run's.

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
        """Notes that this fit has the run's directory."""
        self._is_open = True
        rank, world_size = self._ranks.rank, self._ranks.world_size
        self.log.write("started", text=f"rank {rank} of {world_size}, process {os.getpid()} on {socket.gethostname()}")

    def verify(self, path: Path, step: int, level: str) -> None:
        """Notes that the checkpoint which is about to be restored verifies."""
        if self._is_open and self._ranks.is_first:
            self.log.write("verified", step=step, checkpoint=path, text=f"{level}, before it is restored")

    def restore(self, restore: Restore) -> None:
        """Notes that all of a checkpoint is in place."""
        if self._is_open and self._ranks.is_first:
            what = "its weights alone" if restore.has_weights_alone else "all of its state"
            manifest = restore.manifest
            self.log.write("restored", step=manifest.step, clocks=manifest.counters, checkpoint=restore.path, text=what)

    def begin_validation(self, trainer: Trainer) -> None:
        """Remembers the metrics that there are: what another validation logs is another value."""
        self._metrics_before = dict(trainer.callback_metrics)

    def end_validation(self, trainer: Trainer) -> None:
        """Notes what a validation has logged; reading a value waits for the device."""
        before, self._metrics_before = self._metrics_before, {}
        now = trainer.callback_metrics  # on all ranks alike: a metric that is not computed yet may communicate
        if not self._is_open or not self._ranks.is_first or trainer.sanity_checking:
            return
        logged = {name: value for name, value in now.items() if value is not before.get(name)}
        metrics = {name: float(value) for name, value in logged.items()}
        text = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items() if math.isfinite(value))
        self.log.write("validated", step=trainer.global_step, clocks=read_counters(trainer), metrics=metrics, text=text)

    def fail(self, trainer: Trainer, error: BaseException) -> None:
        """Notes which error ends the fit on this rank."""
        if self._is_open:
            self._is_open = False
            self.log.write("failed", step=trainer.global_step, clocks=read_counters(trainer), error=error)

    def end(self, trainer: Trainer, signal_number: int | None) -> None:
        """Notes that the fit came to its end, or that a signal had asked for it."""
        if self._is_open:
            self._is_open = False
            text = "finished" if signal_number is None else f"stopped by {signal.Signals(signal_number).name}"
            self.log.write("ended", step=trainer.global_step, clocks=read_counters(trainer), text=text)
