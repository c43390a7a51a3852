"""Warns of a loss that does not fall, and of one that has risen again. It logs no metric.

It reads the loss that is logged anyway, at log lines and on the host. Does it communicate? No: rank 0 warns.
"""

import math
import statistics
import warnings
from typing import Any, Final, Literal

import lightning.pytorch as pl
from torch import Tensor

from ._argument_types import checking
from ._log_lines import check_version, is_log_step
from .base.errors import UserError

__all__ = ["LossWarning", "LossWatch", "judge_losses"]

_STATE_VERSION = 1
_LOSS_KEY: Final = "train/loss"
Cause = Literal["flat", "risen"]
_TEXTS: dict[Cause, str] = {
    "flat": "the loss does not fall: {last:.4g} after {steps} steps, {first:.4g} at the beginning; look for a learning "
    "rate that is too low or too high, labels that are masked or shifted, or frozen parameters",
    "risen": "the loss has risen to {last:.4g} from {best:.4g}; lower the learning rate, or look at the data and the "
    "gradient's norm since then",
}


class LossWarning(UserWarning):
    """The loss does not fall."""


class LossWatch(pl.Callback):
    """Compares medians of the logged loss, and warns in one line, once for each cause.

    The values are grouped into blocks of `block` log lines. The loss is flat if, after four blocks and `min_steps`
    steps, no block's median is below the first one's by `min_fall`. It has risen if two blocks in a row are above the
    lowest one before by `max_rise`; rewards and other objectives without a loss that falls have no use for this
    callback.

    The state has the medians, so that a resumed run warns of what began before.

    Args:
        loss_key: The metric; a module's attribute `logged_loss` comes first.
        block: How many log lines make a block.
        min_steps: The steps before which nothing is judged.
        min_fall: The least fall, as a share of the first block's median.
        max_rise: The largest rise, as a share of the lowest block's median.
    """

    @checking
    def __init__(
        self,
        *,
        loss_key: str = _LOSS_KEY,
        block: int = 10,
        min_steps: int = 200,
        min_fall: float = 0.01,
        max_rise: float = 0.1,
    ) -> None:
        super().__init__()
        if block < 1:
            raise UserError(f"block is {block}: it must be at least 1")
        self._loss_key, self._block, self._min_steps = loss_key, block, min_steps
        self._min_fall, self._max_rise = min_fall, max_rise
        self._values: list[float] = []
        self._medians: list[float] = []
        self._warned: set[str] = set()

    @property
    def state_key(self) -> str:
        """The key of our state in a checkpoint."""
        return "genesis_callbacks.LossWatch"

    def state_dict(self) -> dict[str, Any]:
        """Returns the medians and the causes that were warned of; nothing before the first loss."""
        if not self._values and not self._medians:
            return {}
        return {
            "version": _STATE_VERSION,
            "values": list(self._values),
            "medians": list(self._medians),
            "warned": sorted(self._warned),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the medians of a checkpoint."""
        if not state_dict:
            return
        check_version(state_dict, _STATE_VERSION, "the checkpoint's loss watch has")
        self._values, self._medians = list(state_dict["values"]), list(state_dict["medians"])
        self._warned = set(state_dict["warned"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forgets another run's losses."""
        if trainer.global_step == 0:
            self._values, self._medians, self._warned = [], [], set()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the loss at the steps of the log."""
        if not is_log_step(trainer):
            return
        loss = self._read(trainer, pl_module)
        if loss is None or not math.isfinite(loss):
            return
        self._values.append(loss)
        if len(self._values) < self._block:
            return
        self._medians.append(statistics.median(self._values))
        self._values = []
        if trainer.global_step >= self._min_steps:
            self._judge(trainer)

    def _read(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float | None:
        given = getattr(pl_module, "logged_loss", None)
        if given is not None:
            return float(given)
        metric = trainer.callback_metrics.get(self._loss_key)
        # Reading a value on a device would make the host wait for the step.
        return float(metric) if isinstance(metric, Tensor) and metric.device.type == "cpu" else None

    def _judge(self, trainer: pl.Trainer) -> None:
        cause = judge_losses(self._medians, min_fall=self._min_fall, max_rise=self._max_rise)
        if cause is None or cause in self._warned:
            return
        self._warned.add(cause)
        medians = self._medians
        if trainer.is_global_zero:
            text = _TEXTS[cause].format(
                first=medians[0], last=medians[-1], best=min(medians), steps=trainer.global_step
            )
            warnings.warn(text, LossWarning, stacklevel=2)


def judge_losses(medians: list[float], *, min_fall: float, max_rise: float) -> Cause | None:
    """Returns what is wrong with a loss, given the medians of its blocks.

    Example:
        >>> judge_losses([5.0, 5.01, 4.99, 5.0], min_fall=0.01, max_rise=0.1)
        'flat'
        >>> judge_losses([5.0, 3.0, 2.0, 2.5, 2.6], min_fall=0.01, max_rise=0.1)
        'risen'
        >>> judge_losses([5.0, 3.0, 2.0, 2.0], min_fall=0.01, max_rise=0.1) is None
        True
    """
    if len(medians) < 4:
        return None
    best = min(medians[:-2])
    if min(medians[-2:]) > best + max_rise * abs(best):
        return "risen"
    return "flat" if min(medians) > medians[0] - min_fall * abs(medians[0]) else None
