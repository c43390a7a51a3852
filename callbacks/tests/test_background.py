"""Saves in the background: real writer processes, stopped, killed and starved; torn and stale snapshots; leaks."""

import contextlib
import os
import resource
import shutil
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from plain_project import run_training, wait_until
from test_faults import KilledBefore

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.base.event_reader import read_events
from genesis_callbacks.base.events import EventLog
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import (
    Ranks,
    Retention,
    SaveTarget,
    Snapshot,
    find_latest,
    read_tensors,
    save_blocking,
    verify,
)
from genesis_callbacks.checkpoint.job import WriteJob, perform
from genesis_callbacks.checkpoint.one_save import Progress
from genesis_callbacks.checkpoint.pipeline import SavePipeline
from genesis_callbacks.checkpoint.stage import SharedBuffer, copy_into, place_shards
from genesis_callbacks.checkpoint.writer import serve
from genesis_callbacks.checkpoint.writer_process import WriterProcess
from genesis_callbacks.checkpoint.writer_start import Channel
from genesis_callbacks.testing import run_ranks


def find_writers() -> list[int]:
    """Returns the process ids of this process's writers: its children with a session of their own."""
    writers = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # threads and processes end meanwhile
            children = map(int, (task / "children").read_text().split())
            writers += [child for child in children if os.getsid(child) == child]
    return writers


class SignalWriter(Callback):
    """Sends signals to its rank's writer before steps: {number of the step that begins: signal}."""

    def __init__(self, rank: int, signals: dict[int, signal.Signals]) -> None:
        self.rank, self.signals = rank, signals

    def setup(self, trainer, pl_module, stage) -> None:
        """Lets a kill wait until the writer has been given the save: before that the save would start another one."""
        self.is_given, own = threading.Event(), WriterProcess.perform

        def perform_noted(*args, **kwargs):
            self.is_given.set()
            return own(*args, **kwargs)

        WriterProcess.perform = perform_noted  # in this rank's process, which ends with the training

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        number = self.signals.get(trainer.global_step + 1)
        if trainer.global_rank == self.rank and number is not None:
            (writer,) = find_writers()
            if number == signal.SIGKILL:
                assert self.is_given.wait(60.0)
            os.kill(writer, number)


def committed(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name not in (".lock", ".trash"))


# Stopped before the step that saves, so that the save is in flight when it is killed.
KILL = {2: signal.SIGSTOP, 3: signal.SIGKILL}


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [pytest.param("single", 0, marks=pytest.mark.slow), ("ddp", 0), pytest.param("fsdp2", 1, marks=pytest.mark.slow)],
)
def test_a_killed_writer_fails_its_save_loudly_and_is_started_again(tmp_path, strategy, rank):
    world_size = 1 if strategy == "single" else 2
    options = {"mode": "process", "every_n_steps": 2, "callbacks": (SignalWriter(rank, KILL),)}
    runs = run_training(world_size, tmp_path / "warn", strategy, 12, on_save_failure="warn", **options)
    assert [run["failed"] for run in runs] == [1] * world_size
    assert len(runs[0]["losses"]) == 12
    assert committed(tmp_path / "warn") == ["step-00000008", "step-00000010", "step-00000012"]


def has_died(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class KillIdleWriter(Callback):
    """Kills its rank's writer when it has nothing in hand: what it was given before is committed."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            (checkpoint,) = [one for one in trainer.callbacks if isinstance(one, AsyncProcessCheckpoint)]
            wait_until(lambda: (checkpoint.directory / f"step-{self.step:08d}/COMMITTED").exists())
            if trainer.global_rank == self.rank:
                (writer,) = find_writers()
                os.kill(writer, signal.SIGKILL)
                wait_until(lambda: has_died(writer))  # that takes a process a moment


@pytest.mark.parametrize(("strategy", "rank"), [("single", 0), pytest.param("ddp", 1, marks=pytest.mark.slow)])
def test_a_writer_that_dies_between_two_saves_costs_none(tmp_path, strategy, rank):
    world_size = 1 if strategy == "single" else 2
    options = {"mode": "process", "every_n_steps": 2, "callbacks": (KillIdleWriter(rank, 2),), "keep_last": None}
    runs = run_training(world_size, tmp_path, strategy, 6, **options)
    assert [run["failed"] for run in runs] == [0] * world_size
    assert committed(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_killed_writer_ends_training_by_policy(tmp_path):
    options = {"mode": "process", "every_n_steps": 2, "callbacks": (SignalWriter(1, KILL),)}
    with pytest.raises(AssertionError) as caught:
        run_training(2, tmp_path, "ddp", 12, **options)
    assert str(caught.value).count("SaveFailedError: rank 1: the writer process died: killed by SIGKILL") == 2
    assert committed(tmp_path) == []


@pytest.mark.parametrize(("strategy", "rank"), [("single", 0), ("ddp", 1)])
@pytest.mark.slow
def test_a_hung_writer_fails_its_save_after_the_limit(tmp_path, strategy, rank):
    world_size = 1 if strategy == "single" else 2
    hung = (SignalWriter(rank, {2: signal.SIGSTOP}),)
    options = {"mode": "process", "every_n_steps": 2, "save_timeout_seconds": 10.0, "callbacks": hung}
    runs = run_training(world_size, tmp_path, strategy, 8, on_save_failure="warn", keep_last=None, **options)
    assert [run["failed"] for run in runs] == [1] * world_size
    assert committed(tmp_path) == ["step-00000004", "step-00000006", "step-00000008"]


class SmallFiles(Callback):
    """Lets its rank's writer write no larger file than a limit before one step, and lifts that before another."""

    def __init__(self, first: int, last: int, rank: int) -> None:
        self.first, self.last, self.rank = first, last, rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        limits = {self.first: 2_000, self.last: resource.RLIM_INFINITY}
        if trainer.global_rank == self.rank and trainer.global_step + 1 in limits:
            limit = limits[trainer.global_step + 1]
            resource.prlimit(find_writers()[0], resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def test_a_full_disk_under_one_writer_fails_the_save_on_all_ranks(tmp_path):
    options = {"mode": "process", "every_n_steps": 2, "keep_last": None, "callbacks": (SmallFiles(1, 5, rank=1),)}
    runs = run_training(2, tmp_path, "ddp", 8, on_save_failure="warn", **options)
    (failed,) = {run["failed"] for run in runs}
    saved = committed(tmp_path)
    assert failed + len(saved) == 4  # that of step 4 may end before or after there is room again
    assert "step-00000002" not in saved
    assert {"step-00000006", "step-00000008"} <= set(saved)


class KillTrainer(Callback):
    """Kills all ranks, by SIGKILL, with a save in flight that their writers go on with as orphans."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_restart_waits_for_the_orphans_of_a_killed_trainer(tmp_path, strategy):
    world_size = 1 if strategy == "single" else 2
    straight = run_training(world_size, tmp_path / "straight", strategy, 6, save_at_end=False)
    options = {"mode": "process", "every_n_steps": 2}
    with pytest.raises(AssertionError, match="died without a word"):
        run_training(world_size, tmp_path / "run", strategy, 6, callbacks=(KillTrainer(4),), **options)
    resumed = run_training(world_size, tmp_path / "run", strategy, 6, ckpt_path="callback", **options)
    assert len(resumed[0]["losses"]) in (2, 4)  # whether the orphans had everything in hand
    for run, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in run["weights"].items())
    assert committed(tmp_path / "run") == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_save_that_is_due_while_one_runs_is_skipped_or_waited_for(tmp_path):
    # From step 2 on: training waits for a writer that still starts, also where it is stopped.
    stopped = (SignalWriter(0, {2: signal.SIGSTOP, 6: signal.SIGCONT}),)
    options = {"mode": "process", "every_n_steps": 1, "keep_last": None, "when_busy": "skip"}
    (run,) = run_training(1, tmp_path / "skip", "single", 8, callbacks=stopped, **options)
    assert run["skipped"] >= 3  # steps 3, 4 and 5, while the writer was stopped
    assert run["failed"] == 0
    assert {"step-00000001", "step-00000008"} <= set(committed(tmp_path / "skip"))
    assert {"step-00000003", "step-00000004", "step-00000005"}.isdisjoint(committed(tmp_path / "skip"))


def list_descriptors() -> dict[str, str]:
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            found[path.name] = str(path.readlink())
        except FileNotFoundError:  # the listing's own
            continue
    return found


def save_often(root: Path, mode: str) -> dict[str, int]:
    target = SaveTarget(root, Ranks(), retention=Retention(keep_last=2))
    live = torch.zeros(1000)
    before = len(list_descriptors())
    pipeline = SavePipeline(
        target,
        mode=mode,
        writer=WriterProcess() if mode == "process" else None,
        staging="overlapped",
        time_limit_seconds=60.0,
    )
    for step in range(1, 101):
        live += 1
        extra = torch.zeros(step)  # another tensor of this rank's own at each step
        parts = local_shards("model.x", live, "parameter") + local_shards("state.0.x", extra, "state")
        pipeline.begin(step, lambda step=step, parts=parts: Snapshot(step, {}, parts, {}), Progress(lambda: 0))
        assert pipeline.finish().kind == "committed"
    during = len(list_descriptors())
    pipeline.close(0.0)
    return {
        "during": during - before,
        "after": len(list_descriptors()) - before,
        "maps": Path("/proc/self/maps").read_text().count("genesis-staging"),
        "writers": len(find_writers()),
    }


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.slow
def test_a_hundred_saves_leak_nothing(tmp_path, mode):
    (tmp_path / "checkpoints").mkdir()
    (left,) = run_ranks(save_often, 1, tmp_path / "checkpoints", mode)
    assert left.pop("during") <= 3  # the buffer, which mmap holds once more, and the channel
    assert left == {"after": 0, "maps": 0, "writers": 0}
    assert committed(tmp_path) == ["step-00000099", "step-00000100"]


class ForkedProcess:
    """A forked child as `WriterProcess` handles its own."""

    def __init__(self, pid: int) -> None:
        self.pid, self.code = pid, None

    def wait(self, timeout=None):
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def poll(self):
        return self.code

    def kill(self):
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)


class DoomedWriter(WriterProcess):
    """A writer that is killed before its n-th file operation; forked, because an import costs seconds."""

    def __init__(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            KilledBefore(number)
            serve(Channel(theirs))
            os._exit(0)
        theirs.close()
        self._process, self._channel, self._is_ready, self._buffer = ForkedProcess(pid), Channel(ours), False, None


def kill_writer_before_every_operation(root: Path) -> list[str]:
    """Returns how the save of step 2 ended after a kill of its writer before operation 1, 2, ..."""
    endings: list[str] = []
    while True:
        directory = root / f"kill-{len(endings) + 1}"
        directory.mkdir(parents=True)
        run = root / f"run-{len(endings) + 1}"
        target = SaveTarget(directory, Ranks(), retention=Retention(keep_last=1), events=EventLog(run, 0))
        live = torch.full((300,), 1.0)
        parts = local_shards("model.a", live, "parameter")
        save_blocking(target, lambda parts=parts: Snapshot(1, {}, parts, {}))
        live.fill_(2.0)
        writer = DoomedWriter(len(endings) + 1)
        pipeline = SavePipeline(target, mode="process", writer=writer, staging="overlapped", time_limit_seconds=60.0)
        pipeline.begin(2, lambda parts=parts: Snapshot(2, {}, parts, {}), Progress(lambda: 0))
        outcome = pipeline.finish()
        was_killed = writer._process.code is not None
        pipeline.close(0.0)
        # What is said is so: committed means there and whole, failed means the old one and nothing else.
        latest = find_latest(directory)
        assert verify(latest, "deep").step == (2 if outcome.kind == "committed" else 1), outcome
        assert bool((read_tensors(latest)["model.a"] == verify(latest).step).all())
        # A commit has one event, and a line says that the writer is another one, whoever had to see to it.
        saved = [event.step for event in read_events(run) if event.kind == "saved"]
        assert saved == ([1, 2] if outcome.kind == "committed" else [1]), outcome
        if outcome.kind == "committed" and was_killed:
            assert (
                outcome.warning
                == "step-00000002 is committed, but its writer died before it answered; another one is started"
            )
        if outcome.kind == "failed":
            assert {path.name for path in directory.iterdir()} == {".trash", "step-00000001"}, outcome
        shutil.rmtree(directory)
        if not was_killed:
            return endings
        endings.append(outcome.kind)


def test_a_writer_killed_before_any_operation_never_lies(tmp_path):
    (endings,) = run_ranks(kill_writer_before_every_operation, 1, tmp_path)
    assert len(endings) > 20
    assert set(endings) == {"failed", "committed"}
    assert endings == sorted(endings, reverse=True)  # failed until it is committed, and never again


def begin_and_finish(pipeline, step, parts, progress):
    pipeline.begin(step, lambda: Snapshot(step, {}, parts, {}), progress)
    return pipeline.finish()


def test_a_step_during_staging_is_torn_then_blocking_then_refused(tmp_path):
    parts = local_shards("model.x", torch.ones(5), "parameter")
    pipeline = SavePipeline(SaveTarget(tmp_path, Ranks()), mode="thread", staging="overlapped", time_limit_seconds=60.0)
    steps = iter(range(10))
    outcome = begin_and_finish(pipeline, 1, parts, Progress(lambda: next(steps)))
    assert (outcome.kind, pipeline.staging) == ("torn", "blocking")
    assert "an optimizer step came too early" in outcome.text
    assert begin_and_finish(pipeline, 1, parts, Progress(lambda: next(steps))).kind == "failed"
    assert begin_and_finish(pipeline, 1, parts, Progress(lambda: 0)).kind == "committed"
    assert {path.name for path in tmp_path.iterdir()} == {".trash", "step-00000001"}


def test_staged_bytes_that_are_not_the_live_ones_are_torn(tmp_path):
    (local,) = local_shards("model.x", torch.arange(9.0), "parameter")
    placed, num_bytes = place_shards([local.part])
    buffer = SharedBuffer(num_bytes)
    copy_into(buffer.view(placed[0]), local.data)
    buffer.view(placed[0])[4] += 1
    (tmp_path / "step-00000001.staging-a").mkdir()
    job = WriteJob(tmp_path / "step-00000001.staging-a", 0, placed, {local.part: 7}, {}, "blake3", 5.0, None)
    outcome = perform(job, buffer, lambda: False)
    assert (outcome.kind, outcome.text[:8]) == ("torn", "model.x:")
    buffer.close()


def test_a_stale_snapshot_is_refused(tmp_path):
    live, other, counter = torch.ones(5), torch.ones(5), torch.tensor(1.0)
    parts = local_shards("model.x", live, "parameter") + local_shards("model.y", other, "parameter")
    parts += local_shards("optimizer.0.x.step", counter, "optimizer")
    pipeline = SavePipeline(SaveTarget(tmp_path, Ranks()), mode="thread", staging="overlapped", time_limit_seconds=60.0)
    moved = Progress(lambda: 0, num_updates=1, moved=lambda: frozenset({"model.x"}))
    assert begin_and_finish(pipeline, 1, parts, moved).kind == "committed"
    outcome = begin_and_finish(pipeline, 2, parts, moved)
    assert outcome.kind == "failed"
    assert "a stale snapshot: no parameter and no optimizer state has changed since step-00000001" in outcome.text
    other += 1
    outcome = begin_and_finish(pipeline, 2, parts, moved)
    assert "model.x and its optimizer state have not changed" in outcome.text
    assert begin_and_finish(pipeline, 2, parts, Progress(lambda: 0)).kind == "committed"  # no update happened
    counter += 1  # an update smaller than half a unit in the last place moves the state alone
    assert begin_and_finish(pipeline, 3, parts, moved).kind == "committed"


class OnLostDevice(torch.Tensor):
    """A tensor of a device that has failed."""

    def clone(self):
        raise RuntimeError("device-side assert triggered")


def test_a_device_that_fails_where_a_save_begins_fails_the_save_and_keeps_nobody_waiting(tmp_path):
    (local,) = local_shards("model.x", torch.ones(5), "buffer")
    lost = [replace(local, data=local.data.as_subclass(OnLostDevice))]
    pipeline = SavePipeline(SaveTarget(tmp_path, Ranks()), mode="thread")
    outcome = begin_and_finish(pipeline, 1, lost, Progress(lambda: 0))
    assert (outcome.kind, outcome.text) == ("failed", "RuntimeError: device-side assert triggered")
    pipeline.close(5.0)


def test_the_memory_of_a_writer_is_what_the_kernel_says_it_holds(tmp_path):
    pipeline = SavePipeline(SaveTarget(tmp_path, Ranks()), mode="process", writer=WriterProcess())
    parts = local_shards("model.x", torch.zeros(8_000_000), "parameter")
    assert begin_and_finish(pipeline, 1, parts, Progress(lambda: 0)).kind == "committed"
    lines = Path(f"/proc/{pipeline._writer._process.pid}/status").read_text().splitlines()
    held = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    assert pipeline.writer_bytes == pytest.approx(held["RssAnon:"] + held["RssFile:"], rel=0.05)
    assert held["RssShmem:"] >= 32_000_000  # the copies, which are the trainer's
    pipeline.close(0.0)
