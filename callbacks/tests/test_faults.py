"""Real faults: a kill before every operation of a save, a full disk, strangers' pickles, two runs, signals."""

import json
import os
import pickle
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from plain_project import run_training

from genesis_callbacks.base.hashing import hash_bytes
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import (
    CorruptCheckpointError,
    Ranks,
    Retention,
    SaveTarget,
    Snapshot,
    find_latest,
    read_tensors,
    save_blocking,
    verify,
)
from genesis_callbacks.checkpoint.lineage import DirectoryLock, remove_abandoned
from genesis_callbacks.checkpoint.one_save import Progress
from genesis_callbacks.checkpoint.pipeline import SavePipeline
from genesis_callbacks.testing import run_ranks

OPERATIONS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


def save_step(directory: Path, step: int, mode: str = "sync") -> None:
    """Saves tensors that all hold the step, after whatever is there, and keeps only the newest."""
    target = SaveTarget(directory, Ranks(), retention=Retention(keep_last=1))
    before = find_latest(directory)
    if before is not None:
        target.continue_from(None, verify(before).sequence)
    tensors = {"model.a": torch.full((300,), float(step)), "optimizer.0.a.exp_avg": torch.full((5, 5), float(step))}
    parts = [part for name, tensor in tensors.items() for part in local_shards(name, tensor, "parameter")]
    if mode == "sync":
        save_blocking(target, lambda: Snapshot(step, {}, parts, {"step": step}))
        return
    pipeline = SavePipeline(target, mode="thread", staging="overlapped", time_limit_seconds=60.0)
    pipeline.begin(step, lambda: Snapshot(step, {}, parts, {"step": step}), Progress(lambda: 0))
    assert pipeline.finish().kind == "committed"
    pipeline.close(0.0)


class KilledBefore:
    """Counts this process's file operations and kills it, by SIGKILL, before the n-th."""

    def __init__(self, number: int) -> None:
        self.left = number
        for name in OPERATIONS:
            setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, function):
        def wrapped(*arguments, **keywords):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return wrapped


def kill_before_every_operation(root: Path, mode: str) -> list[int]:
    """Returns which step restored after a kill before operation 1, 2, ... of the save of step 2."""
    survivors = []
    while True:
        directory = root / f"kill-{len(survivors) + 1}"
        directory.mkdir(parents=True)
        save_step(directory, 1)
        child = os.fork()
        if child == 0:
            KilledBefore(len(survivors) + 1)
            save_step(directory, 2, mode)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        latest = find_latest(directory)
        step = verify(latest, "deep").step
        assert all(bool((tensor == step).all()) for tensor in read_tensors(latest).values())
        lock = DirectoryLock(directory)  # a restart: clears up and saves again
        remove_abandoned(directory)
        save_step(directory, 3)
        lock.release()
        names = {path.name for path in directory.iterdir()} - {".lock", ".trash"}
        assert names == {"step-00000003"}, names
        assert not (directory / ".trash").exists()
        shutil.rmtree(directory)
        if os.WIFEXITED(status):
            return survivors
        survivors.append(step)


@pytest.mark.slow  # a writer that is killed before any operation is in the quick tier
@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_a_kill_before_any_operation_leaves_the_old_or_the_new(tmp_path, mode):
    (survivors,) = run_ranks(kill_before_every_operation, 1, tmp_path, mode)
    assert len(survivors) > 20
    assert survivors == sorted(survivors)  # never the new one before it was committed, never the old one after
    assert set(survivors) == {1, 2}


class KillInSave(Callback):
    """Kills its rank, by SIGKILL, in the middle of a save after `step`."""

    def __init__(self, step: int, rank: int, num_operations: int) -> None:
        self.step, self.rank, self.num_operations = step, rank, num_operations

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            KilledBefore(self.num_operations)


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "thread"])
@pytest.mark.parametrize(
    ("strategy", "rank"),
    [("ddp", 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("single", 0), ("fsdp2", 1)))],
)
def test_a_trainer_killed_in_a_save_goes_on_from_the_one_before(tmp_path, strategy, rank, mode):
    world_size = 1 if strategy == "single" else 2
    straight = run_training(world_size, tmp_path / "straight", strategy, 6, save_at_end=False)
    killer = (KillInSave(4, rank, 3),)
    with pytest.raises(AssertionError, match=f"rank {rank}: died without a word"):
        run_training(world_size, tmp_path / "run", strategy, 6, every_n_steps=2, callbacks=killer, mode=mode)
    latest = find_latest(tmp_path / "run")
    # A save behind the training may have been the first one, still, when its rank was killed.
    assert (latest.name == "step-00000002") if latest or mode == "sync" else True
    resumed = run_training(world_size, tmp_path / "run", strategy, 6, ckpt_path="latest")
    for run, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in run["weights"].items())
    left = {path.name for path in (tmp_path / "run/checkpoints").iterdir()} - {".lock", ".trash"}
    assert left == ({latest.name, "step-00000006"} if latest else {"step-00000006"})


class FullDisk(Callback):
    """Lets no file of its rank grow beyond a limit from one step until another."""

    def __init__(self, first: int, last: int, rank: int, limit_bytes: int = 2_000) -> None:
        self.first, self.last, self.rank, self.limit_bytes = first, last, rank, limit_bytes

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_rank == self.rank:
            is_full = self.first <= trainer.global_step + 1 <= self.last
            limit = self.limit_bytes if is_full else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def test_a_full_disk_fails_the_save_and_training_goes_on_by_policy(tmp_path):
    options = {"every_n_steps": 2, "keep_last": 1, "callbacks": (FullDisk(3, 5, rank=1),)}
    runs = run_training(2, tmp_path, "ddp", 6, on_save_failure="warn", **options)
    assert [run["failed"] for run in runs] == [1, 1]
    assert len(runs[0]["losses"]) == 6
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {".lock", "step-00000006"}


def test_a_full_disk_on_one_rank_ends_all_with_its_name(tmp_path):
    with pytest.raises(AssertionError) as caught:
        run_training(2, tmp_path, "fsdp2", 6, every_n_steps=2, callbacks=(FullDisk(3, 9, rank=1),))
    assert str(caught.value).count("SaveFailedError: rank 1: OSError: [Errno 27]") == 2
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {".lock", "step-00000002"}
    assert find_latest(tmp_path).name == "step-00000002"


def test_two_runs_in_one_directory_are_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    lock = DirectoryLock(tmp_path / "checkpoints")
    with pytest.raises(AssertionError, match=f"in use by another run .process {os.getpid()}."):
        run_training(1, tmp_path, "single", 2)
    lock.release()
    run_training(1, tmp_path, "single", 2)


class SignalOnce(Callback):
    """Sends a signal to its own rank after a step."""

    def __init__(self, step: int, number: int, rank: int) -> None:
        self.step, self.number, self.rank = step, number, rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    "mode", [pytest.param("sync", marks=pytest.mark.slow), pytest.param("thread", marks=pytest.mark.slow), "process"]
)
@pytest.mark.parametrize(
    ("strategy", "number", "stopped_after"),
    [
        ("single", signal.SIGTERM, 3),
        ("ddp", signal.SIGTERM, 4),
        pytest.param("fsdp2", signal.SIGINT, 4, marks=pytest.mark.slow),
    ],
)
def test_a_signal_on_one_rank_saves_and_stops_all(tmp_path, strategy, number, stopped_after, mode):
    world_size = 1 if strategy == "single" else 2
    sender = (SignalOnce(2, number, rank=world_size - 1),)
    runs = run_training(world_size, tmp_path, strategy, 50, callbacks=sender, mode=mode)
    for run in runs:
        assert run["signal"] == number
        assert len(run["losses"]) == stopped_after
    assert find_latest(tmp_path).name == f"step-{stopped_after:08d}"


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def plant_pickles(path: Path, proof: Path) -> None:
    """Makes of a checkpoint what a stranger could send: payloads in every file, all hashes right."""
    payload = pickle.dumps(Payload(proof))
    manifest = json.loads((path / "manifest.json").read_bytes())
    (path / ".metadata").write_bytes(payload)
    shard = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(payload + shard)
    for record in manifest["tensors"].values():
        for chunk in record["chunks"]:
            chunk["data_offset"] += len(payload)
            if chunk["byte_offset"] == 0:  # a reader that unpickles this chunk would meet the payload first
                chunk["num_bytes"] += len(payload)
            else:
                chunk["byte_offset"] += len(payload)
    state = json.loads((path / "state.json").read_bytes())
    state["sections"][0]["trainer"]["stranger"] = {"!": "bytes", "base64": ""}
    (path / "state.json").write_bytes(json.dumps(state).encode())
    for record in manifest["files"]:
        data = (path / record["name"]).read_bytes()
        record["num_bytes"], record["hash"] = len(data), hash_bytes(data, "blake3")
    data = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "COMMITTED").write_bytes(b"blake3:" + hash_bytes(data, "blake3").encode())


def test_planted_pickles_run_nothing(tmp_path):
    run_training(1, tmp_path / "run", "single", 2)
    path, proof = find_latest(tmp_path / "run"), tmp_path / "proof"
    plant_pickles(path, proof)
    verify(path, "full")
    with pytest.raises(CorruptCheckpointError, match=r"metadata holds a posix\.mkdir"):
        verify(path, "deep")
    read_tensors(path)
    assert find_latest(tmp_path / "run", level="full") == path
    for strategy, world_size in (("single", 1), ("fsdp2", 2)):
        shutil.copytree(tmp_path / "run", tmp_path / strategy)
        runs = run_training(world_size, tmp_path / strategy, strategy, 4, ckpt_path="latest", verify_level="full")
        assert len(runs[0]["losses"]) == 2
    assert not proof.exists()
    pickle.loads((path / ".metadata").read_bytes())  # the payload does work, where somebody unpickles
    assert proof.exists()


def test_state_that_names_code_is_refused(tmp_path):
    run_training(1, tmp_path, "single", 2)
    path = find_latest(tmp_path)
    plant_pickles(path, tmp_path / "proof")
    state = (path / "state.json").read_bytes()
    planted = state.replace(
        b'{"!": "bytes", "base64": ""}', b'{"!": "enum", "module": "os", "class": "system", "name": "ls"}'
    )
    (path / "state.json").write_bytes(planted)
    manifest = json.loads((path / "manifest.json").read_bytes())
    (record,) = [record for record in manifest["files"] if record["name"] == "state.json"]
    record["num_bytes"], record["hash"] = len(planted), hash_bytes(planted, "blake3")
    data = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "COMMITTED").write_bytes(b"blake3:" + hash_bytes(data, "blake3").encode())
    with pytest.raises(AssertionError, match="that this program has not imported"):
        run_training(1, tmp_path, "single", 4, ckpt_path="latest", verify_level="full")
