"""Observes a training from outside: the last logged step, the saves in flight, and the run's events."""

import os
import statistics
import time
from pathlib import Path

from genesis.base.run_directory import RunDirectory
from genesis.operations.rehearse.plan import Pace, Sight
from genesis_callbacks.base.event_reader import EventFollower
from genesis_callbacks.base.run_directory import is_staging_name
from genesis_callbacks.base.untrusted import open_file

_TAIL_BYTES = 1 << 15


class RunView:
    """Observes the directory of a run from the launch of one training to that training's end.

    The log and the events of an earlier training do not count: each training replaces the log by a new file, and only
    events since the launch are read.

    Attributes:
        has_started: Whether a rank has logged that it owns the run's directory and is about to restore.
        restored_step: The step of the checkpoint that was restored; None if the training starts at step 0 or has not
            restored yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self._metrics = RunDirectory(run_dir).metrics
        self._checkpoints = RunDirectory(run_dir).checkpoints
        self._launched_seconds = time.monotonic()
        self._at_launch = self._seen = _sign(self._metrics)
        self._events = EventFollower(run_dir, is_from_now=True)
        self.has_started = False
        self.restored_step: int | None = None
        self._last_step: int | None = None
        self._steps: list[tuple[float, int]] = []
        self._saves: dict[str, tuple[float, float]] = {}

    def look(self) -> Sight:
        """Returns the current state of the training."""
        seconds = time.monotonic() - self._launched_seconds
        for event in self._events.poll():
            self.has_started = self.has_started or event.kind == "started"
            self.restored_step = event.step if event.kind == "restored" else self.restored_step
        sign = _sign(self._metrics)
        if sign not in (self._seen, self._at_launch):
            self._seen = sign
            step = _read_last_step(self._metrics)
            if step is not None and (self._last_step is None or step > self._last_step):
                self._last_step = step
                self._steps.append((seconds, step))
        staging = tuple(_list_staging(self._checkpoints))
        for name in staging:
            first, _ = self._saves.get(name, (seconds, seconds))
            self._saves[name] = (first, seconds)
        return Sight(seconds, self._last_step, staging)

    @property
    def first_step_seconds(self) -> float | None:
        """Seconds from the launch to the first logged step; None before that step."""
        return self._steps[0][0] if self._steps else None

    @property
    def progress_seconds(self) -> float:
        """Seconds from the launch to the newest logged step; 0 before the first step."""
        return self._steps[-1][0] if self._steps else 0.0

    def measure_pace(self) -> Pace:
        """Returns the durations of start, steps and saves; at least one step must be logged."""
        gaps = self.seconds_by_step.values()
        saves = [end - begin for begin, end in self._saves.values()]
        return Pace(
            start=self._steps[0][0],
            step=statistics.median(gaps) if gaps else 0.0,
            save=statistics.median(saves) if saves else 0.0,
            slowest=max(gaps, default=0.0),
        )

    @property
    def seconds_by_step(self) -> dict[int, float]:
        """Each seen step to the seconds until the next; of several steps between two looks, only the last is seen."""
        pairs = zip(self._steps, self._steps[1:], strict=False)
        return {step: later - seconds for (seconds, step), (later, _) in pairs}


def _sign(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _read_last_step(path: Path) -> int | None:
    """Returns the largest step in the last whole rows."""
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        whole, _, _ = file.read().rpartition(b"\n")
    # The first line may be truncated, or is the header if the file is short.
    firsts = [line.partition(b",")[0] for line in whole.split(b"\n")[1:]]
    return max((int(first) for first in firsts if first.isdigit()), default=None)


def _list_staging(checkpoints: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(checkpoints) if is_staging_name(entry.name))
    except FileNotFoundError:
        return []
