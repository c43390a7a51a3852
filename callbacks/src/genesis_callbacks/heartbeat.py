"""Writes where each rank stands into a small file, at most once a second, for whoever watches the run.

It logs nothing and does not communicate. It never waits for a device: clocks that only the device knows are left as
they were, and the loss is read where it lies in the host's memory. `genesis_callbacks.heartbeats.read_heartbeats` reads
the files without torch.
"""

import math
import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from .heartbeats import HeartbeatRecord, Phase, write_heartbeat
from .run_directory import read_run_dir
from .token_counters import TokenCounters

__all__ = ["Heartbeat", "HeartbeatWarning"]

_LOSS_KEY = "train/loss"


class HeartbeatWarning(UserWarning):
    """A heartbeat could not be written; training continues."""


class Heartbeat(Callback):
    """Writes a heartbeat at the end of a batch, if the last one is old enough, and whenever the phase changes.

    Every rank has one. A module may give the loss that it logged last in an attribute `logged_loss: float | None`;
    otherwise a metric of that name is read if it lies in the host's memory. The heartbeat comes from the training
    thread, so that a rank that hangs stops writing.

    Args:
        run_dir: The run's directory, the same on all ranks.
        every_seconds: The least time between two heartbeats of one phase.
        loss_key: The metric to read where the module has no `logged_loss`.
    """

    def __init__(self, run_dir: str | Path, *, every_seconds: float = 1.0, loss_key: str = _LOSS_KEY) -> None:
        super().__init__()
        if not every_seconds >= 0:
            raise ValueError(f"every_seconds must be at least 0, not {every_seconds}")
        self._run_dir = read_run_dir(run_dir)
        self._every_seconds, self._loss_key = every_seconds, loss_key
        self._host = socket.gethostname()
        self._phase: Phase | None = None
        self._counters: TokenCounters | None = None
        self._clocks: dict[str, int] = {}
        self._created_seconds = time.monotonic()
        self._milestones: dict[str, float] = {}
        self._last_seconds = 0.0
        self._rate_from: tuple[float, int] | None = None
        self._has_warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Notes the time. Nothing is written yet: the directory may be another run's."""
        self._phase, self._clocks, self._rate_from = None, {}, None
        self._milestones = {"created": self._created_seconds, "setup": time.monotonic()}
        callbacks = vars(trainer)["callbacks"]  # a public attribute without an annotation in Lightning
        self._counters = next((each for each in callbacks if isinstance(each, TokenCounters)), None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the first heartbeat: everything is restored, and training begins."""
        self._milestones["train"] = time.monotonic()
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning sets it; such a run leaves nothing behind
            self._enter("train", trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes a heartbeat if the last one is old enough, and one after the first batch."""
        if "first_step" not in self._milestones:
            self._milestones["first_step"] = time.monotonic()
            self._last_seconds = -math.inf
        self._beat(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes that a validation within training begins."""
        if self._phase is not None:
            self._enter("validate", trainer, pl_module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Writes a heartbeat if the last one is old enough."""
        self._beat(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes that training continues."""
        if self._phase is not None:
            self._enter("train", trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes that the fit has ended."""
        if self._phase is not None:
            self._enter("ended", trainer, pl_module)
            self._phase = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes that the fit has failed. Lightning does not call `teardown` after this hook."""
        if self._phase is not None:
            self._enter("failed", trainer, pl_module)
            self._phase = None

    def _enter(self, phase: Phase, trainer: Trainer, module: LightningModule) -> None:
        self._phase = phase
        self._write(trainer, module)

    def _beat(self, trainer: Trainer, module: LightningModule) -> None:
        if self._phase is not None and time.monotonic() - self._last_seconds >= self._every_seconds:
            self._write(trainer, module)

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        assert self._phase is not None
        now = self._last_seconds = time.monotonic()
        record = HeartbeatRecord(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            pid=os.getpid(),
            host=self._host,
            phase=self._phase,
            step=trainer.global_step,
            time_seconds=time.time(),
            monotonic_seconds=now,
            clocks=self._read_clocks(),
            loss=self._read_loss(trainer, module),
            tokens_per_second=self._measure_speed(now),
            milestones=dict(self._milestones),
        )
        try:
            write_heartbeat(self._run_dir, record)
        except OSError as error:
            # A full disk must not end a training whose checkpoints may lie elsewhere.
            if not self._has_warned:
                self._has_warned = True
                text = f"the heartbeat is not written to {self._run_dir}: {error.strerror or error}"
                warnings.warn(f"{text}; further lost heartbeats are not reported", HeartbeatWarning, stacklevel=2)

    def _read_clocks(self) -> dict[str, int]:
        counters = self._counters
        if counters is not None and counters.is_settled:  # otherwise reading them would wait for the device
            clocks = counters.checkpoint_counters()
            self._clocks = {name: count for name, count in clocks.items() if name != "step"}
        return self._clocks

    def _read_loss(self, trainer: Trainer, module: LightningModule) -> float | None:
        given = getattr(module, "logged_loss", None)
        if given is not None:
            return float(given)
        metric = trainer.callback_metrics.get(self._loss_key)
        return float(metric) if isinstance(metric, Tensor) and metric.device.type == "cpu" else None

    def _measure_speed(self, now: float) -> float | None:
        if self._counters is None or self._phase != "train":
            self._rate_from = None
            return None
        tokens, before = self._counters.tokens_seen, self._rate_from
        self._rate_from = (now, tokens)
        return None if before is None or now <= before[0] else (tokens - before[1]) / (now - before[0])
