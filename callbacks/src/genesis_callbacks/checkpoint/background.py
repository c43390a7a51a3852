"""Saves that go on while training does: begun by the training thread, staged and written behind it, settled later.

`begin` takes what only the training thread may take (references, clocks, buffers) and returns. A thread of this rank
digests and copies the rest while the next forward and backward run; the training thread waits for that, and only for
that, before the next optimizer step (`wait_staged`). Then this thread, or the rank's writer process, writes. Rank 0's
outcome is the save's; the ranks agree about it through a number that the caller votes on.
"""

import contextlib
import os
import queue
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from .._compat import write_counts
from .commit import discard
from .digest import digest_chunk
from .errors import CheckpointError, SaveFailedError
from .job import (
    ChangedPartsError,
    CommitOrder,
    Outcome,
    OutcomeKind,
    TornSnapshotError,
    WriteJob,
    failed_outcome,
    leave_failure,
    perform,
)
from .manifest import COMMITTED_NAME, Ancestor, checkpoint_name, read_committed_hash
from .plan import LocalPart, Part, SavePlan, plan_save
from .ranks import Ranks
from .save import Saver, Snapshot
from .stage import Placed, SharedBuffer, copy_into, place_parts
from .write import sync_directory
from .writer_process import WRITER_OVERHEAD_BYTES, WriterProcess

Staging = Literal["blocking", "overlapped"]
# What rank 0 tells of an outcome in a vote; 0 says nothing.
_CODES: dict[OutcomeKind, int] = {"committed": 1, "failed": 2, "torn": 3, "changed": 4}
_CODE_BASE = 8
_ANSWER_GRACE_SECONDS = 5.0
_NOTE_WAIT_SECONDS = 5.0
# How long a save may take to end that has been given up, its writer killed.
_END_SECONDS = 5.0
_THREAD_NICENESS = 10
_YIELD_SECONDS = 0.001
_BEGIN_POLL_SECONDS = 0.002
# Only an optimizer step writes these; everything else may change in the next forward and is copied at once.
_OVERLAPPED_KINDS = ("parameter", "optimizer")


@dataclass(frozen=True)
class Progress:
    """What the caller knows of the training between two saves.

    Attributes:
        num_steps: Optimizer steps so far, as it is now: asked again when staging ends.
        num_updates: Those since the last checkpoint that changed parameters.
        moved: Names of the parameters that the last of them changed.
    """

    num_steps: Callable[[], int]
    num_updates: int = 0
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Plan:
    """Agreed by all ranks: valid while this rank holds these shared parts."""

    own: tuple[Part, ...]
    save: SavePlan
    token: str


def _versions(parts: Sequence[LocalPart]) -> list[int]:
    return write_counts([local.data for local in parts])


class _BackgroundSave:
    """One save of one rank, from its begin to its outcome. Its thread is the only one that touches the tensors."""

    def __init__(self, number: int, step: int, staging: Path, rank: int) -> None:
        self.number, self.step, self.staging, self.rank = number, step, staging, rank
        self.staged = threading.Event()
        self.finished = threading.Event()
        self.given_up = threading.Event()
        self.outcome: Outcome | None = None
        self.is_begun = False
        self.staged_bytes = 0

    def run(self, act: Callable[["_BackgroundSave"], Outcome]) -> None:
        """Runs `act`, whatever it raises, to an outcome."""
        try:
            outcome = act(self)
        except BaseException as error:  # whatever it was, the training thread must hear of it
            outcome = failed_outcome(error)
        self.staged.set()
        if outcome.kind not in ("written", "committed"):
            # A disk that failed the save may fail this, too; the outcome is told in any case.
            with contextlib.suppress(OSError, CheckpointError):
                outcome = self._clear_up(outcome)
        self.outcome = outcome
        self.finished.set()

    def wait_begun(self, limit_seconds: float) -> None:
        """Waits until rank 0 has made the staging directory.

        Raises:
            SaveFailedError: Rank 0 gave the save up, or did not begin it in time.
        """
        deadline_seconds = time.monotonic() + limit_seconds
        while not self.staging.is_dir():
            if self.given_up.wait(_BEGIN_POLL_SECONDS):
                raise SaveFailedError("rank 0 gave the save up")
            if time.monotonic() > deadline_seconds:
                raise SaveFailedError("the staging directory did not appear: rank 0 did not begin this save")

    def _clear_up(self, outcome: Outcome) -> Outcome:
        if self.rank != 0:
            with contextlib.suppress(SaveFailedError):
                self.wait_begun(_NOTE_WAIT_SECONDS)
            leave_failure(self.staging, self.rank, outcome)
        elif self.staging.is_dir():
            with contextlib.suppress(OSError):
                discard(self.staging)
        elif self.is_begun and (self._final / COMMITTED_NAME).exists():
            # The writer died after the commit, before it could say so; the staging directory made sure that it is ours.
            sync_directory(self._final.parent)
            return Outcome("committed", manifest_hash=read_committed_hash(self._final))
        return outcome

    @property
    def _final(self) -> Path:
        return self.staging.parent / checkpoint_name(self.step)


class _Worker:
    """One thread for all saves of a run: to start one for each would make training wait until it is scheduled."""

    def __init__(self) -> None:
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="genesis-save", daemon=True).start()

    def submit(self, act: Callable[[], None]) -> None:
        """Runs `act`, which raises nothing, after those before it."""
        self._acts.put(act)

    def close(self) -> None:
        """Ends the thread after what it has; does not wait for it."""
        self._acts.put(None)

    def _work(self) -> None:
        while (act := self._acts.get()) is not None:
            act()
            del act  # it holds tensors


class BackgroundSaver:
    """Saves one run in the background. Every rank has one and calls its methods at the same steps; one save at a time.

    Args:
        saver: Says where, for whom and under which heading; it learns of each commit.
        writer: The process that writes, taken over; None: a thread of this process does.
        staging: `overlapped` returns before the copy is done, `blocking` after it.
        time_limit_seconds: For one save's writing on one rank.
    """

    def __init__(
        self, saver: Saver, *, writer: WriterProcess | None, staging: Staging, time_limit_seconds: float
    ) -> None:
        self.staging: Staging = staging
        self._saver = saver
        self._ranks: Ranks = saver.ranks
        self._time_limit_seconds = time_limit_seconds
        self._writer = writer
        self._buffer: SharedBuffer | None = None
        self._plan: _Plan | None = None
        self._worker = _Worker()
        self._number = 0
        self._save: _BackgroundSave | None = None
        self._side_stream: torch.cuda.Stream | None = None
        self._is_closed = False
        self.staged_bytes = 0
        self.settled_step = 0

    # ---- the training thread

    def wait_ready(self) -> None:
        """Waits for the writer process to have started.

        Raises:
            SaveFailedError: It did not.
        """
        if self._writer is not None:
            self._writer.wait_ready()

    @property
    def step_in_flight(self) -> int | None:
        """The step of the save that is not settled yet."""
        return None if self._save is None else self._save.step

    @property
    def has_plan(self) -> bool:
        """Whether the next save can begin without talking to the other ranks."""
        return self._plan is not None

    @property
    def memory_bytes(self) -> int:
        """A bound on what a save takes on this rank beyond its buffers' copies: shared memory, and the writer's own."""
        shared = 0 if self._buffer is None else self._buffer.num_bytes
        return shared + (WRITER_OVERHEAD_BYTES if self._writer is not None else 0)

    def begin(self, step: int, take_snapshot: Callable[[], Snapshot], progress: Progress) -> None:
        """Begins a save. Communicates only where there is no plan yet: at the first save, and after a change.

        Args:
            step: Windows attempted.
            take_snapshot: Gives this rank's snapshot of it.
            progress: What happened since the save before.

        Raises:
            SaveFailedError: On every rank alike: it could not begin.
        """
        assert self._save is None
        snapshot: Snapshot | None
        failure: Exception | None
        if self._plan is None or self._ranks.world_size == 1:
            snapshot, failure = self._take_planned(take_snapshot), None
        else:
            snapshot, failure = self._take(take_snapshot)
        plan = self._plan
        assert plan is not None
        self._number += 1
        name = f"{checkpoint_name(step)}.staging-{plan.token}_{self._number}"
        save = self._save = _BackgroundSave(self._number, step, self._saver.directory / name, self._ranks.rank)
        if failure is not None or snapshot is None:
            outcome = failed_outcome(failure or SaveFailedError("no snapshot"))
            self._worker.submit(lambda: save.run(lambda _: outcome))
            return
        parts = [
            local if local.part.kind in _OVERLAPPED_KINDS else replace(local, data=local.data.clone())
            for local in snapshot.parts
        ]
        overlapped = [local for local in parts if local.part.kind in _OVERLAPPED_KINDS]
        before = (progress.num_steps(), _versions(overlapped))
        event = _record_event(parts)

        def act(save: _BackgroundSave) -> Outcome:
            # Let the training thread get out of its hook before this one wants the GIL.
            time.sleep(_YIELD_SECONDS)
            if self._ranks.is_first:
                self._make_staging(save)
            job = self._stage(save, plan, snapshot, parts, progress, event)
            if before != (progress.num_steps(), _versions(overlapped)):
                raise TornSnapshotError("training changed what was being staged: an optimizer step came before its end")
            save.staged.set()
            save.wait_begun(self._time_limit_seconds)
            return self._write(job)

        self._worker.submit(lambda: save.run(act))
        if self.staging == "blocking":
            save.staged.wait()

    def _take_planned(self, take_snapshot: Callable[[], Snapshot]) -> Snapshot:
        """Takes the snapshot and, where this needs another plan, makes one with all ranks."""
        taken: list[Snapshot] = []

        def report() -> tuple[tuple[Part, ...], str]:
            taken.append(take_snapshot())
            return _shared(taken[0]), uuid.uuid4().hex[:8]

        reports = self._ranks.attempt_and_gather("reporting what to save", report)
        own = reports[self._ranks.rank][0]
        if self._plan is None or self._plan.own != own:
            self._plan = _Plan(own, plan_save([parts for parts, _ in reports]), reports[0][1])
        return taken[0]

    def _take(self, take_snapshot: Callable[[], Snapshot]) -> tuple[Snapshot | None, Exception | None]:
        assert self._plan is not None
        try:
            snapshot = take_snapshot()
        except Exception as error:
            return None, error
        if _shared(snapshot) != self._plan.own:
            return snapshot, ChangedPartsError("this rank holds other tensors than the save was planned for")
        return snapshot, None

    def _make_staging(self, save: _BackgroundSave) -> None:
        final = self._saver.directory / checkpoint_name(save.step)
        if final.exists():
            raise SaveFailedError(f"{final} is there already: a checkpoint is never written over")
        os.mkdir(save.staging)  # noqa: PTH102 - the syscall by its name: fault tests wrap it
        save.is_begun = True

    def wait_staged(self) -> None:
        """Waits until the save in flight has no more need of live tensors; returns at once where there is none."""
        if self._save is not None:
            self._save.staged.wait()

    def poll(self) -> int:
        """Returns what this rank has to say about the save in flight, for a maximum over ranks; 0 for nothing."""
        save = self._save
        if save is None or not self._ranks.is_first or not save.finished.is_set():
            return 0
        assert save.outcome is not None
        return save.number * _CODE_BASE + _CODES[save.outcome.kind]

    def settle(self, agreed: int) -> Outcome | None:
        """Returns the outcome of the save in flight if `agreed`, the maximum over what `poll` gave, is about it.

        Communicates only where it is a failure. What `agreed` says must be the same on every rank.
        """
        save = self._save
        if save is None or agreed // _CODE_BASE != save.number:
            return None
        if agreed % _CODE_BASE == _CODES["committed"]:
            save.finished.wait()
            return self._settled(save, save.outcome if self._ranks.is_first else Outcome("committed"))
        return self.finish()

    def finish(self) -> Outcome | None:
        """Waits for the save in flight and returns its outcome; None where there is none. Communicates."""
        save = self._save
        if save is None:
            return None
        if self._ranks.is_first:
            save.finished.wait()
        outcome = self._ranks.broadcast(save.outcome)
        if outcome is not None and outcome.kind != "committed":
            save.given_up.set()
        save.finished.wait()
        return self._settled(save, outcome)

    def _settled(self, save: _BackgroundSave, outcome: Outcome | None) -> Outcome:
        assert outcome is not None
        self._save = None
        self.staged_bytes, self.settled_step = save.staged_bytes, save.step
        if outcome.kind == "committed":
            name = checkpoint_name(save.step)
            self._saver.continue_from(Ancestor(name, outcome.manifest_hash), self._saver.sequence + 1)
        else:
            self._plan = None
            if outcome.kind == "torn" and self.staging == "blocking":
                outcome = replace(outcome, kind="failed")  # somebody else writes into the tensors: no use to try again
            elif outcome.kind == "torn":
                self.staging = "blocking"
        return outcome

    def settle_alone(self, wait_seconds: float) -> Outcome | None:
        """Waits so long for the save in flight and returns this rank's own outcome, if it has one. No communication.

        For a rank that leaves: what the others know is not asked.

        Raises:
            SaveFailedError: It did not end in time.
        """
        save = self._save
        if save is None:
            return None
        if not save.finished.wait(wait_seconds):
            raise SaveFailedError(f"the save of step {save.step} still runs")
        outcome = save.outcome
        return self._settled(save, outcome if self._ranks.is_first else Outcome("committed"))

    def close(self, wait_seconds: float) -> Outcome | None:
        """Lets the save in flight end, for so long, gives everything back, and returns this rank's outcome, if any.

        No communication.
        """
        self._is_closed = True
        self._worker.close()
        save, self._save = self._save, None
        if save is not None:
            save.staged.wait()
            if not save.finished.wait(wait_seconds):
                save.given_up.set()
                if self._writer is not None:
                    self._writer.kill()
                save.finished.wait(_END_SECONDS)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._buffer is not None and (save is None or save.finished.is_set()):
            self._buffer.close()
            self._buffer = None
        return None if save is None else save.outcome

    # ---- behind it

    def _stage(
        self,
        save: _BackgroundSave,
        plan: _Plan,
        snapshot: Snapshot,
        parts: Sequence[LocalPart],
        progress: Progress,
        event: torch.cuda.Event | None,
    ) -> WriteJob:
        live = {local.part: local.data for local in parts}
        ours = [*plan.save.parts_by_writer[self._ranks.rank], *(part for part in live if part.kind == "state")]
        placed, save.staged_bytes = place_parts(ours)
        buffer = self._reserve(save.staged_bytes)
        if event is None:
            digests = _digest_and_copy(live, placed, buffer)
        else:
            digests = self._stage_from_device(event, live, placed, buffer)
        order = None
        if self._ranks.is_first:
            heading = self._saver.heading(snapshot)
            order = CommitOrder(
                heading, plan.save.parts_by_writer, self._saver.retention, progress.num_updates, progress.moved
            )
        return WriteJob(
            save.staging,
            self._ranks.rank,
            placed,
            digests,
            snapshot.section,
            self._saver.hash_algorithm,
            self._time_limit_seconds,
            order,
        )

    def _stage_from_device(
        self, event: torch.cuda.Event, live: dict[Part, Tensor], placed: Sequence[Placed], buffer: SharedBuffer
    ) -> dict[Part, int]:
        device = next(data.device for data in live.values() if data.is_cuda)
        with torch.cuda.device(device):  # a new thread begins with the first one
            buffer.pin()
            self._side_stream = self._side_stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch: no types
            with torch.cuda.stream(self._side_stream):
                self._side_stream.wait_event(event)
                digests = _digest_and_copy(live, placed, buffer)
            self._side_stream.synchronize()
        return digests

    def _reserve(self, num_bytes: int) -> SharedBuffer:
        if self._buffer is None or self._buffer.num_bytes < num_bytes:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = SharedBuffer(num_bytes)
        return self._buffer

    def _write(self, job: WriteJob) -> Outcome:
        assert self._buffer is not None
        if self._writer is None:
            return _perform_nicely(job, self._buffer)
        if not self._writer.is_alive:
            self._writer.kill()  # which gives back what it still holds
            warnings.warn("a writer process died between two saves; it is started again", stacklevel=2)
            self._writer = WriterProcess()
        limit_seconds = self._time_limit_seconds + _ANSWER_GRACE_SECONDS * (job.commit is not None)
        try:
            return self._writer.perform(job, self._buffer, limit_seconds)
        except SaveFailedError:
            self._writer.kill()
            if not self._is_closed:
                self._writer = WriterProcess()
            raise


def _perform_nicely(job: WriteJob, buffer: SharedBuffer) -> Outcome:
    """Writes in a thread of its own: on Linux niceness is a thread's, and cannot be taken back for the next staging."""
    outcomes: list[Outcome] = []

    def write() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_NICENESS)
        outcomes.append(perform(job, buffer, lambda: False))

    thread = threading.Thread(target=write, name="genesis-write", daemon=True)
    thread.start()
    thread.join()
    return outcomes[0]


def _shared(snapshot: Snapshot) -> tuple[Part, ...]:
    """The parts that ranks plan together; tensors of a rank's own state it writes itself."""
    return tuple(local.part for local in snapshot.parts if local.part.kind != "state")


def _record_event(parts: Sequence[LocalPart]) -> torch.cuda.Event | None:
    """Marks where the training stream stands, for a copy on another; None where everything is on the CPU."""
    if not any(local.data.is_cuda for local in parts):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
    event.record()
    return event


def _digest_and_copy(live: dict[Part, Tensor], placed: Sequence[Placed], buffer: SharedBuffer) -> dict[Part, int]:
    """Returns the digest of everything live after copying what this rank writes."""
    targets = {item.part: buffer.view(item) for item in placed}
    digests: dict[Part, int] = {}
    with torch.no_grad():
        for part, data in live.items():
            if part in targets:
                copy_into(targets[part], data)
            digests[part] = digest_chunk(data, part.shape, part.offsets)
    return digests
