"""Runs a save by the same steps in every mode: begin, stage, write, commit, settle.

`begin` takes references, clocks and buffers, which only the training thread can take. In mode `sync` the same thread
then stages and writes, and the save is done when `begin` returns. In `thread` and `process`, a thread of this rank
digests and copies the rest while the next forward and backward run. The training thread waits for this staging, and for
nothing else, before the next optimizer step (`wait_staged`). Then the save thread, or the rank's writer process,
writes. The outcome of the save is rank 0's. Ranks may learn it at different steps: the caller reduces the numbers of
`poll` over the ranks, or calls `finish`.
"""

import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .._compat import plain_write_counts
from ..base.checkpoint_errors import SaveFailedError
from ..base.local_shards import LocalShard, TensorShard
from ..base.manifest import Ancestor
from ..base.run_directory import checkpoint_name
from .device import DevicePath, find_device
from .inline import begin_together, perform_together
from .job import (
    ChangedPartsError,
    CommitOrder,
    Outcome,
    OutcomeKind,
    TornSnapshotError,
    WriteJob,
    error_from,
    perform,
)
from .one_save import OneSave, Progress
from .plan import Numbers, SavePlan, plan_save
from .ranks import Ranks
from .save_target import RetentionWarning, SaveTarget, Snapshot
from .save_thread import SaveThread, perform_niced
from .stage import SharedStager, Staged, StagedShards, record_staging_event
from .writer_process import WriterProcess

SaveMode = Literal["sync", "thread", "process"]
Staging = Literal["blocking", "overlapped"]
_Stage = Callable[[], tuple[WriteJob, Staged]]
# `poll` encodes an outcome and the save's number in one integer: ranks reduce it by MAX, and a rank cannot take the
# outcome of an earlier save for this one's. 0 means that there is no outcome yet.
_CODES: dict[OutcomeKind, int] = {"committed": 1, "failed": 2, "torn": 3, "changed": 4}
_CODE_BASE = 8
_ANSWER_GRACE_SECONDS = 5.0
# Seconds that `close` waits for the end of an abandoned save whose writer was killed.
_END_SECONDS = 5.0
_YIELD_SECONDS = 0.001
_TIME_LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class _Plan:
    """This rank's part of a plan that all ranks agreed on: valid while this rank holds the same shared parts.

    Attributes:
        own: The shared parts that this rank reported.
        written: The places in `own` of those that this rank writes.
        token: Names the plan, the same on all ranks.
        whole: The plan of all ranks, on rank 0 alone.
    """

    own: tuple[TensorShard, ...]
    written: Numbers
    token: str
    whole: SavePlan | None


class SavePipeline:
    """Saves one run. Every rank has one and calls its methods at the same steps; one save at a time.

    Args:
        target: The directory, the ranks and the manifest's header; the pipeline reports each commit to it.
        mode: The writer: `sync` the training thread, `thread` a thread beside it, `process` a writer process.
        writer: The writer process, in mode `process` only; the pipeline closes it.
        staging: `overlapped` returns before the copy is done, `blocking` after it, as mode `sync` always does.
        time_limit_seconds: Of one save's writing on one rank, unless the training threads write together.
        device_path: The path that saves take if tensors are on an accelerator.
    """

    def __init__(
        self,
        target: SaveTarget,
        *,
        mode: SaveMode,
        writer: WriterProcess | None = None,
        staging: Staging = "overlapped",
        time_limit_seconds: float = _TIME_LIMIT_SECONDS,
        device_path: DevicePath | None = None,
    ) -> None:
        assert (writer is None) == (mode != "process")
        self.mode: SaveMode = mode
        self.staging: Staging = "blocking" if mode == "sync" else staging
        self.staged_bytes = 0
        self.settled_step = 0
        self._target = target
        self._ranks: Ranks = target.ranks
        self._time_limit_seconds = time_limit_seconds
        self._writer = writer
        self._stager = SharedStager(device_path)
        self._plan: _Plan | None = None
        self._worker = SaveThread() if mode != "sync" else None
        self._number = 0
        self._save: OneSave | None = None
        self._is_closed = False

    # ---- the training thread

    def wait_ready(self) -> None:
        """Waits for the writer process to have started.

        Raises:
            SaveFailedError: The writer process did not start.
        """
        if self._writer is not None:
            self._writer.wait_ready()

    @property
    def step_in_flight(self) -> int | None:
        """The step of the save that is not settled yet."""
        return None if self._save is None else self._save.step

    @property
    def has_plan(self) -> bool:
        """Whether the next save can begin without communication."""
        return self._plan is not None

    @property
    def copy_bytes(self) -> int:
        """The size of the shared memory that this rank holds during the fit for the copies of its tensors."""
        buffer = self._stager.buffer
        return 0 if buffer is None else buffer.num_bytes

    @property
    def scratch_bytes(self) -> int:
        """Memory that digests hold on this rank's device as long as the fit lasts."""
        return self._stager.scratch_bytes

    @property
    def writer_bytes(self) -> int:
        """Memory that the writer process held for itself at its last answer; 0 without a writer process."""
        return 0 if self._writer is None else self._writer.memory_bytes

    def take_notices(self) -> list[str]:
        """Returns the warnings about saves on the device that the user has not seen yet."""
        return self._stager.take_notices()

    def reserve(self, take_snapshot: Callable[[], Snapshot]) -> None:
        """Plans the next saves and allocates their memory, if tensors are on an accelerator. Communicates.

        Pinning memory of a model's size takes seconds, which would otherwise delay the first save. The thread that
        stages does it, in the modes that have one.

        Args:
            take_snapshot: Returns this rank's snapshot, which is not saved.

        Raises:
            SaveFailedError: A snapshot cannot be taken; on every rank alike.
        """
        snapshot = self._take_planned(take_snapshot)
        plan = self._plan
        assert plan is not None
        device = find_device(local.data for local in snapshot.parts)
        if device is None:
            return
        ours = self._ours(plan, (local.part for local in snapshot.whole().parts))
        if self._worker is None:
            self._stager.reserve_scratch(device)
        else:
            self._worker.submit(lambda: self._stager.reserve(device, ours))

    def _ours(self, plan: _Plan, parts: Iterable[TensorShard]) -> list[TensorShard]:
        """Returns the parts that this rank writes: its share of the common plan, and all tensors of its own state."""
        return [*(plan.own[place] for place in plan.written), *(part for part in parts if part.kind == "state")]

    def begin(
        self,
        step: int,
        take_snapshot: Callable[[], Snapshot],
        progress: Progress,
        *,
        alone_within_seconds: float | None = None,
    ) -> None:
        """Begins a save; in mode `sync` also runs it to its end, so that only `finish` is left to call.

        It communicates if there is no plan yet: at the first save, and after a failed one. In mode `sync` it always
        does.

        Args:
            step: Windows attempted.
            take_snapshot: Returns this rank's snapshot of that step.
            progress: The progress of training since the previous save.
            alone_within_seconds: Makes the save without communication, in every mode, and limits the wait for the
                other ranks' parts. With several ranks it needs a plan (`has_plan`).

        Raises:
            SaveFailedError: The save could not begin; on every rank alike.
        """
        assert self._save is None
        taken: Snapshot | Exception
        # All ranks have a plan, or none has, since all drop it with the same outcome: no rank enters the collective of
        # `_take_planned` alone.
        if self._plan is None or self._ranks.world_size == 1:
            taken = self._take_planned(take_snapshot)
        else:
            taken = self._take(take_snapshot)
        plan = self._plan
        assert plan is not None
        self._number += 1
        # Rank 0's random token is in the plan: all ranks know a name that no earlier run can have left behind.
        staging = self._target.directory / f"{checkpoint_name(step)}.staging-{plan.token}_{self._number}"
        is_together = self._worker is None and alone_within_seconds is None
        save = self._save = OneSave(
            *(self._number, step, staging, self._ranks.rank), leaves_notes=not is_together, events=self._target.events
        )
        limit_seconds = alone_within_seconds or self._time_limit_seconds
        try:
            stage = self._prepare(save, plan, taken, progress, limit_seconds)
        except Exception as error:  # for example of the device: raised later, as an outcome that all ranks learn
            stage = _fail_with(error)
        if is_together:
            save.run(lambda save: self._act_together(save, stage))
        elif self._worker is None:
            save.run(lambda save: self._act(save, stage, limit_seconds))
        else:
            self._worker.submit(lambda: save.run(lambda save: self._act(save, stage, limit_seconds)))
            if self.staging == "blocking":
                save.staged.wait()
        if save.interruption is not None and self._worker is None:
            raise save.interruption

    def _take_planned(self, take_snapshot: Callable[[], Snapshot]) -> Snapshot:
        """Takes the snapshot and, if the plan does not fit it, makes a new plan with all ranks."""
        taken: list[Snapshot] = []
        before = self._plan
        whole = None if before is None else before.whole

        def report() -> tuple[TensorShard, ...]:
            taken.append(take_snapshot())
            return taken[0].split()[0].shards

        def divide(reports: Sequence[tuple[TensorShard, ...]]) -> list[tuple[Numbers, str]]:
            nonlocal whole
            if before is not None and [before.own] == reports:
                return [(before.written, before.token)]
            whole = plan_save(reports, self._target.holds)
            token = uuid.uuid4().hex[:8]
            return [(written, token) for written in whole.written]

        written, token = self._ranks.attempt_and_divide("reporting the tensors to save", report, divide)
        self._plan = _Plan(taken[0].split()[0].shards, written, token, whole)
        return taken[0]

    def _take(self, take_snapshot: Callable[[], Snapshot]) -> Snapshot | Exception:
        try:
            return take_snapshot()
        except Exception as error:
            return error

    def _make_staging(self, save: OneSave) -> None:
        final = self._target.directory / checkpoint_name(save.step)
        if final.exists():
            raise SaveFailedError(f"{final} exists already, and a checkpoint is never overwritten")
        os.mkdir(save.staging)  # noqa: PTH102 - the syscall by its name: fault tests wrap it
        save.is_begun = True

    def _prepare(
        self,
        save: OneSave,
        plan: _Plan,
        taken: Snapshot | Exception,
        progress: Progress,
        limit_seconds: float,
    ) -> _Stage:
        """Copies the tensors that may change after `begin`, and returns a function that stages the rest."""
        if isinstance(taken, Exception):
            return _fail_with(taken)
        snapshot = taken
        shared, of_rank = snapshot.split()
        others = [*shared.copied, *of_rank]
        if self.mode != "sync":
            others = [LocalShard(local.part, local.data.clone()) for local in others]
        # The step clock catches an optimizer step, torch's version counters any other in-place write. A write through
        # `.data` bumps no counter; the second digest in `job` finds it if it fell between copy and first digest.
        before = (progress.num_steps(), plain_write_counts(shared.parameters))
        # After the clones, which run on the training stream: the saves' stream waits for this event, and so for them.
        event = record_staging_event(snapshot.parts) if self.mode != "sync" else None

        def stage() -> tuple[WriteJob, Staged]:
            # Counted only here, because training would wait: a write of a callback before this belongs to the save, as
            # it does to the run, and a step of the optimizer is caught by the clock.
            states_before = plain_write_counts(shared.states)
            whole = snapshot.whole()
            if shared.shards != plan.own:  # compared here, where training does not wait
                raise ChangedPartsError("this rank holds other tensors than the save was planned for")
            copies = {local.part: local.data for local in others}
            live = {local.part: copies.get(local.part, local.data) for local in whole.parts}
            ours = self._ours(plan, live)
            is_sync = self.mode == "sync"
            staged = self._stager.stage_one_at_a_time(live, ours) if is_sync else self._stager.stage(live, ours, event)
            save.staged_bytes = staged.num_bytes
            job = self._order(save, plan, whole, progress, staged, limit_seconds)
            counts = (progress.num_steps(), plain_write_counts(shared.parameters))
            if counts != before or plain_write_counts(shared.states) != states_before:
                raise TornSnapshotError("training changed tensors during staging: an optimizer step came too early")
            return job, staged.data

        return stage

    def _order(
        self,
        save: OneSave,
        plan: _Plan,
        snapshot: Snapshot,
        progress: Progress,
        staged: StagedShards,
        limit_seconds: float,
    ) -> WriteJob:
        target, order = self._target, None
        if plan.whole is not None:
            order = CommitOrder(
                target.header(snapshot),
                plan.whole,
                target.retention,
                progress.num_updates,
                progress.moved(),
                target.events,
                target.scope,
            )
        return WriteJob(
            save.staging,
            self._ranks.rank,
            staged.placed,
            {
                part: staged.digests[part]
                for part in (*plan.own, *(part for part in staged.digests if part.kind == "state"))
            },
            snapshot.section,
            target.hash_algorithm,
            limit_seconds,
            order,
        )

    def wait_staged(self) -> None:
        """Waits until the save in flight needs no live tensors any more; returns at once if no save is in flight."""
        if self._save is not None:
            self._save.staged.wait()

    def poll(self) -> int:
        """Returns this rank's number about the save in flight, for a maximum over ranks; 0 if it reports nothing."""
        save = self._save
        if save is None or not self._ranks.is_first or not save.finished.is_set():
            return 0
        assert save.outcome is not None
        return save.number * _CODE_BASE + _CODES[save.outcome.kind]

    def settle(self, agreed: int) -> Outcome | None:
        """Returns the outcome of the save in flight if `agreed`, the maximum over the ranks' `poll`, is about it.

        Communicates only if the save failed. `agreed` must be the same on every rank.
        """
        save = self._save
        if save is None or agreed // _CODE_BASE != save.number:
            return None
        if agreed % _CODE_BASE == _CODES["committed"]:
            save.finished.wait()  # short: rank 0 commits only once this rank has left its receipt
            return self._settled(save, save.outcome if self._ranks.is_first else Outcome("committed"))
        return self.finish()

    def finish(self) -> Outcome | None:
        """Waits for the save in flight and returns its outcome; None if no save is in flight. Communicates.

        Raises:
            SaveFailedError: A rank did not answer.
        """
        save = self._save
        if save is None:
            return None
        if self._ranks.is_first:
            save.finished.wait()
        try:
            outcome = self._ranks.broadcast(save.outcome)
        except RuntimeError as error:
            raise SaveFailedError(
                f"how the save of step {save.step} ended is not known here: a rank did not answer: {error}"
            ) from error
        if outcome is not None and outcome.kind != "committed":
            save.given_up.set()  # releases a thread of this rank that waits for a staging directory that never appears
        save.finished.wait()
        return self._settled(save, outcome)

    def _settled(self, save: OneSave, outcome: Outcome | None) -> Outcome:
        assert outcome is not None
        self._save = None
        self.staged_bytes, self.settled_step = save.staged_bytes, save.step
        if outcome.kind == "committed":
            name = checkpoint_name(save.step)
            self._target.continue_from(Ancestor(name, outcome.manifest_hash), self._target.sequence + 1)
        else:
            self._plan = None
            if outcome.kind == "torn" and self.staging == "blocking":
                outcome = replace(outcome, kind="failed")  # not by an optimizer step: a retry would be torn, too
            elif outcome.kind == "torn":
                self.staging = "blocking"
        return outcome

    def settle_alone(self, wait_seconds: float) -> Outcome | None:
        """Waits for the save in flight up to a limit, and returns this rank's own outcome, if any. No communication.

        The method is for a rank that leaves the run and does not wait for the other ranks.

        Raises:
            SaveFailedError: The save did not end in time.
        """
        save = self._save
        if save is None:
            return None
        if not save.finished.wait(wait_seconds):
            raise SaveFailedError(f"the save of step {save.step} still runs")
        outcome = save.outcome
        return self._settled(save, outcome if self._ranks.is_first else Outcome("committed"))

    def close(self, wait_seconds: float) -> Outcome | None:
        """Waits for the save in flight up to a limit, frees all resources, and returns this rank's outcome, if any.

        No communication.
        """
        self._is_closed = True
        if self._worker is not None:
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
        # A thread that hangs in a write still reads the buffer: then only the end of the process frees it.
        if save is None or save.finished.is_set():
            self._stager.close()
        return None if save is None else save.outcome

    # ---- the save's thread, or in mode `sync` the training thread

    def _act_together(self, save: OneSave, stage: _Stage) -> Outcome:
        begin_together(self._ranks, lambda: self._make_staging(save))
        return perform_together(self._ranks, stage)

    def _act(self, save: OneSave, stage: _Stage, limit_seconds: float) -> Outcome:
        if self._worker is not None:
            # Lets the training thread leave its hook before this thread competes for the GIL.
            time.sleep(_YIELD_SECONDS)
        if self._ranks.is_first:
            self._make_staging(save)
        job, staged = stage()
        save.staged.set()  # before the wait for rank 0's directory, which training must not wait for
        save.wait_begun(limit_seconds)
        if self.mode == "sync":
            return perform(job, staged, lambda: False)
        if self._writer is None:
            return perform_niced(job, staged)
        return self._write_by(self._writer, job)

    def _write_by(self, writer: WriterProcess, job: WriteJob) -> Outcome:
        buffer = self._stager.buffer
        assert buffer is not None
        if not writer.is_alive:
            writer.kill()  # frees the resources that the object still holds
            warnings.warn("a writer process died between two saves; it is started again", stacklevel=2)
            writer = self._writer = WriterProcess()
        # Rank 0's writer names the missing ranks at its limit: the grace lets that answer arrive before it is killed.
        limit_seconds = job.time_limit_seconds + _ANSWER_GRACE_SECONDS * (job.commit is not None)
        try:
            return writer.perform(job, buffer, limit_seconds)
        except SaveFailedError:
            writer.kill()
            if not self._is_closed:
                self._writer = WriterProcess()
            raise


def _fail_with(error: Exception) -> _Stage:
    def fail() -> tuple[WriteJob, Staged]:
        raise error

    return fail


def save_blocking(target: SaveTarget, take_snapshot: Callable[[], Snapshot]) -> Path:
    """Saves a checkpoint outside of training and returns its path. Every rank calls this function. Communicates.

    Args:
        target: The directory, the ranks and the manifest's header; the commit is reported to it.
        take_snapshot: Returns this rank's snapshot.

    Raises:
        SaveFailedError: The save failed, on every rank alike. Older checkpoints are unchanged.
    """
    snapshot = target.ranks.attempt("reporting the tensors to save", take_snapshot)
    pipeline = SavePipeline(target, mode="sync")
    try:
        pipeline.begin(snapshot.step, lambda: snapshot, Progress(lambda: 0))
        outcome = pipeline.finish()
    finally:
        pipeline.close(0.0)
    assert outcome is not None
    if outcome.kind != "committed":
        raise error_from(outcome.kind, outcome.text)
    if outcome.warning is not None:
        warnings.warn(outcome.warning, RetentionWarning, stacklevel=2)
    return target.directory / checkpoint_name(snapshot.step)
