"""Which kills a rehearsal makes, and when each of them is due: decided purely, from a seed and from what is seen."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

Victim = Literal["group", "rank", "writer"]
"""All ranks at once, one rank alone, or the process that writes one rank's part of a checkpoint."""

Aim = Literal["step", "save", "start"]
"""Within a step, within a save, or between a restart and its first step."""

_STARTS_SHARE = 6
"""One kill of so many falls into a restart."""


@dataclass(frozen=True)
class PlannedKill:
    """One kill.

    Args:
        victim: What is killed.
        aim: Into what it falls.
        step: The last step that is logged before it; of a save, the step that is saved.
        fraction: How far into the step, the save or the restart.
        draw: Chooses the rank, where one is killed: 0 is the first, nearly 1 the last.
    """

    victim: Victim
    aim: Aim
    step: int
    fraction: float
    draw: float


@dataclass(frozen=True)
class Pace:
    """How long things took in the straight run, in seconds.

    Args:
        start: From the launch to the first logged step.
        step: From a logged step to the next; the median.
        save: A save's staging directory is there; the median.
        slowest: The longest time without a newly logged step.
    """

    start: float
    step: float
    save: float
    slowest: float


@dataclass(frozen=True)
class Sight:
    """What is seen of a training at one moment.

    Args:
        seconds: Since its launch.
        last_step: The last step that it has logged; None before its first.
        staging: Names of the staging directories of saves in flight.
    """

    seconds: float
    last_step: int | None
    staging: tuple[str, ...] = ()


def plan_kills(
    seed: int, num_kills: int, *, max_steps: int, every_n_steps: int, victims: Sequence[Victim]
) -> list[PlannedKill]:
    """Returns the kills in the order of their steps; the same arguments always give the same ones.

    Steps are uniform over the run. Half of the kills fall into saves. The victims take turns, in a random order.

    Example:
        >>> [kill.aim for kill in plan_kills(1, 3, max_steps=60, every_n_steps=10, victims=("group",))]
        ['step', 'save', 'save']
    """
    rng = random.Random(seed)
    kinds = list(islice(cycle(victims), num_kills))
    num_starts = num_kills // _STARTS_SHARE
    num_saves = (num_kills + 1) // 2
    aims: list[Aim] = ["step"] * num_kills
    aims[:num_saves] = ["save"] * num_saves
    aims[num_saves : num_saves + num_starts] = ["start"] * num_starts
    rng.shuffle(kinds)
    rng.shuffle(aims)
    saved_steps = range(every_n_steps, max_steps, every_n_steps)
    steps = [rng.choice(saved_steps) if aim == "save" else rng.randrange(1, max_steps) for aim in aims]
    kills = [
        # What begins has no writer yet.
        PlannedKill("group" if aim == "start" and kind == "writer" else kind, aim, step, rng.random(), rng.random())
        for kind, aim, step in zip(kinds, aims, steps, strict=True)
    ]
    return sorted(kills, key=lambda kill: kill.step)


class Trigger:
    """Says when a planned kill is due, from what is seen. It reads no clock of its own.

    Args:
        kill: The plan.
        pace: Of the straight run.
        seconds_by_step: From each logged step to the next, in the straight run, as far as they were seen: a step with
            validation is longer than others, and its kill may fall into that.
    """

    def __init__(self, kill: PlannedKill, pace: Pace, seconds_by_step: Mapping[int, float]) -> None:
        self.kill = kill
        step_seconds = seconds_by_step.get(kill.step, pace.step)
        self._delay_seconds = kill.fraction * {"step": step_seconds, "save": pace.save, "start": pace.start}[kill.aim]
        self._due_seconds: float | None = None

    def is_due(self, sight: Sight) -> bool:
        """Says whether the moment has come, or has just gone by."""
        if self.kill.aim == "start":
            return sight.last_step is not None or sight.seconds >= self._delay_seconds
        if self._due_seconds is None and self._is_reached(sight):
            self._due_seconds = sight.seconds + self._delay_seconds
        return self._due_seconds is not None and sight.seconds >= self._due_seconds

    def _is_reached(self, sight: Sight) -> bool:
        if sight.last_step is None:
            return False
        if self.kill.aim == "save":
            # A step is logged after its save has begun. A save that was missed is made good by the next.
            return sight.last_step >= self.kill.step - 1 and bool(sight.staging)
        return sight.last_step >= self.kill.step
