"""Only the trainer holds its run's directory: a restart right after its SIGKILL goes on, whatever it has forked."""

import fcntl
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_project
import pytest
import torch
from lightning.pytorch import Callback
from plain_project import run_training, train
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks._rank_watch import RankWatch
from genesis_callbacks.base.checkpoint_errors import DirectoryInUseError
from genesis_callbacks.base.locks import PrivateDescriptor
from genesis_callbacks.checkpoint import CheckpointError, SaveFailedError, writer_process
from genesis_callbacks.checkpoint.job import WriteJob, hold_staging
from genesis_callbacks.checkpoint.lineage import DirectoryLock, check_not_in_use, find_holder, wait_for_orphans
from genesis_callbacks.checkpoint.stage import SharedBuffer
from genesis_callbacks.checkpoint.writer_start import READY, Channel
from genesis_callbacks.testing import run_ranks

STEPS = 8
KILLED_AFTER = 5


def leave_a_child_behind(hold: Callable[[], object]) -> int:
    """Kills a process that holds something and has forked a child since; returns the child's id."""
    told, tell = os.pipe()
    owner = os.fork()
    if owner == 0:
        held = hold()
        child = os.fork()
        if child == 0:
            os.write(tell, f"{os.getpid()}".encode())
            signal.pause()
        os.waitpid(child, 0)
        del held
        os._exit(0)
    child = int(os.read(told, 20))
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    return child


def check_that_nothing_is_held(root: Path) -> None:
    staging = root / "step-00000001.staging-0"
    staging.mkdir()

    def enter() -> object:
        context = hold_staging(staging)
        context.__enter__()
        return context

    children = []
    try:
        children.append(leave_a_child_behind(lambda: DirectoryLock(root)))
        lock = DirectoryLock(root)
        lock.release()
        children.append(leave_a_child_behind(enter))
        assert wait_for_orphans(root, 0.0) == []
        watch = RankWatch(root, 0, 2, 1.0)
        children.append(leave_a_child_behind(lambda: RankWatch(root, 1, 2, 1.0)))
        assert "rank 1 (process" in (watch.describe_lost() or "")
        watch.stop()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_holds_none_of_its_parents_locks(tmp_path):
    run_ranks(check_that_nothing_is_held, 1, tmp_path)


def test_another_process_and_the_same_one_are_refused_while_the_owner_lives(tmp_path):
    lock = DirectoryLock(tmp_path)
    with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()}"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a FIFO"), (os.mkdir, "a directory")])
@pytest.mark.parametrize("look", [DirectoryLock, check_not_in_use, find_holder])
def test_a_lock_that_is_no_file_is_refused_without_waiting(tmp_path, make, kind, look):
    make(tmp_path / ".lock")
    with pytest.raises(CheckpointError, match=rf"\.lock is {kind}, but must be the lock file of a run: remove it"):
        look(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\xff\x1b[2J" + b"A" * 100_000, b"-1", b"99999999999999999999", "ended"])
def test_a_lock_without_its_owners_process_id_names_no_process(tmp_path, content):
    if content == "ended":
        process = subprocess.Popen(["true"])
        process.wait()
        content = str(process.pid).encode()
    (tmp_path / ".lock").write_bytes(content)
    with (tmp_path / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert find_holder(tmp_path) == "unknown"
        for look in (DirectoryLock, check_not_in_use):
            with pytest.raises(DirectoryInUseError, match=r"in use by another run \(its process is unknown\)"):
                look(tmp_path)


def check_that_a_live_run_is_named_at_once(run_dir: Path) -> None:
    directory = run_dir / "checkpoints"
    staging = directory / "step-00000002.staging-0"
    staging.mkdir(parents=True)
    told, tell = os.pipe()
    owner = os.fork()
    if owner == 0:
        held = DirectoryLock(directory), hold_staging(staging)
        held[1].__enter__()
        os.write(tell, b"!")
        signal.pause()
    try:
        os.read(told, 1)
        assert find_holder(directory) == str(owner)
        for take in (DirectoryLock, check_not_in_use):
            with pytest.raises(DirectoryInUseError, match=rf"in use by another run \(process {owner}\)"):
                take(directory)
        begin_seconds = time.monotonic()
        assert AsyncProcessCheckpoint(run_dir=run_dir).latest() is None
        assert time.monotonic() - begin_seconds < 10, "the writer of a live run is not waited for"
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    assert find_holder(directory) is None
    check_not_in_use(directory)


def test_a_live_run_is_named_by_its_process_and_its_writer_is_not_waited_for(tmp_path):
    run_ranks(check_that_a_live_run_is_named_at_once, 1, tmp_path)


def test_a_look_at_the_lock_does_not_refuse_a_run_that_starts(tmp_path):
    assert find_holder(tmp_path) is None
    (tmp_path / ".lock").write_text("1")
    looking = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.02, os.close, (looking,)).start()
    DirectoryLock(tmp_path).release()


def test_a_run_that_copies_its_own_directory_keeps_its_locks(tmp_path):
    (tmp_path / "run").mkdir()
    lock, watch = DirectoryLock(tmp_path / "run"), RankWatch(tmp_path / "run", 0, 2, 1.0)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with (
        (tmp_path / "run/.lock").open() as held,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "run/.ranks/0").open() as held, pytest.raises(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    watch.stop()
    lock.release()


def test_a_wait_for_an_earlier_runs_writer_is_reported_once_with_its_name_and_its_limit(tmp_path, capfd):
    staging = tmp_path / "step-00000007.staging-0"
    staging.mkdir()
    with hold_staging(staging):
        assert wait_for_orphans(tmp_path, 0.0, is_reported=False) == [staging.name]
        assert capfd.readouterr().err == ""
        assert wait_for_orphans(tmp_path, 1.2) == [staging.name]
    line = f"genesis-callbacks: waiting up to 1.2 s for the writer of an earlier run, which still saves {staging}\n"
    assert capfd.readouterr().err == line
    assert wait_for_orphans(tmp_path, 1.2) == []
    assert capfd.readouterr().err == ""


class UnreadWriter:
    """A writer that has started and reads no job, as a writer under load may be when its trainer is killed."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end.dup()
        Channel(self.end).send((READY, 0))

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None: ...


def test_a_restart_waits_for_a_job_that_its_writer_has_not_read_yet(tmp_path, monkeypatch):
    writers = []
    monkeypatch.setattr(writer_process, "start_writer", lambda end: writers.append(UnreadWriter(end)) or writers[0])
    staging = tmp_path / "step-00000007.staging-0"
    staging.mkdir()
    buffer = SharedBuffer(1)
    job = WriteJob(staging, 0, (), {}, {}, "blake3", 60.0, None)
    with pytest.raises(SaveFailedError, match="did not answer"):
        writer_process.WriterProcess().perform(job, buffer, 0.01)
    assert wait_for_orphans(tmp_path, 0.0, is_reported=False) == [staging.name]
    writers[0].end.close()
    assert wait_for_orphans(tmp_path, 0.0, is_reported=False) == []
    buffer.close()


def test_a_clean_end_leaves_no_empty_directories_behind(tmp_path):
    run_training(2, tmp_path, "ddp", 6, every_n_steps=2, keep_last=1)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {".lock", "step-00000006"}
    assert not (tmp_path / ".ranks").exists()


class KillAndLeaveWorkers(Callback):
    """Stops the loader's workers, so that they surely outlive the trainer, notes their ids, and kills the trainer."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == KILLED_AFTER:
            workers = [worker.pid for worker in multiprocessing.active_children()]
            for worker in workers:
                os.kill(worker, signal.SIGSTOP)
            self.note.write_text(" ".join(map(str, workers)))
            os.kill(os.getpid(), signal.SIGKILL)


def train_with_workers(root: Path, mode: str, **options: object) -> dict[str, object]:
    plain_project.DataLoader = lambda items: DataLoader(items, num_workers=2, multiprocessing_context="fork")
    options = {"every_n_steps": 2, "dropout": 0.2, **options}
    return train(root / "run", "single", STEPS, mode=mode, **options)


def kill_and_restart(root: Path, mode: str) -> list[dict[str, object]]:
    """Returns what an undisturbed run and one that is killed and restarted at once came to."""
    straight = train_with_workers(root / "straight", mode)
    trainer = os.fork()
    if trainer == 0:
        try:
            train_with_workers(root, mode, callbacks=(KillAndLeaveWorkers(root / "workers"),))
        finally:
            os._exit(1)
    _, status = os.waitpid(trainer, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    workers = [int(pid) for pid in (root / "workers").read_text().split()]
    try:
        assert len(workers) == 2
        resumed = train_with_workers(root, mode, ckpt_path="latest")
        assert all(Path(f"/proc/{worker}").exists() for worker in workers)
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    return [straight, resumed]


@pytest.mark.process
@pytest.mark.parametrize(
    "mode", ["process", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("sync", "thread"))]
)
def test_a_restart_right_after_a_kill_goes_on_bit_for_bit_while_the_loaders_workers_live(tmp_path, mode):
    ((straight, resumed),) = run_ranks(kill_and_restart, 1, tmp_path, mode)
    assert len(resumed["losses"]) in (STEPS - 4, STEPS - 2)
    assert resumed["losses"] == straight["losses"][-len(resumed["losses"]) :]
    assert all(torch.equal(tensor, resumed["weights"][name]) for name, tensor in straight["weights"].items())


def runs(process: int) -> bool:
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())  # that of a process that has ended is empty
    except FileNotFoundError:
        return False


def die_within_a_message(root: Path, staging: Path) -> tuple[list[str], bool]:
    """Returns what stays locked after a trainer died in mid-message, and whether its writer goes on; a child lives."""
    trainer = os.fork()
    if trainer == 0:
        try:
            writer = writer_process.WriterProcess()
            writer.wait_ready()
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            (root / "processes").write_text(f"{child} {writer._process.pid}")
            with hold_staging(staging) as lock:
                data = pickle.dumps(bytes(1000))
                socket.send_fds(writer._channel._socket, [struct.pack("<Q", len(data)) + data[:-1]], [lock])
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(trainer, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    child, writer_id = (int(text) for text in (root / "processes").read_text().split())
    try:
        held = wait_for_orphans(root, 60.0, is_reported=False)
        deadline = time.monotonic() + 60.0
        while (lives := runs(writer_id)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)
    return held, lives


@pytest.mark.process
def test_a_trainer_that_dies_within_a_message_leaves_no_lock_although_its_children_live(tmp_path):
    staging = tmp_path / "step-00000007.staging-0"
    staging.mkdir()
    assert run_ranks(die_within_a_message, 1, tmp_path, staging, timeout_seconds=200.0) == [([], False)]


def fork_while_a_lock_is_opened(directory: Path) -> bool:
    """Returns whether a child that was forked between the opening of a descriptor and its registration has no copy."""
    is_open, opened = threading.Event(), []
    real = os.open

    def open_slowly(*arguments: Any) -> int:
        number = real(*arguments)
        is_open.set()
        time.sleep(0.3)
        return number

    os.open = open_slowly
    thread = threading.Thread(target=lambda: opened.append(PrivateDescriptor(directory, os.O_RDONLY | os.O_DIRECTORY)))
    thread.start()
    is_open.wait()
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        thread.join()
        os.open = real
        (descriptor,) = opened
        fcntl.flock(descriptor.number, fcntl.LOCK_EX)
        descriptor.close()
        is_free = wait_for_orphans(directory.parent, 30.0, is_reported=False) == []  # the child closes its copy soon
        return is_free and os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.process
def test_a_child_that_is_forked_while_a_lock_is_opened_has_no_copy_of_it(tmp_path):
    staging = tmp_path / "step-00000007.staging-0"
    staging.mkdir()
    assert run_ranks(fork_while_a_lock_is_opened, 1, staging) == [True]
