"""The learning rate as a pure function of a clock."""

import math
from dataclasses import dataclass
from typing import Literal

from genesis_callbacks.errors import UserError

__all__ = ["Schedule", "Shape", "lr_factor"]

Shape = Literal["cosine", "wsd", "linear", "constant"]


@dataclass(frozen=True)
class Schedule:
    """A warm-up, a shape and a floor, on a clock that counts updates or tokens.

    Args:
        shape: `cosine` and `linear` fall from the warm-up's end to the floor at `total`; `wsd` (warm-up, stable, decay)
            stays at the peak and falls linearly over the last `decay`; `constant` stays.
        total: The planned end. Beyond it the floor holds.
        warmup: From the start to the peak.
        decay: Length of the last part of `wsd`; 0 elsewhere.
        floor: Share of the peak, 0 to 1.

    Raises:
        ValueError: The parts don't fit into the whole.

    References:
        Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, 2024 (wsd).
    """

    shape: Shape
    total: int
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.total < 1:
            raise UserError(f"the schedule's total is {self.total}: it must be at least 1")
        if min(self.warmup, self.decay) < 0 or self.warmup + self.decay > self.total:
            raise UserError(
                f"a warm-up of {self.warmup} and a decay of {self.decay} do not fit into a run of {self.total}: "
                "shorten them, or give them as shares of the run"
            )
        if not 0.0 <= self.floor <= 1.0:
            raise UserError(f"the schedule's floor is {self.floor}: it is a share of the peak, 0 to 1")


def lr_factor(clock: int, schedule: Schedule, ahead: int = 1) -> float:
    """Returns the share of the peak learning rate for the update after `clock` units.

    The first update of a warm-up has ahead/warmup and not 0, the last one the peak; the first after `total` has the
    floor.

    Args:
        clock: Units before the update.
        schedule: The schedule.
        ahead: Units of the update itself: 1 on a clock of updates, its tokens on a clock of tokens.

    Example:
        >>> schedule = Schedule("linear", total=10, warmup=2, floor=0.5)
        >>> [lr_factor(clock, schedule) for clock in (0, 1, 2, 6, 10, 99)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]
    """
    # With the units of the update itself, because a rate of almost 0 in the first one would waste its window.
    if clock < schedule.warmup:
        return min(1.0, (clock + ahead) / schedule.warmup)
    if schedule.shape == "constant":
        return 1.0
    # Before the shapes, because the cosine would rise again beyond the planned end.
    if clock >= schedule.total:
        return schedule.floor
    start = schedule.total - schedule.decay if schedule.shape == "wsd" else schedule.warmup
    if clock <= start:
        return 1.0
    progress = (clock - start) / (schedule.total - start)
    fallen = (1 - math.cos(math.pi * progress)) / 2 if schedule.shape == "cosine" else progress
    return 1.0 - (1.0 - schedule.floor) * fallen
