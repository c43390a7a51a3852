"""Bytes by term over the moments of a step, and the highest point of each."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from genesis.operations.plan.record import Bytes, Course

WEIGHTS: Final = "parameters"
FROZEN: Final = "frozen parameters"
OPTIMIZER: Final = "optimizer states"
UNREDUCED: Final = "gradients before their reduction"
GATHERED: Final = "gathered parameters"
COMMUNICATION: Final = "communication buffers"
RECEIVED: Final = "received by the stage"
BATCH: Final = "batch"
TEACHER: Final = "teacher"
REWARD_MODELS: Final = "reward models"
CACHE: Final = "keys and values of answers"
WHOLE: Final = "whole model that answers"
UPDATE: Final = "optimizer's temporaries"
DIGEST: Final = "digests of a save"
PHASES: Final = ("rest", "answers", "forward", "backward", "step", "save")


@dataclass
class Bill:
    """Bytes by term now, and at the peak of each phase.

    Args:
        now: The bytes that are held.
        peaks: The bytes at the highest point of each phase, by term.
    """

    now: Bytes = field(default_factory=Counter)
    peaks: dict[str, Bytes] = field(default_factory=dict)
    _phase: str = "rest"

    def enter(self, phase: str) -> None:
        """Begins a phase; a later visit of the same phase goes on with its peak."""
        self._phase = phase
        self.see()

    def change(self, term: str, num_bytes: int) -> None:
        """Adds bytes to a term, or removes them."""
        self.now[term] += num_bytes
        assert self.now[term] >= 0, f"{term} is {self.now[term]}"
        if num_bytes > 0:
            self.see()

    def see(self, besides: Bytes | None = None) -> None:
        """Compares this moment, with what exists besides, with the peak of the phase."""
        total = sum(self.now.values()) + (sum(besides.values()) if besides else 0)
        best = self.peaks.get(self._phase)
        if best is None or total > sum(best.values()):
            found = Counter(self.now)
            found.update(besides or {})
            self.peaks[self._phase] = Counter({term: count for term, count in found.items() if count})

    def run(self, course: Course) -> None:
        """Plays the course of a section."""
        self.see(course.peak)
        self.now.update(course.end)
        self.see()
