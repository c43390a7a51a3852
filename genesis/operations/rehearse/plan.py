"""Plans the kills of a rehearsal and decides when each is due, as pure functions of a seed and of observations."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from typing import Literal, get_args

Victim = Literal["group", "rank", "writer"]
"""The processes to kill: all ranks, a single rank, or the process that writes one rank's part of a checkpoint."""

Aim = Literal["step", "save", "start"]
"""The time of a kill: within a step, within a save, or between a restart and its first step."""

Phase = Literal["imports", "rendezvous", "restore", "first step"]
"""The phases of a start. `imports` begins at the launch; `rendezvous`, when a second rank runs, before the ranks have
met; `restore`, when the restore begins; `first step`, when the restore has ended."""

PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases in their order."""

_STARTS_SHARE = 4
"""One of this many kills falls into a restart."""

# All ranks, the first alone, the last alone: the victim, and the draw that chooses the rank.
_ALL_RANKS: tuple[Victim, float] = ("group", 0.0)
_FIRST_RANK: tuple[Victim, float] = ("rank", 0.0)
_LAST_RANK: tuple[Victim, float] = ("rank", 0.999)

# The largest share of the time from the launch to the first step that a rank spends with imports.
_IMPORTS_SHARE = 0.4


@dataclass(frozen=True)
class PlannedKill:
    """One kill.

    Args:
        victim: The processes to kill.
        aim: Whether the kill falls into a step, a save or a restart.
        step: The last step that is logged before the kill. For a save, the step that is saved. For a restart, the
            kill falls into the first restart after this step was reached.
        fraction: The fraction of the step, the save or the phase of the restart that has passed at the kill.
        draw: Chooses the rank if a single rank is killed: 0 is the first rank, nearly 1 the last.
        phase: The phase of the restart; None unless the kill falls into a restart.
    """

    victim: Victim
    aim: Aim
    step: int
    fraction: float
    draw: float
    phase: Phase | None = None


@dataclass(frozen=True)
class Pace:
    """Durations in the straight run, in seconds.

    Args:
        start: The time from the launch to the first logged step.
        step: The median time from a logged step to the next.
        save: The median time for which a save's staging directory exists.
        slowest: The longest time without a newly logged step.
    """

    start: float
    step: float
    save: float
    slowest: float


@dataclass(frozen=True)
class Sight:
    """The state of a training at one moment, as seen from outside.

    Args:
        seconds: Seconds since the launch of the training.
        last_step: The last step that the training has logged; None before the first step.
        staging: Names of the staging directories of saves in flight.
        phase: The phase of the start, as far as the phase is visible; determined only while a kill waits for a phase.
    """

    seconds: float
    last_step: int | None
    staging: tuple[str, ...] = ()
    phase: Phase = "imports"


def plan_kills(
    seed: int, num_kills: int, *, max_steps: int, every_n_steps: int, victims: Sequence[Victim]
) -> list[PlannedKill]:
    """Returns the kills in the order of their steps; the same arguments always give the same ones.

    Steps are uniform over the run. Half of the kills fall into saves. The victims take turns, in a random order. Kills
    in restarts also take turns with the phases of a restart.

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
        PlannedKill(kind, aim, step, rng.random(), rng.random())
        for kind, aim, step in zip(kinds, aims, steps, strict=True)
    ]
    starts = cycle(_plan_starts(rng, has_ranks="rank" in victims))
    kills = [_aim_at_start(kill, *next(starts)) if kill.aim == "start" else kill for kill in kills]
    return sorted(kills, key=lambda kill: kill.step)


def _plan_starts(rng: random.Random, *, has_ranks: bool) -> list[tuple[Phase, tuple[Victim, float]]]:
    """Returns every kind of kill in a restart once, in a random order."""
    phases = list(PHASES)
    chosen = [_ALL_RANKS, _FIRST_RANK, _LAST_RANK]
    if not has_ranks:
        phases.remove("rendezvous")
        chosen = [_ALL_RANKS]
    kinds = list(product(phases, chosen))
    rng.shuffle(kinds)
    return kinds


def _aim_at_start(kill: PlannedKill, phase: Phase, chosen: tuple[Victim, float]) -> PlannedKill:
    victim, draw = chosen
    return replace(kill, victim=victim, draw=draw, phase=phase)


class Trigger:
    """Decides from observations when a planned kill is due. A trigger reads no clock of its own.

    Args:
        kill: The planned kill.
        pace: The pace of the straight run.
        seconds_by_step: Logged step to the seconds until the next step, for the steps of the straight run that were
            seen. A step with validation is longer than others, and a kill may fall into the validation.
    """

    def __init__(self, kill: PlannedKill, pace: Pace, seconds_by_step: Mapping[int, float]) -> None:
        self.kill = kill
        self._delay_seconds = kill.fraction * self._find_window_seconds(pace, seconds_by_step)
        self._due_seconds: float | None = None

    def _find_window_seconds(self, pace: Pace, seconds_by_step: Mapping[int, float]) -> float:
        """Returns the duration of the step, the save or the phase into which the kill falls."""
        if self.kill.aim == "save":
            return pace.save
        if self.kill.phase in ("imports", "rendezvous"):  # all ranks import the same modules before the rendezvous
            return _IMPORTS_SHARE * pace.start
        if self.kill.aim == "start":  # the later phases are short: a restore, and a first step
            return pace.step
        return seconds_by_step.get(self.kill.step, pace.step)

    def is_due(self, sight: Sight) -> bool:
        """Returns whether the kill is due, or should have been a moment ago."""
        if self.kill.aim == "start" and sight.last_step is not None:
            return True
        if self._due_seconds is None and self._is_reached(sight):
            self._due_seconds = sight.seconds + self._delay_seconds
        return self._due_seconds is not None and sight.seconds >= self._due_seconds

    def _is_reached(self, sight: Sight) -> bool:
        if self.kill.phase is not None:
            return PHASES.index(sight.phase) >= PHASES.index(self.kill.phase)
        if sight.last_step is None:
            return False
        if self.kill.aim == "save":
            # A step is logged after its save has begun. If a save was missed, the kill falls into the next save.
            return sight.last_step >= self.kill.step - 1 and bool(sight.staging)
        return sight.last_step >= self.kill.step
