"""What the supervisor of a run knows: its counts and records, on the disk and for others.

Both loops, that of one node and that of several, work on a `RunState`. It starts and ends no process.
"""

import contextlib
import os
import platform
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from genesis.base.errors import numbered
from genesis.base.processes import Mark
from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.attempt import Attempt, Sight, read_tail
from genesis.operations.supervise.checkpoints import newest_step
from genesis.operations.supervise.classify import Diagnosis, Evidence
from genesis.operations.supervise.crashes import CrashRecord, read_crashes, write_crash
from genesis.operations.supervise.decide import Action, PastEnd, decide
from genesis.operations.supervise.ends import ENDS, EndClass
from genesis.operations.supervise.goodput import Goodput, GoodputMeter, format_seconds
from genesis.operations.supervise.launcher_client import MARK_NAME
from genesis.operations.supervise.observers import Observer, Observers
from genesis.operations.supervise.options import SuperviseOptions
from genesis.operations.supervise.plan import Plan, RecipeFacts, attempt_folder, save_stalls
from genesis.operations.supervise.skips import Blame, Skips, choose_newest, find_blame
from genesis.operations.supervise.state import (
    LoopState,
    SupervisorLock,
    read_skips,
    read_state,
    write_skips,
    write_state,
)
from genesis.operations.supervise.status import State, SupervisorStatus, read_status, write_status
from genesis_callbacks.base.events import EventLog

_STATUS_SECONDS: Final = 1.0
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
        """Writes the record of an end, with the output and the stacks of all ranks in `folder`, and returns it."""
        beats = attempt.sight.heartbeats
        clocks = beats[min(beats)].clocks if beats else {}
        record = CrashRecord(
            number=self.last_number + 1,
            attempt=int(folder.name.rpartition("-")[2]),
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


class RunState:
    """What the supervisor of a run knows of it. It holds the run's lock until `close`.

    Args:
        options: The options.
        report: Prints a line.
        observers: What else follows the run.

    Attributes:
        paths: The paths in the run's directory.
        memory: What the next supervisor needs of this one.
        was_over: Whether the supervisor before had come to an end of its own.
        mark: Identifies the processes of the run.
        events: The supervisor's events.
        meter: Where wall time goes.
        records: The crashes.
        skips: Which data the run skips.
        plan: How the next attempt differs from the first.
        facts: What the recipe says; None until it is resolved.
        reason: Why the run waits, recovers or was stopped.
        unrecovered: The last crash, while the run has not got beyond it.
        is_leader: Whether the run's snapshot is this supervisor's: of several nodes, it is node 0's.
        repeated_until: The largest step that attempts before the one at hand had reached.
    """

    def __init__(
        self, options: SuperviseOptions, report: Callable[[str], None], observers: Sequence[Observer] = ()
    ) -> None:
        self.options, self.report, self.observers = options, report, Observers(observers, report)
        self.paths = RunDirectory(options.run_dir)
        self.paths.check_own()
        self._lock = SupervisorLock(options.directory)
        self.memory = read_state(options.directory) or LoopState(uuid.uuid4().hex, began_seconds=time.time())
        self.mark = Mark(MARK_NAME, self.memory.run_id)
        self.events = EventLog(options.run_dir, "supervisor")
        before = read_status(options.run_dir)
        goodput = Goodput() if before is None else before.goodput
        if before is not None:  # the time since then belonged to nobody
            goodput = replace(goodput, down=goodput.down + max(0.0, time.time() - before.updated_seconds))
        self.meter = GoodputMeter(goodput, time.monotonic())
        self._writer = SafeWriter(report)
        self.records = Records(options.run_dir, read_crashes(options.run_dir), self._writer)
        # A failure that was already reported: the next attempt counts as new.
        if self.memory.is_over:
            self.memory.first_crash = self.records.last_number + 1
        self.was_over, self.memory.is_over = self.memory.is_over, False
        self._restarts: Counter[str] = Counter({} if before is None else before.restarts)
        self.skips = read_skips(options.run_dir)
        self.plan = Plan()
        self.facts: RecipeFacts | None = None
        self.is_leader = True
        self.reason = ""
        self._status_state: State = "launching"
        self._told_seconds = 0.0
        self.unrecovered: CrashRecord | None = None
        self._crash_seconds = 0.0
        self.repeated_until = self.memory.best_step
        self._verified_step: int | None = newest_step(options.run_dir) or None

    def close(self) -> None:
        """Lets go of the run."""
        self._lock.release()

    def read_records(self) -> None:
        """Reads the crashes again, which another node may have written."""
        self.records = Records(self.options.run_dir, read_crashes(self.options.run_dir), self._writer)

    def take_restored(self) -> None:
        """Takes over what an observer has restored of a run whose machine was lost: crashes, and the skipped data."""
        if not self.records.last_number:
            self.read_records()
            if self.records.last_number:  # of the machine before: what follows is a new try
                self.memory.first_crash = self.records.last_number + 1
        self.skips = choose_newest([self.skips, read_skips(self.options.run_dir)])

    def change_skips(self, skips: Skips) -> None:
        """Changes which data the run skips, here and on the disk."""
        self.skips = skips
        self._writer.write(lambda: write_skips(self.options.run_dir, skips))

    def save(self) -> None:
        """Writes what the next supervisor needs."""
        self._writer.write(lambda: write_state(self.options.directory, self.memory))

    # ---- an attempt

    def follow(self, sight: Sight) -> None:
        """Follows what is seen of an attempt: time by part, the first new step, the snapshot."""
        if sight.started_seconds is not None:
            self.meter.enter("restore", sight.started_seconds)
        trained_from = sight.milestone("train")
        step = sight.step
        if trained_from is not None:
            reached = max(step or 0, sight.restored_step or 0)
            self.meter.enter("trained" if reached >= self.repeated_until else "repeated", trained_from)
        if step is not None:
            if step > self.memory.best_step:
                self.recover(sight)
                self.memory.best_step = step
            if self._status_state != "training" and self.unrecovered is None:
                self.tell("training", "")
        if time.monotonic() - self._told_seconds >= _STATUS_SECONDS:
            self.check_saved()
            self.tell(self._status_state, self.reason)

    def recover(self, sight: Sight) -> None:
        """Completes the record of the last crash when the run has got beyond it, or to its end."""
        record, self.unrecovered = self.unrecovered, None
        if record is None:
            return
        seconds, resumed = time.monotonic() - self._crash_seconds, sight.restored_step or 0
        rate, repeated_steps = self.options.cost_per_hour, max(0, self.memory.best_step - resumed)
        record = replace(
            record,
            resumed_from=resumed,
            repeated_steps=repeated_steps,
            lost_seconds=seconds,
            cost=None if rate is None else seconds / 3600 * rate,
        )
        self.records.replace_last(record)
        text = f"crash {record.number} ({record.end_class}): training again after {format_seconds(seconds)}"
        self.report(f"{text}, from step {resumed}, {numbered(repeated_steps, 'steps')} repeated")
        self.events.append("recovered", step=sight.step, text=text)
        self.observers.call(lambda each: each.on_recovered(record))

    def count_time(self, sight: Sight) -> None:
        """Counts the time of an attempt that has ended: what it waited for saves is not training."""
        self.meter.enter("down", sight.end_seconds)
        self.meter.move(save_stalls(self.paths.metrics, sight.restored_step or 0), "trained", "saves")

    def conclude(self, attempt: Attempt, evidence: Evidence, diagnosis: Diagnosis) -> Action:
        """Records an end and decides what follows."""
        assert diagnosis.end_class is not None
        sight, number = attempt.sight, self.memory.attempt
        blame = self._find_blame(evidence, diagnosis)
        past = PastEnd(diagnosis.end_class, sight.step, newest_step(self.options.run_dir), blame)
        history = [*self.records.history(self.memory.first_crash), past]
        action = decide(history, self.options.policy, self.skips)
        if diagnosis.end_class == "preempted":  # the run did what it was asked to: no crash
            self.report(f"attempt {number} was preempted: {diagnosis.reason}; {action.text}")
            self.events.append("preempted", step=sight.step, text=diagnosis.reason)
            return action
        self._crash_seconds, self.reason = sight.end_seconds, diagnosis.reason
        record = self.records.add(attempt, diagnosis, past, action, attempt_folder(self.paths, number))
        self.report(f"attempt {number} ended: {diagnosis.end_class}: {diagnosis.reason}")
        self.report(f"  {action.text}")
        self.events.append("crashed", step=sight.step, text=f"{diagnosis.end_class}: {diagnosis.reason}")
        self.observers.call(lambda each: each.on_end(record))
        if action.kind == "restart":
            self.unrecovered = record
            self._restarts[diagnosis.end_class] += 1
            self.tell("recovering", diagnosis.reason)
        return action

    def _find_blame(self, evidence: Evidence, diagnosis: Diagnosis) -> Blame | None:
        """Returns the data in which an attempt failed, by what the rank that failed first wrote at that moment."""
        end = next((end for end in evidence.ranks if end.rank == diagnosis.rank), None)
        if end is None or self.facts is None or diagnosis.end_class is None:
            return None
        return find_blame(diagnosis.end_class, end.failed_step, end.failed_clocks, self.facts.global_batch_size)

    # ---- for others

    def check_saved(self) -> None:
        """Looks which checkpoint is the newest."""
        self._verified_step = newest_step(self.options.run_dir) or None

    def tell(self, state: State, reason: str) -> None:
        """Changes the state of the run, and gives the new snapshot to the disk and the observers."""
        self._status_state, self.reason, self._told_seconds = state, reason, time.monotonic()
        status = self.snapshot()
        if self.is_leader and self._writer.write(lambda: write_status(self.options.run_dir, status)):
            self.records.write_lost()
        self.observers.call(lambda each: each.on_status(status))

    def snapshot(self) -> SupervisorStatus:
        """Returns the state of the run for other programs."""
        return SupervisorStatus(
            state=self._status_state,
            pid=os.getpid(),
            host=socket.gethostname(),
            began_seconds=self.memory.began_seconds,
            updated_seconds=time.time(),
            attempt=self.memory.attempt,
            num_ranks=0 if self.facts is None else self.facts.num_ranks,
            ends=self.records.count_ends(),
            restarts=dict(self._restarts),
            step=self.memory.best_step,
            verified_step=self._verified_step,
            goodput=self.meter.read(time.monotonic()),
            reason=self.reason,
        )
