"""The crashes of a run, in memory and on the disk."""

import contextlib
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from genesis.operations.supervise.attempt import Attempt, read_tail
from genesis.operations.supervise.classify import Diagnosis
from genesis.operations.supervise.crashes import CrashRecord, write_crash
from genesis.operations.supervise.decide import Action, PastEnd
from genesis.operations.supervise.ends import ENDS, EndClass

_KEPT_VARIABLES: Final = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"),
    *("TORCH_NCCL_", "NCCL_", "GLOO_", "PYTORCH_"),
)
"""Variables, by the beginnings of their names, that explain crashes; others may hold secrets."""
_CLASSES: Final[dict[str, EndClass]] = {name: name for name in ENDS}


class SafeWriter:
    """Writes what the supervisor can do without: a full disk, on which a run may wait for space, is one line.

    Args:
        report: Prints a line.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._is_failing = report, False

    def write(self, act: Callable[[], object]) -> bool:
        """Calls `act`, and returns whether that worked; the first of several failures in a row is reported."""
        try:
            act()
            self._is_failing = False
            return True
        except OSError as error:
            if not self._is_failing:
                self._report(f"{error.filename or 'a file'} cannot be written: {error.strerror or error}")
            self._is_failing = True
            return False


class Records:
    """The crashes of a run.

    Args:
        run_dir: The run's directory.
        crashes: Those that are on the disk.
        writer: Writes the records.
    """

    def __init__(self, run_dir: Path, crashes: Sequence[CrashRecord], writer: SafeWriter) -> None:
        self._run_dir, self._crashes, self._writer = run_dir, list(crashes), writer
        self._lost_files: dict[int, Mapping[str, bytes]] = {}
        """The files of crashes whose record a full disk has not taken, by the number of the crash."""

    @property
    def last_number(self) -> int:
        """The number of the newest crash; 0 before the first."""
        return max((record.number for record in self._crashes), default=0)

    def history(self, first: int) -> list[PastEnd]:
        """Returns the ends for the decision, from the crash with number `first` on."""
        return [
            PastEnd(_CLASSES[record.end_class], record.step, record.saved_step)
            for record in self._crashes
            if record.number >= first and record.end_class in _CLASSES
        ]

    def add(self, attempt: Attempt, diagnosis: Diagnosis, past: PastEnd, action: Action, folder: Path) -> CrashRecord:
        """Writes the record of an end, with the output and the stacks of all ranks, and returns it."""
        beats = attempt.sight.heartbeats
        clocks = beats[min(beats)].clocks if beats else {}
        record = CrashRecord(
            number=self.last_number + 1,
            attempt=_number_of(folder),
            end_class=past.end_class,
            rank=diagnosis.rank,
            step=past.step,
            time_seconds=time.time(),
            reason=diagnosis.reason,
            action=action.text,
            clocks=dict(clocks),
            statuses=attempt.statuses,
            environment=describe_environment(),
            saved_step=past.saved_step,
        )
        self._crashes.append(record)
        files = {path.name: read_tail(path) for path in sorted(folder.glob("rank-*"))}
        files = {name: data for name, data in files.items() if data}
        self._write(record, files)
        return record

    def replace_last(self, record: CrashRecord) -> None:
        """Replaces the newest record."""
        self._crashes[-1] = record
        self._write(record, self._lost_files.get(record.number, {}))

    def write_lost(self) -> None:
        """Writes the records that a full disk has not taken, with the output and the stacks of their ranks."""
        for record in [record for record in self._crashes if record.number in self._lost_files]:
            with contextlib.suppress(OSError):  # it is reported already, and this is called again
                write_crash(self._run_dir, record, self._lost_files[record.number])
                del self._lost_files[record.number]

    def _write(self, record: CrashRecord, files: Mapping[str, bytes]) -> None:
        if self._writer.write(lambda: write_crash(self._run_dir, record, files)):
            self._lost_files.pop(record.number, None)
        else:
            self._lost_files[record.number] = files

    def set_statuses(self, statuses: Mapping[int, int]) -> None:
        """Completes the newest record by the exit statuses of ranks on other nodes."""
        self.replace_last(replace(self._crashes[-1], statuses=dict(statuses)))

    def count_ends(self) -> dict[str, int]:
        """Returns the number of ends by class."""
        return dict(Counter(record.end_class for record in self._crashes))

    def describe_tried(self, first: int) -> list[str]:
        """Returns a line for each crash from number `first` on: what happened and what was tried."""
        return [
            f"  crash {record.number}, {record.end_class}, at step {record.step}: {record.reason}; {record.action}"
            for record in self._crashes
            if record.number >= first
        ]


def describe_environment() -> dict[str, str]:
    """Returns what may explain a crash: the machine, Python, and known variables of the environment."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_KEPT_VARIABLES)}
    return {"python": platform.python_version(), "kernel": platform.release(), "cpus": str(os.cpu_count()), **variables}


def _number_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])
