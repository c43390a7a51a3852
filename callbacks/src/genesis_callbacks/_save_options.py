"""The options of `AsyncProcessCheckpoint`: checked once, then never changed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ._data_position import OnLostDataPosition
from .checkpoint.best import MonitorMode
from .checkpoint.pipeline import SaveMode, Staging
from .checkpoint.retain import Retention
from .checkpoint.scope import SaveScope
from .checkpoint.verify import VerifyLevel

RestoredState = Literal["all", "no_optimizer", "weights"]
WhenBusy = Literal["wait", "skip"]
OnExisting = Literal["refuse", "start_over"]
OnSaveFailure = Literal["raise", "warn"]
_POSITIVE = ("every_n_steps", "every_n_epochs", "every_n_minutes", "save_timeout_seconds", "lost_rank_seconds")
_MAX_KEPT_BEST = 100  # so that the file of their marks stays a small one


class SaveFailedWarning(UserWarning):
    """A save failed and training continues, by `on_save_failure="warn"`; the message holds the reason."""


class SaveSkippedWarning(UserWarning):
    """A save was due while the one before still ran, by `when_busy="skip"`."""


class LostRankWarning(UserWarning):
    """Training ended because the process of another rank is gone. One rank of each node issues it."""


class TornSnapshotWarning(UserWarning):
    """Training changed a tensor while it was staged; the save is repeated, and staging is blocking from now on."""


class SlowDeviceWarning(UserWarning):
    """Saves use a slower path on this device: memory was short or not pinned, or a proof at the start failed."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The options of `AsyncProcessCheckpoint`, whose docstring explains each of them.

    Attributes:
        directory: The directory of the checkpoints, within the run's directory.
        retention: `keep_last` and `keep_every_n_steps` as one policy.

    Raises:
        ValueError: An option is out of its range.
    """

    directory: Path
    every_n_steps: int | None
    every_n_epochs: int | None
    every_n_minutes: float | None
    save_at_end: bool
    save_on_signal: bool
    save_on_exception: bool
    save_optimizer: bool
    monitor: str | None
    monitor_mode: MonitorMode
    keep_best: int
    keep_last: int | None
    keep_every_n_steps: int | None
    restore: RestoredState
    on_existing: OnExisting
    mode: SaveMode
    staging: Staging
    when_busy: WhenBusy
    save_timeout_seconds: float
    lost_rank_seconds: float | None
    on_save_failure: OnSaveFailure
    on_lost_data_position: OnLostDataPosition
    verify_level: VerifyLevel
    allow_changed: Sequence[str]
    scope: SaveScope
    retention: Retention = field(init=False)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            interval = getattr(self, name)
            if interval is not None and interval <= 0:
                raise ValueError(f"{name} must be positive, or None, not {interval}")
        if not 1 <= self.keep_best <= _MAX_KEPT_BEST:
            raise ValueError(f"keep_best must be from 1 to {_MAX_KEPT_BEST}, not {self.keep_best}")
        if self.keep_best > 1 and self.monitor is None:
            raise ValueError(f"keep_best is {self.keep_best} without a metric: give one by monitor")
        object.__setattr__(self, "retention", Retention(self.keep_last, self.keep_every_n_steps))

    @property
    def every_n_seconds(self) -> float | None:
        """The interval by the clock, None for none."""
        return None if self.every_n_minutes is None else 60.0 * self.every_n_minutes
