"""Follows a monitored metric from validation to validation: which step is the best, and what is marked as such."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint.best import MonitorMode, is_better, mark_best, read_best, unmark_best
from .checkpoint.errors import CheckpointError
from .checkpoint.manifest import step_of


class BestWatch:
    """Knows the best step so far, and the one before it for as long as the best is not saved yet.

    It does not communicate: rank 0 decides, and its caller tells the others.

    Args:
        monitor: Key of a metric that validation logs.
        mode: Whether smaller (`min`) or larger (`max`) is better.
    """

    def __init__(self, monitor: str, mode: MonitorMode) -> None:
        self._monitor, self._mode = monitor, mode
        self.step: int | None = None
        self._value: float | None = None
        self._before: tuple[int | None, float | None] = (None, None)

    def read(self, metrics: Mapping[str, Any]) -> float:
        """Returns the monitored metric.

        Raises:
            CheckpointError: It was not logged; the message names those that were.
        """
        if self._monitor not in metrics:
            logged = ", ".join(sorted(metrics)) or "nothing"
            raise CheckpointError(f"monitor is {self._monitor!r}, and validation logged {logged}: name one of these")
        return float(metrics[self._monitor])

    def is_best(self, value: float) -> bool:
        """Says whether `value` is better than the best so far."""
        return is_better(value, self._value, self._mode)

    def take(self, step: int, value: float) -> None:
        """Notes that `step`, which is being saved, is the best."""
        self._before = (self.step, self._value)
        self.step, self._value = step, value

    def drop(self, step: int) -> None:
        """Notes that `step` did not become a checkpoint."""
        if step == self.step:
            self.step, self._value = self._before

    def mark(self, directory: Path, step: int) -> None:
        """Marks the checkpoint of `step` if it is the best. Rank 0 calls it."""
        if step == self.step and self._value is not None:
            mark_best(directory, step, self._monitor, self._mode, self._value)

    def agree_with(self, directory: Path) -> None:
        """Makes the mark and this one say the same, when a run begins or goes on. Rank 0 calls it.

        What lies in the directory is all of the run's past by now. A mark in it may be newer than what was restored,
        since a step is saved before it is validated; what was restored may be newer than the mark, after a kill.
        """
        found = read_best(directory)
        is_ours = found is not None and (found.monitor, found.mode) == (self._monitor, self._mode)
        if found is not None and is_ours and is_better(found.value, self._value, self._mode):
            self.step, self._value = step_of(found.name), found.value
            return
        if self.step is not None and self._value is not None:
            if mark_best(directory, self.step, self._monitor, self._mode, self._value):
                return
            self.step = self._value = None
        if found is not None and is_ours:
            self.step, self._value = step_of(found.name), found.value
        else:
            unmark_best(directory)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {"monitor": self._monitor, "mode": self._mode, "step": self.step, "value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returned, if it is of the same metric."""
        if (state["monitor"], state["mode"]) == (self._monitor, self._mode):
            self.step, self._value = state["step"], state["value"]
