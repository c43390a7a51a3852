"""Drills: faults of disks, writers and ranks, with real processes, signals and mounts; each ends named and in time."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from file_faults import FaultyWriter, OperationFault
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from plain_project import build_strategy, run_training, train, wait_until
from test_background import SignalWriter, committed, find_writers

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import (
    CheckpointError,
    Ranks,
    Retention,
    SaveFailedError,
    SaveTarget,
    Snapshot,
    find_latest,
    one_save,
    read_tensors,
    save_blocking,
    verify,
)
from genesis_callbacks.checkpoint.job import WriteJob
from genesis_callbacks.checkpoint.lineage import DirectoryLock, remove_abandoned, wait_for_orphans
from genesis_callbacks.checkpoint.one_save import Progress
from genesis_callbacks.checkpoint.pipeline import SavePipeline
from genesis_callbacks.checkpoint.stage import SharedBuffer, place_shards
from genesis_callbacks.checkpoint.writer_process import WriterProcess
from genesis_callbacks.testing import run_ranks

WRITER_FAULTS = Path(__file__).parent / "writer_faults"
NO_FAULT = 1 << 30


# ---- a fault at every operation


def snapshot(step: int, live: dict[str, torch.Tensor]) -> Snapshot:
    return Snapshot(step, {}, [part for name in live for part in local_shards(name, live[name], "parameter")], {})


def filled(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((300,), value) for name in ("model.a", "model.b")}


def save_with_fault(target: SaveTarget, mode: str, act: str, number: int) -> tuple[str, bool]:
    """Saves step 2 with a fault at this rank's n-th file operation; returns (outcome, whether the fault happened)."""
    live = filled(2.0)
    ours = contextlib.nullcontext() if mode == "process" else OperationFault(number, act)
    writer = FaultyWriter(number, act) if mode == "process" else None
    pipeline = SavePipeline(target, mode=mode, writer=writer, staging="overlapped", time_limit_seconds=20.0)
    with ours as fault:
        pipeline.begin(2, lambda: snapshot(2, live), Progress(lambda: 0))
        outcome = pipeline.finish()
    pipeline.close(0.0)
    return f"{outcome.kind}: {outcome.text}", fault.is_met if writer is None else writer.was_met()


def meet_every_operation(root: Path, mode: str, act: str) -> list[str]:
    """Returns how the save of step 2 ended after a fault of the last rank at its operation 1, 2, ..."""
    one_save._NOTE_WAIT_SECONDS = 0.1  # the staging directory is there before a writer can meet a fault
    ranks = Ranks()
    is_faulty = ranks.rank == ranks.world_size - 1
    first = root / "first"
    if ranks.is_first:
        first.mkdir()
    ranks.gather(None)
    save_blocking(SaveTarget(first, ranks), lambda: snapshot(1, filled(1.0)))
    endings: list[str] = []
    while True:
        number = len(endings) + 1 if is_faulty else NO_FAULT
        directory = root / f"operation-{len(endings) + 1}"
        if ranks.is_first:
            shutil.copytree(first, directory)
        ranks.gather(None)
        target = SaveTarget(directory, ranks, retention=Retention(keep_last=1))
        target.continue_from(None, 1)
        outcome, is_met = save_with_fault(target, mode, act, number)
        (told,) = set(ranks.gather(outcome))
        if ranks.is_first:
            check_what_is_told(directory, told, is_dead=act == "dead")
        ranks.gather(None)
        save_blocking(target, lambda: snapshot(3, filled(3.0)))  # the next save is as any other
        if ranks.is_first:
            assert verify(find_latest(directory), "deep").step == 3
            shutil.rmtree(directory)
        if not any(ranks.gather(is_met)):
            return endings
        endings.append(told)


def check_what_is_told(directory: Path, told: str, *, is_dead: bool) -> None:
    """Committed means there and whole, failed means the one before, whole, and nothing else."""
    latest = find_latest(directory)
    step = verify(latest, "deep").step
    assert all(bool((tensor == step).all()) for tensor in read_tensors(latest).values())
    if told.startswith("committed"):
        assert step == 2
    elif not is_dead:  # on a dead disk nothing can be taken back, nor cleared away
        assert step == 1, told
        left = {path.name for path in directory.iterdir() if path.name != ".trash" and any(path.iterdir())}
        assert left == {latest.name}, told


@pytest.mark.filterwarnings("ignore::genesis_callbacks.checkpoint.RetentionWarning")
@pytest.mark.parametrize(
    ("world_size", "mode", "act"),
    [
        (1, "sync", "full"),
        (2, "process", "kill"),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.each])
            for case in (
                *((1, "sync", "dead"), (1, "thread", "EIO"), (1, "process", "full")),
                *((2, "sync", "EIO"), (2, "process", "EIO")),
            )
        ),
        # Each two of these values are together above.
        *(pytest.param(1, mode, "EIO", marks=pytest.mark.slow) for mode in ("sync", "process")),
    ],
)
def test_a_fault_at_any_operation_of_one_rank_is_told_as_it_is(memory_path, world_size, mode, act):
    endings, *others = run_ranks(meet_every_operation, world_size, memory_path, mode, act)
    assert all(other == endings for other in others)
    reason = {"kill": "killed by SIGKILL", "full": "No space left on device"}.get(act, "Input/output error")
    failed = [told for told in endings if told.startswith("failed")]
    assert len(failed) >= (15 if world_size == 1 else 3)
    assert all(reason in told and (world_size == 1 or "rank 1: " in told) for told in failed)


def begin_as_trainer(directory: Path, number: int, tell: int) -> None:
    """Saves through a writer that stops before its n-th operation, tells its process id, and waits to be killed."""
    target = SaveTarget(directory, Ranks(), retention=Retention(keep_last=1))
    target.continue_from(None, 1)
    writer = FaultyWriter(number, "stop")
    pipeline = SavePipeline(target, mode="process", writer=writer, staging="overlapped", time_limit_seconds=60.0)
    pipeline.begin(2, lambda: snapshot(2, filled(2.0)), Progress(lambda: 0))
    while True:
        pid, status = os.waitpid(writer._process.pid, os.WUNTRACED | os.WNOHANG)
        if pid and os.WIFSTOPPED(status):
            os.write(tell, f"{pid} ".encode())
            signal.pause()
        if pipeline.poll():
            os.write(tell, b"0 ")
            signal.pause()
        time.sleep(0.001)


def wake_orphan_at_every_operation(root: Path) -> list[int]:
    """Returns which step a restart found while an orphaned writer slept before its operation 1, 2, ..."""
    adopt = 36  # PR_SET_CHILD_SUBREAPER: orphans become ours, so that their end can be waited for
    assert ctypes.CDLL(None).prctl(adopt, 1, 0, 0, 0) == 0
    first = root / "first"
    first.mkdir()
    save_blocking(SaveTarget(first, Ranks()), lambda: snapshot(1, filled(1.0)))
    found: list[int] = []
    while True:
        directory = root / f"operation-{len(found) + 1}"
        shutil.copytree(first, directory)
        told, tell = os.pipe()
        trainer = os.fork()
        if trainer == 0:
            try:
                begin_as_trainer(directory, len(found) + 1, tell)
            finally:
                os._exit(0)
        os.close(tell)
        orphan = int(os.read(told, 20))
        os.close(told)
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        if orphan == 0:
            return found
        # A restart, which does not wait for long.
        lock = DirectoryLock(directory)
        wait_for_orphans(directory, 0.01)
        remove_abandoned(directory)
        step = verify(find_latest(directory), "deep").step
        target = SaveTarget(directory, Ranks())
        target.continue_from(None, step)
        save_blocking(target, lambda step=step: snapshot(step + 1, filled(10.0)))
        os.kill(orphan, signal.SIGCONT)
        os.waitpid(orphan, 0)
        latest = find_latest(directory)
        assert verify(latest, "deep").step == step + 1
        assert all(bool((tensor == 10.0).all()) for tensor in read_tensors(latest).values())
        names = {path.name for path in directory.iterdir()} - {".lock", ".trash"}
        assert {f"step-{step + 1:08d}"} <= names <= {f"step-{number:08d}" for number in range(1, step + 2)}
        lock.release()
        shutil.rmtree(directory)
        found.append(step)


@pytest.mark.slow
def test_an_orphan_that_wakes_after_a_restart_changes_nothing(memory_path):
    (found,) = run_ranks(wake_orphan_at_every_operation, 1, memory_path)
    assert found == sorted(found)
    assert found.count(1) > 15


# ---- disks


def listen(arguments: tuple, keywords: dict) -> dict[str, object]:
    """Trains and returns what `train` does, with the warnings and the collectives of the training group."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(*arguments, **keywords)
    run["warnings"] = [str(one.message) for one in caught if "the save at step" in str(one.message)]
    run["collectives"] = dist.group.WORLD._get_sequence_number_for_group()
    return run


class BadDisk(Callback):
    """Gives the writers of ranks their faults: {rank: what `writer_faults/sitecustomize.py` reads}."""

    def __init__(self, faults: dict[int, list[tuple[str, str, str]]]) -> None:
        self.faults = faults

    def setup(self, trainer, pl_module, stage) -> None:
        os.environ["WRITER_FAULTS"] = json.dumps(self.faults.get(trainer.global_rank, []))
        os.environ["PYTHONPATH"] = os.pathsep.join((str(WRITER_FAULTS), os.environ.get("PYTHONPATH", "")))


@pytest.mark.usefixtures("started_writers")
@pytest.mark.slow
def test_bad_and_hung_disks_under_writers_fail_their_saves_by_name_and_training_ends(tmp_path):
    faults = {
        0: [("1.staging-.*/manifest.json", "write", "ENOSPC"), ("2.staging-.*/COMMITTED", "open", "EIO")],
        1: [("4.staging-.*/__1_0.distcp", "write", "EIO"), ("5.staging-.*/__1_0.distcp", "fsync", "hang")],
    }
    options = {"mode": "process", "every_n_steps": 1, "save_timeout_seconds": 5.0, "on_save_failure": "warn"}
    options |= {"save_at_end": False, "callbacks": (BadDisk(faults),)}
    for run in run_ranks(listen, 2, (tmp_path, "ddp", 5), options):
        full, marker, shard, hung = run["warnings"]
        assert "the save at step 1 failed" in full
        assert "No space left on device" in full
        assert "the save at step 2 failed" in marker
        assert "Input/output error" in marker
        assert "the save at step 4 failed, the last good one is step-00000003: rank 1: OSError: [Errno 5]" in shard
        assert "rank 1: the writer process did not answer: it was killed after 5 s" in hung
        assert run["failed"] == 4
        assert len(run["losses"]) == 5
    assert committed(tmp_path) == ["step-00000003"]
    assert verify(find_latest(tmp_path), "deep").step == 3


MOUNT_NAMESPACE = 0x20000  # CLONE_NEWNS


def mount(*arguments: str) -> bool:
    """Mounts something that only this thread and what it starts can see; False where that is not allowed."""
    if ctypes.CDLL(None).unshare(MOUNT_NAMESPACE) != 0:
        return False
    commands = (["mount", "--make-rprivate", "/"], ["mount", *arguments])
    return all(subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0 for command in commands)


class Ballast(Callback):
    """Fills the disk that a directory is on before one step, and makes room before another."""

    def __init__(self, directory: Path, first: int, last: int) -> None:
        self.path, self.first, self.last = directory / "ballast", first, last

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        pipeline = trainer.checkpoint_callback._session.saves.pipeline
        if pipeline is not None and pipeline.step_in_flight is not None:
            wait_until(lambda: pipeline.poll() != 0)  # each save has the disk as it was at its step
        if trainer.global_step + 1 == self.first:
            with self.path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1024))
        if trainer.global_step + 1 == self.last:
            self.path.unlink()


def train_on_a_small_disk(root: Path, mode: str) -> dict[str, object] | None:
    if not mount("-t", "tmpfs", "-o", "size=512k", "none", str(root)):
        return None
    options = {"mode": mode, "every_n_steps": 2, "on_save_failure": "warn", "callbacks": (Ballast(root, 3, 5),)}
    run = listen((root, "single", 6), options)
    return {**run, "committed": committed(root), "verified": verify(find_latest(root), "deep").step}


@pytest.mark.parametrize(
    "mode", ["process", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("sync", "thread"))]
)
def test_a_really_full_disk_fails_the_save_and_the_next_one_succeeds(tmp_path, mode):
    (run,) = run_ranks(train_on_a_small_disk, 1, tmp_path, mode)
    if run is None:
        pytest.skip("mounting is not allowed here")
    (text,) = run["warnings"]
    assert "the save at step 4 failed, the last good one is step-00000002" in text
    assert "No space left on device" in text
    assert (run["committed"], run["verified"]) == (["step-00000002", "step-00000006"], 6)


def train_on_a_read_only_disk(root: Path) -> str:
    if not mount("--bind", str(root), str(root)) or not mount("-o", "remount,bind,ro", str(root)):
        return "not allowed"
    with pytest.raises(CheckpointError) as caught:
        train(root / "run", "single", 2, mode="sync")
    return str(caught.value)


def test_a_directory_that_cannot_be_written_is_refused_by_name(tmp_path):
    (text,) = run_ranks(train_on_a_read_only_disk, 1, tmp_path)
    if text == "not allowed":
        pytest.skip("mounting is not allowed here")
    assert "taking the checkpoint directory: OSError: [Errno 30] Read-only file system" in text
    assert str(tmp_path / "run") in text


def test_a_directory_below_a_file_is_refused_by_name_on_all_ranks(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AssertionError) as caught:
        run_training(2, tmp_path / "file" / "run", "ddp", 2, mode="process")
    assert str(caught.value).count("CheckpointError: taking the checkpoint directory: rank 0: NotADirectoryError") == 2


def hang_on_a_frozen_disk(root: Path) -> str | None:
    """Returns what is said of a writer that cannot even be killed, on a real file system that stands still."""
    image, disk = root / "image", root / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    if subprocess.run(["mkfs.ext4", "-q", str(image)], stderr=subprocess.DEVNULL).returncode:
        return None
    if not mount("-o", "loop", str(image), str(disk)):
        return None
    parts = local_shards("model.x", torch.ones(9), "parameter")
    placed, num_bytes = place_shards([local.part for local in parts])
    staging = disk / "step-00000001.staging-a"
    staging.mkdir()
    buffer = SharedBuffer(num_bytes)
    writer = WriterProcess()
    writer.wait_ready()
    digests = {local.part: 0 for local in parts}  # of zeros, as the buffer is
    subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
    try:
        with pytest.raises(SaveFailedError) as caught:
            writer.perform(WriteJob(staging, 1, placed, digests, {}, "blake3", 60.0, None), buffer, 0.5)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)
    writer.close()
    assert not writer.is_alive
    buffer.close()
    return str(caught.value)


@pytest.mark.slow
def test_a_writer_that_hangs_in_the_kernel_is_left_behind_in_time(tmp_path):
    begin_seconds = time.monotonic()
    (text,) = run_ranks(hang_on_a_frozen_disk, 1, tmp_path)
    if text is None:
        pytest.skip("mounting is not allowed here")
    assert text == (
        "the writer process did not answer: it was killed after 0.5 s, but still hangs: "
        "its file system does not respond"
    )
    assert time.monotonic() - begin_seconds < 60


# ---- signals and ranks


class SignalGroup(Callback):
    """Ends a run as a scheduler does: with a save in flight it sends SIGTERM to every process of it.

    The ranks are in one process group. The writers, which are not, get the signal by themselves: a scheduler knows
    them by their control group.
    """

    def setup(self, trainer, pl_module, stage) -> None:
        if trainer.global_rank == 0:
            os.setpgid(0, 0)
        leader = [os.getpid()]
        dist.broadcast_object_list(leader, src=0)
        os.setpgid(0, leader[0])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 1:
            (self.writer,) = find_writers()
            os.kill(self.writer, signal.SIGSTOP)
        if trainer.global_step == 2:
            os.kill(self.writer, signal.SIGTERM)
            dist.barrier()
            if trainer.global_rank == 0:
                os.killpg(0, signal.SIGTERM)
            os.kill(self.writer, signal.SIGCONT)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        assert trainer.global_step < 2 or find_writers() == [self.writer]


@pytest.mark.usefixtures("started_writers")
@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
@pytest.mark.slow
def test_a_signal_to_all_processes_in_mid_save_loses_nothing(tmp_path, strategy):
    world_size = 1 if strategy == "single" else 2
    straight = run_training(world_size, tmp_path / "straight", strategy, 6, save_at_end=False, mode="sync")
    options = {"mode": "process", "every_n_steps": 2}
    runs = run_training(world_size, tmp_path / "run", strategy, 6, callbacks=(SignalGroup(),), **options)
    stopped_after = 3 if strategy == "single" else 4
    assert [run["signal"] for run in runs] == [signal.SIGTERM] * world_size
    assert [run["failed"] for run in runs] == [0] * world_size
    assert committed(tmp_path / "run") == ["step-00000002", f"step-{stopped_after:08d}"]
    resumed = run_training(world_size, tmp_path / "run", strategy, 6, ckpt_path="latest", mode="sync")
    for run, other in zip(straight, resumed, strict=True):
        assert run["losses"][stopped_after:] == other["losses"]
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in run["weights"].items())


class SignalAtStart(Callback):
    """Sends a signal to a rank's writer while that still imports."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number

    def on_fit_start(self, trainer, pl_module) -> None:
        if trainer.global_rank == self.rank:
            os.kill(trainer.checkpoint_callback._session._writer._process.pid, self.number)


@pytest.mark.usefixtures("started_writers")
def test_a_writer_that_starts_is_deaf_to_sigterm(tmp_path):
    (run,) = run_training(1, tmp_path, "single", 2, mode="process", callbacks=(SignalAtStart(0, signal.SIGTERM),))
    assert run["failed"] == 0
    assert committed(tmp_path) == ["step-00000002"]


@pytest.mark.usefixtures("started_writers")
def test_a_writer_that_does_not_start_ends_the_run_by_name_before_the_first_save(tmp_path):
    with pytest.raises(AssertionError) as caught:
        run_training(2, tmp_path, "ddp", 2, mode="process", callbacks=(SignalAtStart(1, signal.SIGKILL),))
    reason = "SaveFailedError: starting the writer: rank 1: the writer process ended at its start: killed by SIGKILL"
    assert str(caught.value).count(reason) == 2
    assert committed(tmp_path) == []


class LookForWriter(Callback):
    """Notes at each step whether the run has waited for the writer."""

    def __init__(self) -> None:
        self.waited: list[bool] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.waited.append(trainer.checkpoint_callback._session.saves.pipeline._writer._is_ready)
        assert self.waited == [step > 0 for step in range(len(self.waited))]


def test_the_first_window_is_trained_while_the_writer_imports(tmp_path):
    (run,) = run_training(1, tmp_path, "single", 2, mode="process", callbacks=(LookForWriter(),))
    assert run["failed"] == 0
    assert committed(tmp_path) == ["step-00000002"]


class RaiseOnce(Callback):
    """Raises on one rank before a step, with the save of the step before in flight."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise RuntimeError("one rank only")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all_and_the_run_goes_on(tmp_path, strategy):
    straight = run_training(2, tmp_path / "straight", strategy, 4, save_at_end=False, mode="sync")
    options = {"mode": "process", "every_n_steps": 2}
    with pytest.raises(AssertionError) as caught:
        run_training(2, tmp_path / "run", strategy, 4, callbacks=(RaiseOnce(),), **options)
    assert "rank 1: Traceback" in str(caught.value)
    assert "RuntimeError: one rank only" in str(caught.value)
    assert "did not answer" not in str(caught.value)
    resumed = run_training(2, tmp_path / "run", strategy, 4, ckpt_path="latest", mode="sync")
    assert resumed[0]["losses"] == straight[0]["losses"][-len(resumed[0]["losses"]) :]
    for run, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in run["weights"].items())


class SlowRank(Callback):
    """Keeps one rank behind the other."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.slow
def test_saves_add_no_collective_to_the_training_group_whoever_is_slow_or_stopped(tmp_path, strategy):
    plain = run_ranks(listen, 2, (tmp_path / "plain", strategy, 6), {"save_at_end": False, "mode": "sync"})
    stopped = SignalWriter(1, {2: signal.SIGSTOP, 4: signal.SIGCONT})
    options = {"mode": "process", "every_n_steps": 1, "when_busy": "skip", "callbacks": (stopped, SlowRank())}
    saved = run_ranks(listen, 2, (tmp_path / "run", strategy, 6), options)
    assert [run["collectives"] for run in saved] == [run["collectives"] for run in plain]
    assert plain[0]["collectives"] > 0
    assert saved[0]["skipped"] > 0
    assert {run["training_collectives"] for run in saved} == {(0, True, 6)}
    assert verify(find_latest(tmp_path / "run"), "deep").step == 6


def test_a_buffer_that_is_used_again_holds_each_save_s_own_values(tmp_path):
    run_training(1, tmp_path / "straight", "single", 6, every_n_steps=1, keep_last=None, mode="sync")
    # Training waits for a writer that has not started, and has seen that it has before the second step.
    stopped = (SignalWriter(0, {2: signal.SIGSTOP, 4: signal.SIGCONT}),)
    options = {"mode": "process", "every_n_steps": 1, "keep_last": None, "when_busy": "skip"}
    run_training(1, tmp_path / "run", "single", 6, callbacks=stopped, **options)
    names = committed(tmp_path / "run")
    assert {"step-00000001", "step-00000006"} <= set(names)
    for name in names:
        tensors = read_tensors(tmp_path / "run/checkpoints" / name)
        expected = read_tensors(tmp_path / "straight/checkpoints" / name)
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in expected.items() if not key.startswith("state"))


def test_an_optimizer_that_lost_its_state_is_not_saved(tmp_path):
    target = SaveTarget(tmp_path, Ranks())
    pipeline = SavePipeline(target, mode="thread", staging="overlapped", time_limit_seconds=60.0)
    weight, moment = torch.ones(5), torch.ones(5)
    model = local_shards("model.x", weight, "parameter")
    progress = Progress(lambda: 0, num_updates=1, moved=lambda: frozenset({"model.x"}))
    parts = model + local_shards("optimizer.0.x.exp_avg", moment, "optimizer")
    pipeline.begin(1, lambda: Snapshot(1, {}, parts, {}), progress)
    assert pipeline.finish().kind == "committed"
    weight += 1
    pipeline.begin(2, lambda: Snapshot(2, {}, model, {}), progress)
    outcome = pipeline.finish()
    assert outcome.text == "optimizer 0 has been emptied: step-00000001 has its state, but this save would have none"
    assert find_latest(tmp_path).name == "step-00000001"
    pipeline.close(0.0)


class SignalInValidation(BoringModel):
    """Sends SIGTERM to its last rank in the middle of validation; validates after every second step."""

    validated: tuple[int, ...] = ()

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.validated += (self.trainer.global_step,)

    def validation_step(self, batch, batch_idx):
        is_last_rank = self.trainer.global_rank == self.trainer.world_size - 1
        if self.trainer.global_step == 2 and batch_idx == 1 and is_last_rank:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_with_validation(run_dir: Path, strategy: str, ckpt_path: str | None = None) -> tuple[int | None, int, tuple]:
    world_size = dist.get_world_size()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, mode="thread")
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=build_strategy(strategy, world_size),
        max_steps=20 if ckpt_path is None else 5,
        val_check_interval=2,
        limit_val_batches=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint],
        default_root_dir=run_dir,
    )
    module = SignalInValidation()
    trainer.fit(module, ckpt_path=ckpt_path)
    return checkpoint.stopped_by_signal, trainer.global_step, module.validated


@pytest.mark.parametrize(
    ("strategy", "world_size", "stopped_after"), [("ddp", 2, 4), pytest.param("single", 1, 3, marks=pytest.mark.slow)]
)
def test_a_signal_in_validation_saves_at_the_next_step_and_stops_all(tmp_path, strategy, world_size, stopped_after):
    stops = run_ranks(fit_with_validation, world_size, tmp_path, strategy)
    # What ends by a signal does not validate once more: the signal's sender waits, or kills after a while.
    assert stops == [(signal.SIGTERM, stopped_after, (2,))] * world_size
    assert committed(tmp_path) == [f"step-{stopped_after:08d}"]
    resumed = run_ranks(fit_with_validation, world_size, tmp_path, strategy, "latest")
    assert resumed == [(None, 5, (4,))] * world_size


# ---- what is told late, or never


def fail_at_once_on_rank_0(directory: Path, limit_seconds: float) -> float:
    """Returns how long a save takes to be over on this rank, which rank 0 gives up at its first file operation."""
    ranks = Ranks()
    target = SaveTarget(directory, ranks)
    writer = FaultyWriter(1 if ranks.is_first else NO_FAULT, "EIO")
    pipeline = SavePipeline(
        target, mode="process", writer=writer, staging="overlapped", time_limit_seconds=limit_seconds
    )
    if ranks.rank == 1:
        writer_pid = writer._process.pid
        os.kill(writer_pid, signal.SIGSTOP)  # it comes to the job when rank 0 has given up already
    pipeline.begin(1, lambda: snapshot(1, filled(1.0)), Progress(lambda: 0))
    if ranks.is_first:
        wait_until(lambda: pipeline.poll() != 0)
    ranks.gather(None)
    if ranks.rank == 1:
        os.kill(writer_pid, signal.SIGCONT)
    begin_seconds = time.monotonic()
    outcome = pipeline.finish()
    assert outcome.kind == "failed"
    assert "Input/output error" in outcome.text
    seconds = time.monotonic() - begin_seconds
    pipeline.close(0.0)
    return seconds


def test_a_save_that_rank_0_gives_up_is_over_on_all_ranks_at_once(tmp_path):
    seconds = run_ranks(fail_at_once_on_rank_0, 2, tmp_path, 60.0)
    assert max(seconds) < 30


def save_on_a_dying_disk(root: Path) -> list[str]:
    """Returns how the save of step 2 in a thread ended on a disk that is dead from its operation 1, 2, ... on."""
    endings: list[str] = []
    while True:
        directory = root / f"operation-{len(endings) + 1}"
        directory.mkdir()
        pipeline = SavePipeline(
            SaveTarget(directory, Ranks()), mode="thread", staging="blocking", time_limit_seconds=5.0
        )
        with OperationFault(len(endings) + 1, "dead") as fault:
            pipeline.begin(2, lambda: snapshot(2, filled(2.0)), Progress(lambda: 0))
            save = pipeline._save
            if not save.finished.wait(60.0):
                return [*endings, "never told"]
        outcome = pipeline.finish()
        pipeline.close(0.0)
        if not fault.is_met:
            return endings
        endings.append(outcome.kind)


def test_a_save_on_a_dying_disk_is_always_told(memory_path):
    (endings,) = run_ranks(save_on_a_dying_disk, 1, memory_path)
    assert "never told" not in endings
