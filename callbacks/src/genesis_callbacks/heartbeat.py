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
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ._argument_types import checking
from .base.run_directory import read_run_dir
from .heartbeats import HeartbeatRecord, write_heartbeat
from .phases import Phase, PhaseListener, find_callbacks
from .token_counters import DEFAULT_UNIT, TokenCounters

__all__ = ["Heartbeat", "HeartbeatWarning", "Progress"]

_LOSS_KEY = "train/loss"


class HeartbeatWarning(UserWarning):
    """A heartbeat could not be written; training continues."""


class Progress(NamedTuple):
    """How far the training thread has come, in this process's memory.

    Attributes:
        phase: What it does.
        num_moves: Grows with each batch that begins or ends, each phase, and each call of `note_progress`.
        seconds: When it last grew, by the monotonic clock.
        has_stepped: Whether a training batch of this fit has ended.
    """

    phase: Phase
    num_moves: int
    seconds: float
    has_stepped: bool


class Heartbeat(Callback, PhaseListener):
    """Writes a heartbeat at the end of a batch, if the last one is old enough, and whenever the phase changes.

    Every rank has one. A module may give the loss that it logged last in an attribute `logged_loss: float | None`;
    otherwise a metric of that name is read if it lies in the host's memory. A data module may give its position in an
    attribute `data_position: int`; a heartbeat of a failure outside of the training steps leaves it out. The heartbeat
    comes from the training thread, so that a rank that hangs stops writing. `genesis_callbacks.phases` names phases of
    other code.

    Args:
        run_dir: The run's directory, the same on all ranks.
        every_seconds: The least time between two heartbeats of one phase.
        loss_key: The metric to read where the module has no `logged_loss`.

    Attributes:
        run_dir, every_seconds: As given.
    """

    @checking
    def __init__(self, run_dir: str | Path, *, every_seconds: float = 1.0, loss_key: str = _LOSS_KEY) -> None:
        super().__init__()
        if not every_seconds >= 0:
            raise ValueError(f"every_seconds must be at least 0, not {every_seconds}")
        self.run_dir, self.every_seconds = read_run_dir(run_dir), every_seconds
        self._loss_key = loss_key
        self._host = socket.gethostname()
        self._phases: list[Phase] = []
        self._progress: Progress | None = None
        self._trainer: Trainer | None = None
        self._counters: TokenCounters | None = None
        self._clocks: dict[str, int] = {}
        self._created_seconds = time.monotonic()
        self._milestones: dict[str, float] = {}
        self._last_seconds = 0.0
        self._rate_from: tuple[float, int] | None = None
        self._has_warned = False

    @property
    def progress(self) -> Progress | None:
        """How far the training thread has come; None outside of training. Any thread may read it."""
        return self._progress

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Notes the time. Nothing is written yet: the directory may be another run's."""
        self._clocks, self._rate_from = {}, None
        self._forget()
        self._milestones = {"created": self._created_seconds, "setup": time.monotonic()}
        self._counters = next(iter(find_callbacks(trainer, TokenCounters)), None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the first heartbeat: everything is restored, and training begins."""
        self._milestones["train"] = time.monotonic()
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning sets it; such a run leaves nothing behind
            self._trainer = trainer
            self.enter_phase("train")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notes that a batch begins; nothing is written."""
        self._move()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes a heartbeat if the last one is old enough, and one after the first batch."""
        if "first_step" not in self._milestones:
            self._milestones["first_step"] = time.monotonic()
            self._last_seconds = -math.inf
        self.note_progress()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes that a validation within training begins."""
        if self._phases:
            self.enter_phase("validate")

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
        self.note_progress()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes that training continues."""
        if self._phases:
            self.leave_phase()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes that the fit has ended."""
        self._end("ended")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes that the fit has failed. Lightning does not call `teardown` after this hook."""
        self._end("failed")

    # ---- phases

    def enter_phase(self, phase: Phase) -> None:
        """Writes that a phase begins; before training it does nothing."""
        if self._trainer is not None:
            self._phases.append(phase)
            self._move()
            self._write(self._trainer)

    def leave_phase(self) -> None:
        """Writes that the phase before the innermost one continues."""
        if self._trainer is not None and len(self._phases) > 1:
            self._phases.pop()
            self._move()
            self._write(self._trainer)

    def note_progress(self) -> None:
        """Notes that a part of the work is done, and writes a heartbeat if the last one is old enough."""
        if self._trainer is not None:
            self._move()
            if time.monotonic() - self._last_seconds >= self.every_seconds:
                self._write(self._trainer)

    def _move(self) -> None:
        if self._phases:
            before = self._progress
            self._progress = Progress(
                self._phases[-1],
                1 if before is None else before.num_moves + 1,
                time.monotonic(),
                "first_step" in self._milestones,
            )

    def _end(self, phase: Phase) -> None:
        if self._phases:
            self.enter_phase(phase)
        self._forget()

    def _forget(self) -> None:
        self._phases, self._progress, self._trainer = [], None, None

    def _write(self, trainer: Trainer) -> None:
        now = self._last_seconds = time.monotonic()
        record = HeartbeatRecord(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            pid=os.getpid(),
            host=self._host,
            phase=self._phases[-1],
            step=trainer.global_step,
            time_seconds=time.time(),
            monotonic_seconds=now,
            clocks=self._read_clocks() | self._read_position(trainer),
            loss=self._read_loss(trainer),
            unit=DEFAULT_UNIT if self._counters is None else self._counters.unit,
            units_per_second=self._measure_speed(now),
            milestones=dict(self._milestones),
        )
        try:
            write_heartbeat(self.run_dir, record)
        except OSError as error:
            # A full disk must not end a training whose checkpoints may lie elsewhere.
            if not self._has_warned:
                self._has_warned = True
                text = f"the heartbeat is not written to {self.run_dir}: {error.strerror or error}"
                warnings.warn(f"{text}; further lost heartbeats are not reported", HeartbeatWarning, stacklevel=2)

    def _read_clocks(self) -> dict[str, int]:
        counters = self._counters
        if counters is not None:
            clocks = counters.checkpoint_counters()
            self._clocks = {name: count for name, count in clocks.items() if name != "step"}
            self._clocks["last_update_step"] = counters.last_update_step
        return self._clocks

    def _read_position(self, trainer: Trainer) -> dict[str, int]:
        if self._phases[-1] == "failed" and self._phases[-2:-1] != ["train"]:
            return {}  # so that no window is blamed for what failed outside of the training steps
        position = getattr(vars(trainer).get("datamodule"), "data_position", None)
        return {"data_position": position} if isinstance(position, int) else {}

    def _read_loss(self, trainer: Trainer) -> float | None:
        given = getattr(trainer.lightning_module, "logged_loss", None)
        if given is not None:
            return float(given)
        metric = trainer.callback_metrics.get(self._loss_key)
        return float(metric) if isinstance(metric, Tensor) and metric.device.type == "cpu" else None

    def _measure_speed(self, now: float) -> float | None:
        if self._counters is None or self._phases[-1] != "train":
            self._rate_from = None
            return None
        tokens, before = self._counters.tokens_seen, self._rate_from
        self._rate_from = (now, tokens)
        return None if before is None or now <= before[0] else (tokens - before[1]) / (now - before[0])
