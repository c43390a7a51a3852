"""Ends a run that hangs, with the stacks of every rank and the name of the rank for which the others wait.

It logs nothing. A thread of each rank looks at the progress that `Heartbeat` notes in memory, so that a training step
costs nothing beyond the heartbeat. It also shows the next rank that it runs itself: a process that is stopped is missed
after the time of training, whatever it does, from the start of the fit on. Does it communicate? The ranks agree on a
name when a fit begins. In a hang they exchange files in the run's directory and no message, because a process group
that hangs cannot be used.

    RUN/hangs/MOMENT/rank-N.stacks    the Python stacks of all threads of a rank
                     rank-N.json      where the rank is: phase, step, line, last collective with sizes of tensors
                     rank-N.flight.json    what torch's flight recorder has, if it records
                     verdict.txt      the rank that is missing, and a line for each rank
"""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning.pytorch import Callback, LightningModule, Trainer

from ._argument_types import checking
from ._hang_report import (
    HangReport,
    Verdict,
    describe_last,
    find_missing,
    locate,
    read_flight_record,
    read_main_frame,
    read_reports,
    write_report,
)
from .base.errors import UserError
from .base.events import EventLog
from .base.files import replace_file
from .base.run_directory import RunDirectory
from .base.untrusted import open_file
from .heartbeat import Heartbeat, Progress
from .phases import PHASES, Phase, find_callbacks

__all__ = ["EXIT_STATUS", "HangWatch", "HangLimits", "choose_limit"]

EXIT_STATUS: Final = 92
"""The status with which every rank of a run that hangs ends, as `genesis supervise` does after such ends."""

_LIMITED: Final[tuple[Phase, ...]] = tuple(phase for phase in PHASES if phase != "start")
"""Before training, only a process that is stopped is seen."""
_LONG_PHASES: Final[tuple[Phase, ...]] = ("validate", "save", "generate", "reference")
_LONG_FACTOR: Final = 4.0
_LEAST_INTERVAL_SECONDS: Final = 0.1
_MOST_INTERVAL_SECONDS: Final = 2.0
_GATHER_INTERVALS: Final = 3.0
_SUSPENDED_SECONDS: Final = 5.0
_MAX_MOMENT_BYTES: Final = 100


@dataclass(frozen=True)
class HangLimits:
    """How long a rank may make no progress.

    Args:
        timeout_seconds: In training.
        first_step_seconds: Until the first batch has ended: blocks are compiled, connections opened, files read.
        phase_seconds: By phase; others than "train" have four times `timeout_seconds` without an entry.
    """

    timeout_seconds: float
    first_step_seconds: float
    phase_seconds: Mapping[str, float] = field(default_factory=dict)


def choose_limit(phase: Phase, limits: HangLimits, *, has_stepped: bool) -> float:
    """Returns how long a rank may make no progress in a phase. Pure.

    Example:
        >>> choose_limit("validate", HangLimits(60.0, 600.0), has_stepped=True)
        240.0
    """
    if phase in limits.phase_seconds:
        return limits.phase_seconds[phase]
    seconds = limits.timeout_seconds * (_LONG_FACTOR if phase in _LONG_PHASES else 1.0)
    return seconds if has_stepped else max(seconds, limits.first_step_seconds)


class HangWatch(Callback):
    """Ends all ranks with status 92 if a rank makes no progress for too long; see the module's docstring.

    It needs a `Heartbeat` among the callbacks, whose run directory it uses; all ranks have to see this directory. The
    timeout of the process group has to be above `longest_seconds`, or the group may end the run first, without naming a
    rank. Torch's default is 1,800 s under Lightning, and 600 s for further nccl groups, such as those of a mesh.
    What it does not replace: a process that is gone is named by `AsyncProcessCheckpoint` within seconds, by a lock.

    Args:
        timeout_seconds: How long a rank may make no progress in training, and its process be stopped in any phase.
        first_step_seconds: The same before the first batch of a fit has ended.
        phase_seconds: The same by phase (`genesis_callbacks.phases`); by default four times `timeout_seconds` for
            phases other than "train".

    Raises:
        UserError: A limit is not a positive number, a phase does not exist, or there is no `Heartbeat`.
    """

    @checking
    def __init__(
        self,
        *,
        timeout_seconds: float = 1800.0,
        first_step_seconds: float = 3600.0,
        phase_seconds: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self._limits = HangLimits(timeout_seconds, first_step_seconds, dict(phase_seconds or {}))
        unknown = [name for name in self._limits.phase_seconds if name not in _LIMITED]
        if unknown:
            raise UserError(f"phase_seconds has {unknown[0]!r}, which has no limit: give some of {', '.join(_LIMITED)}")
        given = {
            "timeout_seconds": timeout_seconds,
            "first_step_seconds": first_step_seconds,
            **{f"phase_seconds[{name!r}]": seconds for name, seconds in self._limits.phase_seconds.items()},
        }
        for name, seconds in given.items():
            if not seconds > 0:
                raise UserError(f"{name} is {seconds}: give a positive number of seconds")
        self._watch: _Watch | None = None

    @property
    def timeout_seconds(self) -> float:
        """How long a rank may make no progress in training."""
        return self._limits.timeout_seconds

    @property
    def longest_seconds(self) -> float:
        """The longest of all limits: a run that hangs in any phase has ended by then."""
        return max(choose_limit(phase, self._limits, has_stepped=False) for phase in _LIMITED)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that there is a heartbeat."""
        if stage == "fit":
            _find_heartbeat(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agrees on the name of a report, and begins to watch. A restore may follow."""
        self._stop()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning sets it; such a run leaves nothing behind
            return
        moment: str = trainer.strategy.broadcast(f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}")
        self._watch = _Watch(_find_heartbeat(trainer), self._limits, trainer, moment)
        self._watch.start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops watching."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops watching."""
        self._stop()

    def _stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()


class _Watch:
    """The thread of one rank. It never waits for the training thread."""

    def __init__(self, heartbeat: Heartbeat, limits: HangLimits, trainer: Trainer, moment: str) -> None:
        self._heartbeat, self._limits, self._trainer = heartbeat, limits, trainer
        self._rank, self._world_size = trainer.global_rank, trainer.world_size
        self._folder = RunDirectory(heartbeat.run_dir).hangs / moment
        self._events = EventLog(heartbeat.run_dir, self._rank)
        self._main_thread = threading.get_ident()
        shortest = min(limits.timeout_seconds, limits.first_step_seconds, *limits.phase_seconds.values(), 1e9)
        self._interval_seconds = min(_MOST_INTERVAL_SECONDS, max(_LEAST_INTERVAL_SECONDS, shortest / 10))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)
        self._resumed_seconds = time.monotonic()
        directory = RunDirectory(heartbeat.run_dir)
        self._pulse = Pulse(directory.pulse_file(self._rank), moment)
        self._neighbour = Pulse(directory.pulse_file((self._rank + 1) % self._world_size), moment)

    def start(self) -> None:
        self._pulse.beat()  # before the thread's first turn, as a rank may be stopped by then
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10 * self._interval_seconds)
        self._pulse.end()

    def _run(self) -> None:
        looked_seconds = time.monotonic()
        while not self._stopped.wait(self._interval_seconds):
            now = time.monotonic()
            if now - looked_seconds > self._interval_seconds + _SUSPENDED_SECONDS:
                # This process was stopped, or the machine slept: that time says nothing about the other threads.
                self._resumed_seconds = now
            looked_seconds = now
            self._pulse.beat()
            progress = self._heartbeat.progress
            is_late = progress is not None and self._is_silent(progress, now)
            if is_late or self._folder.is_dir() or self._is_neighbour_stopped(now):
                self._end(progress or Progress("start", 0, self._resumed_seconds, has_stepped=False), now)

    def _silence(self, progress: Progress, now: float) -> float:
        return now - max(progress.seconds, self._resumed_seconds)

    def _is_silent(self, progress: Progress, now: float) -> bool:
        limit = choose_limit(progress.phase, self._limits, has_stepped=progress.has_stepped)
        return self._silence(progress, now) > limit

    def _is_neighbour_stopped(self, now: float) -> bool:
        """Returns whether the process of the next rank, which this one need not wait for in every step, is stopped.

        A ring: each rank reads one file per interval, whatever the number of ranks. The time of training holds in every
        phase: however long a validation or a save takes, the thread of a process that runs gives signs of life.
        """
        seen_seconds = self._neighbour.look(now)
        if self._world_size == 1 or seen_seconds is None:
            return False
        # By this rank's clock, since clocks of machines differ; a sign of life is up to an interval late.
        return now - max(seen_seconds, self._resumed_seconds) > self._limits.timeout_seconds + self._interval_seconds

    # ---- the end

    def _end(self, progress: Progress, now: float) -> None:
        """Reports, waits for the reports of the other ranks, and ends this process. It does not return."""
        try:
            text = self._report(progress, now).describe()
        except OSError as error:  # such as a full disk: the run has to end all the same
            text = f"no progress, and no report can be written to {self._folder}: {error.strerror or error}"
        sys.stderr.write(
            f"genesis-callbacks: error: [rank {self._rank}] hang: {text} (stacks of all ranks: {self._folder})\n"
        )
        sys.stderr.flush()
        # Not sys.exit, which ends this thread only: the training thread waits where no exception reaches it.
        os._exit(EXIT_STATUS)

    def _report(self, progress: Progress, now: float) -> Verdict:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"rank-{self._rank}.stacks").open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        where, is_waiting = locate(read_main_frame(self._main_thread))
        record = read_flight_record()
        if record:
            replace_file(self._folder / f"rank-{self._rank}.flight.json", record)
        report = HangReport(
            *(self._rank, os.getpid(), socket.gethostname(), progress.phase, progress.num_moves),
            *(self._trainer.global_step, self._silence(progress, now), where, is_waiting, describe_last(record)),
        )
        write_report(self._folder, report)
        reports = self._gather()
        verdict = find_missing(reports, self._world_size)
        if self._rank == min(report.rank for report in reports):
            lines = [verdict.describe(), *(each.describe() for each in reports)]
            replace_file(self._folder / "verdict.txt", ("\n".join(lines) + "\n").encode())
            text = f"{verdict.describe()}; stacks in {self._folder.relative_to(self._heartbeat.run_dir)}"
            self._events.append("hang", step=report.step, text=text)
        return verdict

    def _gather(self) -> list[HangReport]:
        # A rank whose thread can run at all sees the folder within one interval.
        deadline_seconds = time.monotonic() + _GATHER_INTERVALS * self._interval_seconds + 1.0
        while True:
            reports = read_reports(self._folder, self._world_size)
            if len(reports) == self._world_size or time.monotonic() > deadline_seconds:
                return reports
            time.sleep(_LEAST_INTERVAL_SECONDS)


class Pulse:
    """A file by which the watch of one rank shows that its process runs; it needs no room on the disk after the first.

    Args:
        path: The file.
        moment: The fit. A file of another fit, as on a file system that the ranks do not share, is no sign of anything.
    """

    def __init__(self, path: Path, moment: str) -> None:
        self._path, self._moment = path, moment
        self._has_begun = False
        self._seen: tuple[int, float] | None = None

    def beat(self) -> None:
        """Shows that the process runs."""
        with contextlib.suppress(OSError):  # a disk without room for a new file: another rank then sees no file
            if self._has_begun:
                os.utime(self._path)
            else:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self._path, self._moment.encode())
                self._has_begun = True

    def end(self) -> None:
        """Removes the file, so that the process may end."""
        if self._has_begun:
            self._path.unlink(missing_ok=True)

    def look(self, now: float) -> float | None:
        """Returns when the process was last seen to show that it runs; None if it gives no signs, or has ended.

        Args:
            now: The time, by the monotonic clock of this process.
        """
        try:
            with open_file(self._path) as file:  # opened, so that a network's file system asks its server
                is_ours = file.read(_MAX_MOMENT_BYTES) == self._moment.encode()
                beat = os.fstat(file.fileno()).st_mtime_ns
        except (OSError, ValueError):
            is_ours = False
        if not is_ours:
            self._seen = None
        elif self._seen is None or self._seen[0] != beat:
            self._seen = beat, now
        return None if self._seen is None else self._seen[1]


def _find_heartbeat(trainer: Any) -> Heartbeat:
    found = find_callbacks(trainer, Heartbeat)
    if not found:
        raise UserError(
            "HangWatch follows a Heartbeat, and the Trainer has none: add Heartbeat(run_dir) to its callbacks"
        )
    return found[0]
