"""The learning rate as a pure function of a clock."""

import math
from dataclasses import dataclass
from typing import Final, Literal

from .base.errors import UserError

__all__ = ["Clock", "Schedule", "ScheduleOptions", "Shape", "lr_factor"]

Shape = Literal["cosine", "wsd", "linear", "constant"]
Clock = Literal["updates", "tokens_updated", "tokens_seen"]
"""What the lengths of a schedule count."""
_DECAY_SHARE: Final = 0.2


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


@dataclass(frozen=True)
class ScheduleOptions:
    """The options of a schedule, whose lengths have several spellings; `plan` gives what they mean.

    The arguments are those of `genesis_callbacks.SkipAwareLR`.

    Raises:
        ValueError: The lengths contradict each other, or don't fit into the given total.
    """

    shape: Shape | Literal["own"] = "cosine"
    by: Clock = "updates"
    total_updates: int | None = None
    total_tokens: int | None = None
    warmup_updates: int | None = None
    warmup_tokens: int | None = None
    warmup_share: float | None = None
    decay_updates: int | None = None
    decay_tokens: int | None = None
    decay_share: float | None = None
    floor_share: float = 0.1

    def __post_init__(self) -> None:
        if self._decay is not None and self.shape != "wsd":
            raise UserError(f"a decay length is given, but the shape is {self.shape!r}: only wsd has a decay length")
        _ = self._warmup  # lengths that contradict each other are refused at once
        if self._total is not None:
            self.plan(-1)

    def plan(self, max_steps: int) -> Schedule | None:
        """Returns the schedule of a run; None for `own`.

        Args:
            max_steps: The steps of the run, the end of a schedule in updates without an own one; -1 if unknown.

        Raises:
            ValueError: The schedule has no end, or its parts don't fit into the whole.
        """
        if self.shape == "own":
            return None
        total = self._find_total(max_steps)
        decay = (_DECAY_SHARE if self._decay is None else self._decay) if self.shape == "wsd" else 0
        warmup = _resolve(self._warmup or 0, total)
        return Schedule(self.shape, total, warmup=warmup, decay=_resolve(decay, total), floor=self.floor_share)

    @property
    def _unit(self) -> str:
        return "updates" if self.by == "updates" else "tokens"

    @property
    def _total(self) -> int | float | None:
        return _pick("total", self._unit, self.total_updates, self.total_tokens, None)

    @property
    def _warmup(self) -> int | float | None:
        return _pick("warmup", self._unit, self.warmup_updates, self.warmup_tokens, self.warmup_share)

    @property
    def _decay(self) -> int | float | None:
        return _pick("decay", self._unit, self.decay_updates, self.decay_tokens, self.decay_share)

    def _find_total(self, max_steps: int) -> int:
        total = self._total
        if total is not None:
            return int(total)
        if self.by == "updates" and max_steps > 0:
            return max_steps
        if self.shape == "constant" and not isinstance(self._warmup, float):
            return max(1, self._warmup or 0)  # a constant has no end
        other = ", or max_steps to the Trainer" if self.by == "updates" else ""
        raise UserError(f"the schedule has no end: give total_{self._unit}{other}")


def _pick(name: str, unit: str, updates: int | None, tokens: int | None, share: float | None) -> int | float | None:
    """Returns the one length that is given: a whole number in the clock's unit, or a share as a float."""
    lengths: dict[str, int | float | None] = {"updates": updates, "tokens": tokens, "share": share}
    given = {key: value for key, value in lengths.items() if value is not None}
    if len(given) > 1:
        raise UserError(f"{' and '.join(f'{name}_{key}' for key in given)} are given: give only one of them")
    for key, value in given.items():
        if key not in (unit, "share"):
            raise UserError(
                f"{name}_{key} is given, but the clock counts {unit}: give {name}_{unit}, or another clock by `by`"
            )
        if key == "share" and not 0.0 <= value <= 1.0:
            raise UserError(f"{name}_share is {value}: it is a share of the total, 0 to 1")
        return float(value) if key == "share" else int(value)
    return None


def _resolve(length: int | float, total: int) -> int:
    return round(length * total) if isinstance(length, float) else length
