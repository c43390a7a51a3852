"""Logs where the time of a step goes.

    logged                  unit and meaning
    time/step_ms            milliseconds of an optimizer step, mean of those since the last log line; without validation
    time/data_wait_ms       training waits for a batch; on a device, the time that the device therefore idles
    time/transfer_ms        the batch goes to the device
    time/forward_ms         forward passes
    time/backward_ms        backward passes, with the reductions of gradients that overlap with them
    time/communication_ms   waits for other ranks: under DDP from a rank's last own gradient to the end of the backward,
                            and what is known as such (`step_parts.timing`)
    time/optimizer_ms       clip and optimizer step
    time/save_stall_ms      checkpoint callbacks in the training thread
    time/generation_ms      writing of texts to learn from
    time/other_ms           everything else; the parts add up to time/step_ms

A part that takes no time is absent. On a device the figures are times of the device's stream: events mark the ends of
parts, and the host reads them when later steps end, so that it never waits. The first step of a fit is left out.

Collectives of FSDP2 stay in the forward and backward. They are interleaved with the computation unit by unit, on
streams of their own, so that a wait could only be measured by events around each unit in private code of torch;
`TraceSteps` shows them.

Does it communicate? No: the figures are those of rank 0.
"""

import contextlib
import statistics
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from torch.nn.parallel import DistributedDataParallel

from ._argument_types import checking
from ._compat import ignore_actions, ignore_backward, listen_to_actions, listen_to_backward
from ._log_lines import check_version, is_log_step, log_exact
from ._step_timeline import LastGradient, StepTimeline
from .base.errors import UserError
from .phases import find_callbacks
from .step_parts import PARTS, Part, PartListener

__all__ = ["StepTimeWarning", "StepTimer"]

_STATE_VERSION = 1
_ACTIONS: dict[str, Part] = {
    "train_dataloader_next": "data_wait",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "optimizer_step": "optimizer",
    "save_checkpoint": "save_stall",
}
"""The last word of an action of Lightning's profiler, and the part that it is."""
_REMEDIES: dict[Part, str] = {
    "data_wait": "more loader workers, or a prepared corpus",
    "transfer": "pinned memory in the loader",
    "forward": "look at the device's clocks (DeviceWatch) and the lengths of batches",
    "backward": "look at the device's clocks (DeviceWatch) and at the slowest rank",
    "communication": "look for the slowest rank",
    "optimizer": "look at the device's clocks (DeviceWatch)",
    "save_stall": "save less often, or on a faster disk",
    "generation": "shorter answers",
    "other": "a trace of a few steps (TraceSteps), or fewer callbacks",
}
_TREND_STEPS = 50


class StepTimeWarning(UserWarning):
    """Steps have become slower during a fit."""


class StepTimer(pl.Callback, PartListener):
    """Measures the parts of each step on this rank and logs their means every `log_every_n_steps`.

    It listens to the actions that Lightning names to its profiler. With manual optimization, the forward is what is
    left of `training_step` beside backwards and optimizer steps. A module whose
    `training_step` runs forward and backward in one call that cannot be divided has an attribute `mixes_passes = True`;
    then that time is in `time/other_ms`.

    If the median of 50 steps is above the lowest median before by the factor `warn_above`, twice in a row, one line
    warns and names the part that rose most; once for each part.

    The state has the sums since the last log line.

    Args:
        warn_above: How many times slower steps must be for the warning; None for no warning.
    """

    @checking
    def __init__(self, *, warn_above: float | None = 1.3) -> None:
        super().__init__()
        if warn_above is not None and not warn_above > 1.0:
            raise UserError(f"warn_above is {warn_above}: it must be above 1, or null for no warning")
        self._warn_above = warn_above
        self._timeline: StepTimeline | None = None
        self._actions: dict[str, Part | None] = {}
        self._savers: dict[str, pl.Callback] = {}
        self._mixes_passes = False
        self._trainer: pl.Trainer | None = None
        self._last_gradient: LastGradient | None = None
        self._is_reducing = False
        self._last_step = 0
        self._num_ended = 0
        self._has_run = False
        self._warned: set[Part] = set()
        self._reset()
        self._reset_trend()

    def _reset(self) -> None:
        self._sums: dict[Part, float] = {}
        self._num_steps = 0

    def _reset_trend(self) -> None:
        self._recent: deque[dict[Part, float]] = deque(maxlen=_TREND_STEPS)
        self._best: dict[Part, float] | None = None
        self._num_slow = 0

    # ---- state

    @property
    def state_key(self) -> str:
        """The key of our state in a checkpoint."""
        return "genesis_callbacks.StepTimer"

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums since the last log line; nothing before the first fit."""
        if not self._has_run:
            return {}
        self._read()
        return {"version": _STATE_VERSION, "num_steps": self._num_steps, "sums_ms": dict(self._sums)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the sums of a checkpoint."""
        if not state_dict:
            return
        check_version(state_dict, _STATE_VERSION, "the checkpoint's step timer has")
        self._num_steps, self._has_run = state_dict["num_steps"], True
        self._sums = {part: state_dict["sums_ms"][part] for part in PARTS if part in state_dict["sums_ms"]}

    # ---- hooks

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to listen."""
        if trainer.global_step == 0:
            self._reset()
        self._reset_trend()
        self._leave()
        self._has_run, self._num_ended, self._last_step = True, 0, trainer.global_step
        self._savers = {f"[Callback]{each.state_key}.": each for each in find_callbacks(trainer, Checkpoint)}
        self._actions = {}
        self._mixes_passes = bool(getattr(pl_module, "mixes_passes", False))
        self._trainer, self._timeline = trainer, StepTimeline(trainer.strategy.root_device)
        listen_to_actions(trainer, self._begin_action, self._end_action)
        listen_to_backward(trainer.strategy, self._timing_backward)
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self._last_gradient = LastGradient(pl_module, self._begin_reduction)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the step, if an optimizer has stepped, and logs at the steps of the log."""
        assert self._timeline is not None
        if trainer.global_step == self._last_step:
            return  # within an accumulation of batches
        self._last_step = trainer.global_step
        self._timeline.end_step(is_kept=self._num_ended > 0)
        self._num_ended += 1
        if self._last_gradient is not None:
            self._last_gradient.learn()
        self._read()
        if is_log_step(trainer) and self._num_steps:
            log_exact(pl_module, self._take())

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        if self._timeline is not None:
            self._timeline.begin(None)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Continues."""
        if self._timeline is not None:
            self._timeline.end()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops to listen."""
        self._leave()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stops to listen."""
        self._leave()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stops to listen."""
        self._leave()

    # ---- parts

    def begin_part(self, part: Part) -> None:
        """Notes that a part begins."""
        if self._timeline is not None:
            self._timeline.begin(part)

    def end_part(self) -> None:
        """Notes that the innermost part ends."""
        if self._timeline is not None:
            self._timeline.end()

    def _begin_action(self, name: str) -> None:
        part = self._find_part(name)
        if part is not None:
            self.begin_part(part)

    def _end_action(self, name: str) -> None:
        if self._find_part(name) is not None:
            self.end_part()

    @contextlib.contextmanager
    def _timing_backward(self) -> Iterator[None]:
        self.begin_part("backward")
        try:
            yield
        finally:
            if self._is_reducing:
                self._is_reducing = False
                self.end_part()
            self.end_part()

    def _begin_reduction(self) -> None:
        # In a backward outside of the strategy's, or a second time in one, there is nothing to end the part.
        if self._timeline is not None and self._timeline.part == "backward" and not self._is_reducing:
            self._is_reducing = True
            self.begin_part("communication")

    def _find_part(self, name: str) -> Part | None:
        if name not in self._actions:  # each step has the same names
            self._actions[name] = self._read_action(name)
        return self._actions[name]

    def _read_action(self, name: str) -> Part | None:
        owner, _, hook = name.rpartition(".")
        saver = self._savers.get(f"{owner}.")
        if saver is not None:  # a hook that the class does not have is called, too, and does nothing
            return "save_stall" if getattr(type(saver), hook, None) is not getattr(pl.Callback, hook, None) else None
        if owner.startswith("[Callback]") or (hook == "training_step" and self._mixes_passes):
            return None
        return _ACTIONS.get(hook)

    # ---- parts of the hooks

    def _read(self) -> None:
        """Adds the steps that the device has passed."""
        for times in () if self._timeline is None else self._timeline.read():
            self._num_steps += 1
            for part, ms in times.items():
                self._sums[part] = self._sums.get(part, 0.0) + ms
            if self._warn_above is not None:
                self._judge(times)

    def _take(self) -> dict[str, float]:
        means = {part: self._sums[part] / self._num_steps for part in PARTS if part in self._sums}
        self._reset()
        return {"time/step_ms": sum(means.values()), **{f"time/{part}_ms": ms for part, ms in means.items()}}

    def _judge(self, times: dict[Part, float]) -> None:
        """Warns if steps have become slower."""
        self._recent.append(times)
        if len(self._recent) < _TREND_STEPS:
            return
        now = find_median_step(list(self._recent))
        self._recent.clear()
        total = sum(now.values())
        if self._best is None or total < sum(self._best.values()):
            self._best, self._num_slow = now, 0
            return
        assert self._warn_above is not None
        before = sum(self._best.values())
        self._num_slow = self._num_slow + 1 if total > self._warn_above * before else 0
        if self._num_slow < 2:
            return
        part = max(now, key=lambda part: now[part] - (self._best or {}).get(part, 0.0))
        if part not in self._warned:
            self._warned.add(part)
            rise = now[part] - self._best.get(part, 0.0)
            warnings.warn(
                f"steps take {total:.4g} ms, {total / before:.2f} times as long as before ({before:.4g} ms); "
                f"{part} rose most, by {rise:.4g} ms: {_REMEDIES[part]}",
                StepTimeWarning,
                stacklevel=2,
            )

    def _leave(self) -> None:
        if self._trainer is not None:
            ignore_actions(self._trainer, self._begin_action)
            ignore_backward(self._trainer.strategy)
        if self._last_gradient is not None:
            self._last_gradient.remove()
            self._last_gradient = None
        self._is_reducing = False
        self._trainer, self._timeline = None, None


def find_median_step(steps: list[dict[Part, float]]) -> dict[Part, float]:
    """Returns the parts of the step whose total is the median; of an even number the lower one.

    Example:
        >>> find_median_step([{"forward": 3.0}, {"forward": 1.0}, {"forward": 2.0, "other": 0.5}])
        {'forward': 2.0, 'other': 0.5}
    """
    middle = statistics.median_low([sum(times.values()) for times in steps])
    return next(times for times in steps if sum(times.values()) == middle)
