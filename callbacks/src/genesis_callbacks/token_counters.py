"""Counts a run's windows and tokens exactly, over all ranks, and distinguishes updates from skips.

    logged                    unit and meaning
    counters/step             windows attempted: Lightning's global_step, where one optimizer is stepped per window
    counters/tokens_seen      tokens of the batches consumed, or the `unit` that is given: counters/images_seen
    counters/updates          windows whose optimizer step changed the parameters
    counters/tokens_updated   tokens of those windows, likewise
    counters/skips            windows that changed nothing
    counters/skips_<reason>   the same by reason

A *window* is the batches between two optimizer steps: one batch, or `accumulate_grad_batches` of them.

Does it communicate? One asynchronous sum of two integers a batch on a gloo group of our own, begun before the batch's
forward and read after its optimizer step. It never reads from the device, except for a fused optimizer under a gradient
scaler, whose scale alone shows an overflow.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from genesis_callbacks._log_lines import check_version, is_log_step, log_exact
from genesis_callbacks.base.errors import numbered
from genesis_callbacks.host_group import HostGroup, Pending

from ._argument_types import checking
from .base.errors import RunEndedError, UserError

STEP = "counters/step"
UPDATES = "counters/updates"
SKIPS = "counters/skips"
SKIPS_BY_REASON = "counters/skips_{reason}"

SCALER_OVERFLOW = "scaler_overflow"
NO_GRADIENT = "no_gradient"
SKIPPED_DATA = "skipped_data"
"""A module's `skip_reason` for a window that the user wants to be skipped: `max_consecutive_skips` ignores it."""

DEFAULT_UNIT = "tokens"
SEEN, UPDATED = "{unit}_seen", "{unit}_updated"

_STATE_VERSION = 1


class TooManySkipsError(RunEndedError):
    """More windows in a row were skipped than `max_consecutive_skips` allows."""


class RankDisagreementError(RunEndedError):
    """Some ranks updated their parameters in a window that others skipped: their weights are no longer the same."""


class SkippedWindowsWarning(UserWarning):
    """A run has ended in which some windows were skipped: they changed no parameter."""


def describe_skips(num_windows: int, skips: Mapping[str, int]) -> str:
    """Returns how many of a run's windows were skipped, by reason, most frequent first.

    Example:
        >>> describe_skips(16, {"scaler_overflow": 2, "no_gradient": 13})
        '15 of 16 windows were skipped and changed no parameter: 13 for no_gradient, 2 for scaler_overflow'
    """
    by_reason = sorted(skips.items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{count} for {reason}" for reason, count in by_reason)
    windows = numbered(num_windows, "windows")
    return f"{sum(skips.values()):,} of {windows} were skipped and changed no parameter: {reasons}"


def count_tokens(batch: Any, unit: str = DEFAULT_UNIT) -> int:
    """Returns the tokens of a batch without reading from the device.

    That is its `num_valid_tokens` (an attribute or a key) if it has one, else the number of elements of its `labels` or
    `input_ids`, padding and all.
    """
    for name in ("num_valid_tokens", "labels", "input_ids"):
        value = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if value is not None:
            return value.numel() if isinstance(value, Tensor) and name != "num_valid_tokens" else int(value)
    raise UserError(
        f"the {unit} of a batch of type {type(batch).__name__} cannot be counted: give count_fn, a "
        "function from a batch to an int"
    )


class TokenCounters(pl.Callback):
    """Four exact clocks of a run, the same on every rank, saved and restored.

    An update happened if the optimizer's step ran with some gradient in place (and, under a scaler with a fused
    optimizer, the scale did not fall). So a gradient scaler's overflow and a veto (every gradient set to None before
    the step) are skips. A module may say why in an attribute `skip_reason: str | None`; otherwise the reason is
    `scaler_overflow` or `no_gradient`.

    The counts are exact from our `on_train_batch_end` on. A run that starts at global_step 0 starts its clocks at 0;
    a run that resumes from a checkpoint without our state warns and counts from there. A run with skipped windows warns
    at its end, with the number of skipped windows by reason.

    Args:
        count_fn: Tokens of one rank's batch. By default `count_tokens`.
        unit: What `count_fn` counts, as it is to be named wherever it is logged, saved or printed: "images".
        max_consecutive_skips: Ends the run when this many windows in a row were skipped; None never does. Windows that
            a module skips for `skipped_data` neither count nor end such a row.

    Attributes:
        unit: As given. The properties keep their names: `tokens_seen` counts this unit.
        count: Counts one rank's batch.
        last_update_step: The newest step that is known to have changed the parameters; 0 for none.

    Raises:
        TooManySkipsError: In `on_train_batch_end`, on all ranks alike.
        RankDisagreementError: One window after the ranks parted.
    """

    @checking
    def __init__(
        self,
        *,
        count_fn: Callable[[Any], int] | None = None,
        unit: str = DEFAULT_UNIT,
        max_consecutive_skips: int | None = 100,
    ) -> None:
        if not unit.isidentifier():
            raise UserError(f"unit is {unit!r}: give a plural noun without spaces, such as 'images'")
        if max_consecutive_skips is not None and max_consecutive_skips < 1:
            raise UserError(
                f"max_consecutive_skips is {max_consecutive_skips}: it must be at least 1, or null for no limit"
            )
        self.unit = unit
        self._names = SEEN.format(unit=unit), UPDATED.format(unit=unit)
        self.count = choose_count(count_fn, unit)
        self._max_consecutive_skips = max_consecutive_skips
        self._group = HostGroup()
        self._is_alone = True
        self._num_ranks_per_batch = 1
        self._global_step = 0
        self._scaler: Any | None = None
        self._hooks: list[RemovableHandle] = []
        self._pending: Pending[int] | None = None
        self._counted: Any = None
        self._was_called = False
        self._stepped_surely = False
        self._fused_scale: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._step = 0
        self._tokens_seen = 0
        self._updates = 0
        self._tokens_updated = 0
        self._window_tokens = 0
        self._consecutive_skips = 0
        self.last_update_step = 0
        self._skips: dict[str, int] = {}
        self._was_restored = False

    # ---- properties for other callbacks

    @property
    def step(self) -> int:
        """Windows attempted."""
        return self._step

    @property
    def tokens_seen(self) -> int:
        """Tokens of all batches consumed, over all ranks."""
        return self._tokens_seen

    @property
    def updates(self) -> int:
        """Windows that changed the parameters."""
        return self._updates

    @property
    def tokens_updated(self) -> int:
        """Tokens of the windows that changed the parameters, over all ranks."""
        return self._tokens_updated

    @property
    def skips(self) -> dict[str, int]:
        """Windows that changed nothing, by reason."""
        return dict(self._skips)

    @property
    def has_updated(self) -> bool:
        """Whether the window at hand has changed the parameters: known from its optimizer step to its last hook."""
        if self._stepped_surely:
            return True
        return self._fused_scale is not None and self._scale() >= self._fused_scale

    def tokens_ahead(self, batch: Any, clock: Literal["tokens_updated", "tokens_seen"]) -> int:
        """Returns by how much a clock will have moved after the batch that is about to train, if its window updates.

        All ranks call it in `on_train_batch_start` alike; it waits for the sum, which is begun before every batch.
        """
        self._begin_count(batch)
        assert self._pending is not None
        tokens, _ = self._pending.wait()
        return tokens // self._num_ranks_per_batch + (self._window_tokens if clock == "tokens_updated" else 0)

    def checkpoint_counters(self) -> dict[str, int]:
        """Returns the clocks for a checkpoint's manifest."""
        return {
            "step": self._step,
            self._names[0]: self._tokens_seen,
            "updates": self._updates,
            self._names[1]: self._tokens_updated,
        }

    # ---- state

    @property
    def state_key(self) -> str:
        """The key of our state in a checkpoint."""
        return "genesis_callbacks.TokenCounters"

    def state_dict(self) -> dict[str, Any]:
        """Returns the clocks as plain integers, exact at the last batch's end."""
        return {
            "version": _STATE_VERSION,
            "unit": self.unit,
            "step": self._step,
            "tokens_seen": self._tokens_seen,
            "updates": self._updates,
            "tokens_updated": self._tokens_updated,
            "window_tokens": self._window_tokens,
            "consecutive_skips": self._consecutive_skips,
            "last_update_step": self.last_update_step,
            "skips": dict(self._skips),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the clocks of a checkpoint."""
        check_version(state_dict, _STATE_VERSION, "the checkpoint's token counters have")
        unit = state_dict.get("unit", DEFAULT_UNIT)  # earlier releases counted tokens alone
        if unit != self.unit:
            raise UserError(f"the checkpoint's counters count {unit}, and this run {self.unit}: give unit={unit!r}")
        self._step = state_dict["step"]
        self._tokens_seen = state_dict["tokens_seen"]
        self._updates = state_dict["updates"]
        self._tokens_updated = state_dict["tokens_updated"]
        self._window_tokens = state_dict["window_tokens"]
        self._consecutive_skips = state_dict["consecutive_skips"]
        # Earlier releases had no such clock, and counted every skip in a row.
        self.last_update_step = state_dict.get("last_update_step", self._step - self._consecutive_skips)
        self._skips = dict(state_dict["skips"])
        self._was_restored = True

    # ---- hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Makes the gloo group: every rank calls this hook, and no checkpoint has been read yet."""
        if stage == "fit":
            self._was_restored = False
            self._is_alone = trainer.world_size == 1
            if not self._is_alone:
                self._group.join()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Registers hooks on the optimizers."""
        # Not in `on_fit_start`, before which FSDP2's restore has not happened: global_step would still be 0 there.
        self._start_clocks(trainer.global_step)
        self._num_ranks_per_batch = count_ranks_per_batch(trainer)
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._forget_attempt()
        self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in trainer.optimizers]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts to count the batch over all ranks; the sum runs while the batch trains."""
        self._begin_count(batch)
        self._global_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advances the clocks."""
        assert self._pending is not None
        tokens, updates_of_ranks = self._pending.wait()
        self._pending = self._counted = None
        self._check_agreement(updates_of_ranks, trainer.world_size)
        tokens //= self._num_ranks_per_batch  # exact: each batch was counted by so many ranks
        self._tokens_seen += tokens
        self._window_tokens += tokens
        # Lightning increments global_step in the optimizer's step even if the step was vetoed: it ends a window.
        if trainer.global_step > self._global_step:
            self._end_window(None if self.has_updated else self._reason(pl_module, outputs))
        if is_log_step(trainer):
            self._log(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Checks the last window's agreement, removes the hooks, and warns of the windows that were skipped."""
        # The check in `on_train_batch_end` is one window behind, and no batch follows the last one.
        if not self._is_alone:
            (updates_of_ranks,) = self._group.sum((self._updates,)).wait()
            self._check_agreement(updates_of_ranks, trainer.world_size)
        self._leave()
        if self._skips:
            rank_zero_warn(describe_skips(self._step, self._skips), category=SkippedWindowsWarning)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Removes the hooks; the clocks stay at the last batch that ended."""
        # Without a reduction: other ranks may be gone.
        self._leave()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Removes the hooks."""
        self._leave()

    # ---- parts of the hooks

    def _begin_count(self, batch: Any) -> None:
        """Begins the sum of a batch's tokens over all ranks, once: a schedule of tokens may ask for it first."""
        if self._pending is not None:
            if self._counted is batch:
                return
            self._pending.wait()  # the batch before had no end: the module ended the epoch
        # The number of updates rides along, so that ranks which disagreed on a skip are found one window later,
        # without a collective of its own.
        values = (self.count(batch), self._updates)
        self._pending = Pending(torch.tensor(values), None) if self._is_alone else self._group.sum(values)
        self._counted = batch

    def _start_clocks(self, global_step: int) -> None:
        if global_step == 0:
            self._reset()
        elif not self._was_restored and self._step != global_step:
            rank_zero_warn(
                f"the run resumes at step {global_step} from a checkpoint without counters: {self._names[0]}, updates "
                f"and {self._names[1]} count from here"
            )
            self._reset()
            self._step = global_step

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._was_called = True
        # A veto sets every gradient to None before the step. The step then runs over nothing.
        if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
            return
        # After an overflow a scaler leaves an ordinary optimizer alone. It calls a fused one, which skips inside.
        if self._scaler is not None and any(group.get("fused") for group in optimizer.param_groups):
            self._fused_scale = self._scale()
        else:
            self._stepped_surely = True

    def _scale(self) -> float:
        assert self._scaler is not None
        return float(self._scaler.get_scale())

    def _reason(self, pl_module: pl.LightningModule, outputs: Any) -> str:
        # A closure that returned no loss also keeps the optimizer from being called: that is no overflow.
        has_loss = bool(outputs) or not pl_module.automatic_optimization
        was_withheld = self._scaler is not None and not self._was_called and has_loss
        is_overflow = was_withheld or self._fused_scale is not None
        return getattr(pl_module, "skip_reason", None) or (SCALER_OVERFLOW if is_overflow else NO_GRADIENT)

    def _end_window(self, skip_reason: str | None) -> None:
        self._step += 1
        if skip_reason is None:
            self._updates += 1
            self._tokens_updated += self._window_tokens
            self._consecutive_skips = 0
            self.last_update_step = self._step
        else:
            self._skips[skip_reason] = self._skips.get(skip_reason, 0) + 1
            self._consecutive_skips += skip_reason != SKIPPED_DATA
        self._window_tokens = 0
        self._forget_attempt()
        if self._max_consecutive_skips is not None and self._consecutive_skips >= self._max_consecutive_skips:
            raise TooManySkipsError(
                f"{self._consecutive_skips} windows in a row were skipped, the last one at step {self._step} for "
                f"{skip_reason!r} (max_consecutive_skips is {self._max_consecutive_skips}); the parameters are those "
                f"of update {self._updates}. Lower the learning rate, look at these windows' data, or raise the limit."
            )

    def _check_agreement(self, updates_of_ranks: int, world_size: int) -> None:
        if updates_of_ranks != self._updates * world_size:
            raise RankDisagreementError(
                f"after step {self._step} this rank counted {self._updates} updates, and all "
                f"{numbered(world_size, 'ranks')} {updates_of_ranks}: some skipped a window that others did not, so "
                "their weights differ. Go back to the last checkpoint and let all ranks skip the same windows (reduce "
                "the reason before the step)."
            )

    def _log(self, pl_module: pl.LightningModule) -> None:
        values = {
            STEP: self._step,
            "counters/" + self._names[0]: self._tokens_seen,
            UPDATES: self._updates,
            "counters/" + self._names[1]: self._tokens_updated,
            SKIPS: sum(self._skips.values()),
            **{SKIPS_BY_REASON.format(reason=reason): count for reason, count in self._skips.items()},
        }
        log_exact(pl_module, values)

    def _forget_attempt(self) -> None:
        self._was_called = False
        self._stepped_surely = False
        self._fused_scale = None

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._pending = self._counted = None
        self._scaler = None


def choose_count(count_fn: Callable[[Any], int] | None, unit: str) -> Callable[[Any], int]:
    """Returns what counts a batch: the given function, or by default `count_tokens`."""
    if count_fn is not None and not callable(count_fn):
        raise UserError(f"count_fn is {count_fn!r}: give a function from a batch to an int")
    return count_fn or partial(count_tokens, unit=unit)


def count_ranks_per_batch(trainer: pl.Trainer) -> int:
    """Returns how many ranks read the same batch: more than one under tensor parallelism."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(trainer.world_size // sampler["num_replicas"]) if sampler else 1
