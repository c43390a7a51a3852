"""Logs how fast a run trains: tokens per second, and the share of the device's peak that the model's arithmetic uses.

    logged                     unit and meaning
    train/tokens_per_second    valid tokens over the time of training since the last log line, over all ranks; or the
                               `unit` of the Trainer's `TokenCounters`: train/images_per_second
    train/mfu                  share of the device's dense peak that the model's arithmetic uses, on rank 0, for all
                               tokens; attention is counted within documents; absent if the peak is unknown
                               (`genesis_callbacks.device_peaks`)

A step whose time says nothing about training is left out, tokens and time: the first step of a fit, which compiles and
warms up, and the first step after a validation or a save. Time that `step_parts.timing` calls generation is no training
time. A log line without any other step has neither key.

Does it communicate? One sum of a number on a gloo group of our own for each log line. It never waits for the device.
"""

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info

from ._argument_types import checking
from ._log_lines import check_version, is_log_step, log_exact
from .base.errors import UserError
from .checkpoint.device import is_host, name_device
from .device_peaks import choose_peak_type, compute_mfu, read_peak_flops
from .host_group import HostGroup
from .phases import find_callbacks
from .step_parts import Part, PartListener
from .token_counters import DEFAULT_UNIT, TokenCounters, choose_count, count_ranks_per_batch

__all__ = ["Throughput"]

RATE, MFU = "train/{unit}_per_second", "train/mfu"

_STATE_VERSION = 1
_READ_FLOPS = "count_batch_flops"


class Throughput(pl.Callback, PartListener):
    """Measures the believable steps and logs their rates, every `log_every_n_steps`.

    MFU needs the arithmetic of a batch: `flops_fn`, or `flops_per_token`, or a method `count_batch_flops(batch)` of the
    module, which returns the floating-point operations of a batch's forward and backward on this rank, or None. Its
    denominator is the published dense peak of the device for the Trainer's precision; `peak_flops` overrides it.

    The state has what was measured since the last log line.

    Args:
        count_fn: Tokens of one rank's batch. By default as the Trainer's
            `TokenCounters` count, or as these would by default.
        unit: What is counted, as it is to be named in the log; by default that of the `TokenCounters`, or "tokens".
        flops_fn: Floating-point operations of one rank's batch.
        flops_per_token: Floating-point operations for each token of a batch, in the place of `flops_fn`.
        peak_flops: Peak of one device in floating-point operations per second.
    """

    @checking
    def __init__(
        self,
        *,
        count_fn: Callable[[Any], int] | None = None,
        unit: str | None = None,
        flops_fn: Callable[[Any], float] | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value}: it must be above 0, or null if it is not known")
        if flops_fn is not None and flops_per_token is not None:
            raise UserError("flops_fn and flops_per_token are both given; leave one out")
        self._unit, self._given_unit = unit or DEFAULT_UNIT, unit
        self._given_count = None if count_fn is None else choose_count(count_fn, self._unit)
        self._count = choose_count(count_fn, self._unit)
        self._given_flops = flops_fn
        self._flops_per_token, self._given_peak = flops_per_token, peak_flops
        self._group = HostGroup()
        self._peak: float | None = None
        self._count_flops: Callable[[Any], float | None] | None = None
        self._ranks_per_batch = 1
        self._last_seconds: float | None = None
        self._paused_seconds = 0.0
        self._parts: list[tuple[Part, float]] = []
        self._is_believed = False
        self._has_run = False
        self._reset()

    def _reset(self) -> None:
        self._tokens, self._flops, self._seconds = 0, 0.0, 0.0

    # ---- state

    @property
    def state_key(self) -> str:
        """The key of our state in a checkpoint."""
        return "genesis_callbacks.Throughput"

    def state_dict(self) -> dict[str, Any]:
        """Returns what was measured since the last log line; nothing before the first measurement."""
        if not self._has_run:
            return {}
        return {"version": _STATE_VERSION, "tokens": self._tokens, "flops": self._flops, "seconds": self._seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the measurements of a checkpoint."""
        if not state_dict:
            return
        check_version(state_dict, _STATE_VERSION, "the checkpoint's throughput has")
        self._tokens, self._flops = state_dict["tokens"], state_dict["flops"]
        self._seconds, self._has_run = state_dict["seconds"], True

    # ---- hooks

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds the device's peak and begins to measure."""
        if trainer.global_step == 0:
            self._reset()
        self._has_run = True
        counters = next(iter(find_callbacks(trainer, TokenCounters)), None)
        if counters is not None:
            self._unit, self._count = self._given_unit or counters.unit, self._given_count or counters.count
        self._ranks_per_batch = count_ranks_per_batch(trainer)
        self._group.join()
        self._count_flops = self._find_flops(pl_module)
        self._peak = None if self._count_flops is None else self._find_peak(trainer)
        self._parts, self._paused_seconds = [], 0.0
        self._is_believed, self._last_seconds = False, time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the step, and logs at the steps of the log."""
        assert self._last_seconds is not None
        now_seconds = time.perf_counter()
        seconds = now_seconds - self._last_seconds - self._paused_seconds
        self._last_seconds, self._paused_seconds = now_seconds, 0.0
        if self._is_believed:
            self._seconds += seconds
            self._tokens += self._count(batch)
            if self._peak is not None:
                self._add_flops(batch)
        self._is_believed = True
        if is_log_step(trainer):
            self._log(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves out the step that follows: its time includes the validation."""
        self._is_believed = False

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leaves out the step in which, or before which, a save reads the state."""
        self._is_believed = False

    # ---- parts

    def begin_part(self, part: Part) -> None:
        """Notes when a part begins."""
        self._parts.append((part, time.perf_counter()))

    def end_part(self) -> None:
        """Takes the time of a generation away from that of training."""
        part, begin_seconds = self._parts.pop()
        if part == "generation" and all(outer != part for outer, _ in self._parts):
            self._paused_seconds += time.perf_counter() - begin_seconds

    # ---- parts of the hooks

    def _find_flops(self, pl_module: pl.LightningModule) -> Callable[[Any], float | None] | None:
        if self._given_flops is not None:
            return self._given_flops
        if self._flops_per_token is not None:
            per_token = self._flops_per_token
            return lambda batch: per_token * self._count(batch)
        return getattr(pl_module, _READ_FLOPS, None)

    def _find_peak(self, trainer: pl.Trainer) -> float | None:
        device = trainer.strategy.root_device
        if self._given_peak is not None or is_host(device):
            return self._given_peak
        name = name_device(device)
        peak_type = choose_peak_type(trainer.precision, torch.get_float32_matmul_precision())
        peak = read_peak_flops(name, peak_type)
        if peak is None:
            rank_zero_info(f"the peak of {name!r} for products of {peak_type} is not known: {MFU} is not logged")
        return peak

    def _add_flops(self, batch: Any) -> None:
        assert self._count_flops is not None
        flops = self._count_flops(batch)
        if flops is None:
            self._peak = None  # the module does not know them
        else:
            self._flops += flops

    def _log(self, pl_module: pl.LightningModule) -> None:
        # The rate of each rank and not its tokens, so that a rank that left out another step changes nothing.
        rate = self._tokens / self._seconds if self._seconds > 0 else 0.0
        (total,) = self._group.sum_floats((rate,)).wait()
        if self._seconds <= 0 or total <= 0:
            return
        values = {RATE.format(unit=self._unit): total / self._ranks_per_batch}
        if self._peak is not None and self._flops > 0:
            values[MFU] = compute_mfu(1.0 / self._seconds, self._flops / self._ranks_per_batch, self._peak)
        log_exact(pl_module, values)
        self._reset()
