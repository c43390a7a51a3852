"""Sets the learning rate from the updates that really happened: it does not advance in skipped windows.

    logged               unit and meaning
    optim/lr             learning rate of the first parameter group in this window
    optim/lr_<name>      the same of a named group whose peak is another
    optim/lr_factor      share of the peak (not with `shape="own"`)
    optim/replays        windows run again after a scaler's overflow (with `max_replays` only)

Does it communicate? No: it reads the clocks of `TokenCounters`, which are the same on every rank. In the warm-up of a
clock in tokens it waits for the sum of a batch's tokens that they have begun. With `max_replays` it reads the
gradient scaler's scale before and after a step, which has waited for the device anyway.
"""

from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from genesis_callbacks.schedule import Clock, Schedule, ScheduleOptions, lr_factor
from genesis_callbacks.token_counters import TokenCounters

from ._argument_types import checking
from ._log_lines import check_version, is_log_step, log_exact
from .base.errors import UserError
from .phases import find_callbacks

LR = "optim/lr"
LR_OF_GROUP = "optim/lr_{name}"
LR_FACTOR = "optim/lr_factor"
REPLAYS = "optim/replays"

_STATE_VERSION = 1


class SkipAwareLR(pl.Callback):
    """Learning rate of each parameter group = its peak x a factor that depends on a clock of `TokenCounters`.

    A group's peak is the learning rate with which this run's `configure_optimizers` built it, never one from a
    checkpoint: a run that resumes with another learning rate uses the new one, times the factor of the restored clock,
    and logs the change. The factor is set before each batch; no lr_scheduler is needed, and none is allowed beside it.
    With `shape="own"` the callback sets no rate: it calls the project's own schedulers with interval `step` after
    updates only.

    Lengths are in the clock's unit: updates with `by="updates"`, else tokens, or the `unit` of the `TokenCounters`, for
    which clocks and options keep their names.

    Args:
        shape: `cosine`, `wsd` (warm-up, constant, decay), `linear`, `constant`; or `own`: your own scheduler, stepped
            only after updates.
        by: `updates` and `tokens_updated` stand still while windows are skipped; `tokens_seen` follows the data.
        total_updates: The planned end; by default the Trainer's `max_steps`.
        total_tokens: The planned end.
        warmup_updates: Length of the warm-up.
        warmup_tokens: Length of the warm-up.
        warmup_share: Length of the warm-up as a share of the total.
        decay_updates: Length of the decay of `wsd`.
        decay_tokens: Length of the decay of `wsd`.
        decay_share: Length of the decay of `wsd` as a share of the total; 0.2 if no length is given.
        floor_share: Lowest learning rate, as a share of the peak.
        max_replays: Maximum number of repetitions of a window, with a lower scale, after a gradient scaler's overflow.
            Lightning's global_step, the data's position and `tokens_seen` count such a window once.

    Raises:
        ValueError: The lengths contradict each other, or the project lacks what they need; the line says what to do.
    """

    @checking
    def __init__(
        self,
        *,
        shape: Literal["cosine", "wsd", "linear", "constant", "own"] = "cosine",
        by: Clock = "updates",
        total_updates: int | None = None,
        total_tokens: int | None = None,
        warmup_updates: int | None = None,
        warmup_tokens: int | None = None,
        warmup_share: float | None = None,
        decay_updates: int | None = None,
        decay_tokens: int | None = None,
        decay_share: float | None = None,
        floor_share: float = 0.1,
        max_replays: int = 0,
    ) -> None:
        if max_replays < 0:
            raise UserError(f"max_replays is {max_replays}: it must be at least 0")
        self._shape, self._by, self._max_replays = shape, by, max_replays
        lengths = (total_updates, total_tokens, warmup_updates, warmup_tokens, warmup_share)
        self._options = ScheduleOptions(
            shape, by, *lengths, decay_updates, decay_tokens, decay_share, floor_share=floor_share
        )
        self._schedule: Schedule | None = None
        self._factor = 1.0
        self._counters: TokenCounters | None = None
        self._peaks: list[list[float]] = []
        self._named_peaks: dict[str, float] = {}
        self._restored_peaks: dict[str, float] = {}
        self._lrs: dict[str, float] = {}
        self._num_replays = 0
        self._unwrap: list[Callable[[], None]] = []

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the fit, from `setup` on; None before it, and with `shape="own"`."""
        return self._schedule

    @property
    def clock(self) -> Clock:
        """What the schedule's lengths count."""
        return self._by

    # ---- state

    @property
    def state_key(self) -> str:
        """The key of our state in a checkpoint."""
        return "genesis_callbacks.SkipAwareLR"

    def state_dict(self) -> dict[str, Any]:
        """Returns the peaks by group and the replays; the clocks are the counters'."""
        return {"version": _STATE_VERSION, "peaks": dict(self._named_peaks), "replays": self._num_replays}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the replays; the peaks only to report a change."""
        check_version(state_dict, _STATE_VERSION, "the checkpoint's schedule has")
        self._num_replays = state_dict["replays"]
        self._restored_peaks = dict(state_dict["peaks"])

    # ---- hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Finds the clocks and the planned end."""
        if stage != "fit":
            return
        self._counters = next(iter(find_callbacks(trainer, TokenCounters)), None)
        if self._counters is None:
            raise UserError(
                "SkipAwareLR reads the clocks of TokenCounters: add TokenCounters() to the Trainer's callbacks"
            )
        self._schedule = self._options.plan(trainer.max_steps)
        self._restored_peaks = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the peaks from the optimizers as they were built: a checkpoint is read into them after this hook."""
        self._refuse_mismatch(trainer, pl_module)
        self._peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._named_peaks = {group.get("name", str(index)): float(group["lr"]) for index, group in enumerate(groups)}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wraps the module's hooks where the options ask for it, and reports changed peaks."""
        if trainer.global_step == 0:  # a new run with a callback that an earlier fit has used
            self._num_replays = 0
        for name, peak in self._named_peaks.items():
            if self._restored_peaks.get(name, peak) != peak and self._schedule is not None:
                before = self._restored_peaks[name]
                rank_zero_info(f"peak learning rate of group {name}: {before} until now, {peak} from here")
        if self._shape == "own":
            self._gate_schedulers(trainer, pl_module)
        if self._max_replays:
            self._replay_overflows(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Sets the learning rate.

        Here and not in `on_before_optimizer_step`: that runs inside the optimizer's step, where an optimizer that wraps
        another one (ZeroRedundancyOptimizer) has copied the learning rate already.
        """
        if self._schedule is not None:
            self._factor = self._find_factor(self._schedule, batch)
            self._set_lrs(trainer, self._factor)
        self._lrs = self._read_lrs(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the learning rates."""
        if is_log_step(trainer):
            log_exact(pl_module, self._lrs)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Unwraps the module's hooks."""
        self._restore_hooks()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Gives the module's hooks and the optimizers' learning rates back."""
        self._leave(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Gives the module's hooks and the optimizers' learning rates back."""
        self._leave(trainer)

    def _refuse_mismatch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        num_schedulers = len(trainer.lr_scheduler_configs)
        if self._shape != "own" and num_schedulers:
            raise UserError(
                f"configure_optimizers returns {num_schedulers} LR schedulers, but shape {self._shape!r} sets the rate "
                'itself: remove them, or let SkipAwareLR(shape="own") call them only after updates'
            )
        if self._shape == "own":
            _refuse_ungatable(trainer, pl_module)
        if self._max_replays:
            _refuse_unreplayable(trainer, pl_module, self._max_replays)

    # ---- learning rates

    def _find_factor(self, schedule: Schedule, batch: Any) -> float:
        counters = self._counters
        assert counters is not None
        clock = int(getattr(counters, self._by))
        is_rising = clock < schedule.warmup
        ahead = counters.tokens_ahead(batch, self._by) if is_rising and self._by != "updates" else 1
        return lr_factor(clock, schedule, ahead)

    def _set_lrs(self, trainer: pl.Trainer, factor: float) -> None:
        for optimizer, peaks in zip(trainer.optimizers, self._peaks, strict=True):
            for added in optimizer.param_groups[len(peaks) :]:  # a group that was unfrozen during the run
                peaks.append(float(added["lr"]))
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                _set_lr(group, peak * factor)

    def _read_lrs(self, trainer: pl.Trainer) -> dict[str, float]:
        values: dict[str, float] = {}
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        peaks = [peak for of_optimizer in self._peaks for peak in of_optimizer]
        for group, peak in zip(groups, peaks, strict=False):
            if not values:
                values[LR] = float(group["lr"])
            elif peak != peaks[0] and "name" in group:
                values[LR_OF_GROUP.format(name=group["name"])] = float(group["lr"])
        if self._schedule is not None:
            values[LR_FACTOR] = self._factor
        if self._max_replays:
            values[REPLAYS] = self._num_replays
        return values

    # ---- hooks of the module

    def _gate_schedulers(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        counters = self._counters
        assert counters is not None
        gated = [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step" and not c.reduce_on_plateau]
        original = pl_module.lr_scheduler_step

        # The module's hook and not `scheduler.step`: a wrapper on the scheduler would enter its state_dict.
        def step_after_updates(scheduler: Any, metric: Any) -> None:
            if counters.has_updated or all(scheduler is not one for one in gated):
                original(scheduler, metric)

        self._wrap(pl_module, "lr_scheduler_step", step_after_updates)

    def _replay_overflows(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scaler = vars(trainer.precision_plugin)["scaler"]
        original = pl_module.optimizer_step

        def step_until_finite(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]) -> None:
            # A fallen scale is the scaler's only public sign of an overflow. Reading it waits for the device, and so
            # does the scaler's own step.
            scale = scaler.get_scale()
            original(epoch, batch_idx, optimizer, optimizer_closure)
            for _ in range(self._max_replays):
                has_overflowed, scale = scaler.get_scale() < scale, scaler.get_scale()
                if not has_overflowed:
                    break
                self._num_replays += 1
                # Around LightningOptimizer, so that global_step counts the window once.
                trainer.strategy.optimizer_step(optimizer.optimizer, optimizer_closure, model=pl_module)

        self._wrap(pl_module, "optimizer_step", step_until_finite)

    def _wrap(self, pl_module: pl.LightningModule, name: str, wrapper: Callable[..., None]) -> None:
        """Replaces a hook on the module's instance until `_restore_hooks`."""
        # Through `vars`: nn.Module's `__setattr__` and `__delattr__` have cases of their own. The removal of the
        # instance's attribute uncovers the class's method again.
        attributes = vars(pl_module)
        was_wrapped, before = name in attributes, attributes.get(name)

        def unwrap() -> None:
            if was_wrapped:
                attributes[name] = before
            else:
                attributes.pop(name, None)

        attributes[name] = wrapper
        self._unwrap.append(unwrap)

    def _restore_hooks(self) -> None:
        while self._unwrap:
            self._unwrap.pop()()

    def _leave(self, trainer: pl.Trainer) -> None:
        self._restore_hooks()
        if self._schedule is not None and self._peaks:
            # `on_fit_start` reads the peaks from the optimizers: another fit must find them unscaled.
            self._set_lrs(trainer, 1.0)
        self._peaks = []


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _refuse_ungatable(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    if not trainer.lr_scheduler_configs:
        raise UserError('shape="own" and configure_optimizers returns no LR scheduler: return one, or choose a shape')
    if not pl_module.automatic_optimization:
        raise UserError(
            'shape="own" gates the schedulers that Lightning calls, and under manual optimization the module does: '
            "call them there if TokenCounters.has_updated"
        )
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.frequency != 1 and not config.reduce_on_plateau:
            raise UserError(
                f"an LR scheduler has frequency {config.frequency}: with a skip in between, its steps would not be "
                f"{config.frequency} updates apart; use frequency 1 and stretch the scheduler"
            )


def _refuse_unreplayable(trainer: pl.Trainer, pl_module: pl.LightningModule, max_replays: int) -> None:
    asked = f"max_replays is {max_replays}"
    if getattr(trainer.precision_plugin, "scaler", None) is None:
        precision = trainer.precision_plugin.precision
        raise UserError(f"{asked} and precision {precision} has no gradient scaler to overflow: set max_replays to 0")
    if not pl_module.automatic_optimization:
        raise UserError(f"{asked} and the module optimizes manually, so its step can't be run again: set it to 0")
    if trainer.accumulate_grad_batches != 1:
        raise UserError(
            f"{asked} and accumulate_grad_batches is {trainer.accumulate_grad_batches}: of such a window only the last "
            "batch could be run again; set max_replays to 0"
        )
