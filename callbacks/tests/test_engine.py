"""The engine alone, in one process: save, read, verify, refuse."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from genesis_callbacks.base.checkpoint_errors import DirectoryInUseError, UnreadableCheckpointError
from genesis_callbacks.base.hashing import hash_bytes
from genesis_callbacks.base.local_shards import LocalShard, TensorShard, local_shards
from genesis_callbacks.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    QuarantineWarning,
    Ranks,
    Retention,
    RunMetadata,
    SaveFailedError,
    SaveTarget,
    Snapshot,
    find_latest,
    list_committed,
    read_manifest,
    read_tensors,
    restore,
    save_blocking,
    verify,
)
from genesis_callbacks.checkpoint.lineage import DirectoryLock
from genesis_callbacks.checkpoint.restore import restore_shards

TENSORS = {
    "model.weight": torch.randn(7, 5),
    "model.half": torch.randn(3, 4).bfloat16(),
    "model.scalar": torch.tensor(3.5),
    "model.flag": torch.tensor([True, False]),
    "model.count": torch.tensor(2**40 + 1),
    "model.view": torch.randn(1000, 8)[3:5, 2:4],
    "model.complex": torch.randn(3, dtype=torch.complex64),
    "model.empty": torch.empty(0, 3),
}


def save_steps(directory, *steps, tensors=TENSORS, retention=None):
    directory.mkdir(exist_ok=True)
    target = SaveTarget(directory, Ranks(), retention=retention)
    parts = [part for name, tensor in tensors.items() for part in local_shards(name, tensor, "parameter")]
    return [
        save_blocking(target, lambda step=step: Snapshot(step, {"tokens_seen": step * 10}, parts, {"step": step}))
        for step in steps
    ]


def flip_byte(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 0x10
    path.write_bytes(data)


def test_tensors_come_back_bit_equal(tmp_path):
    (path,) = save_steps(tmp_path, 3)
    tensors = read_tensors(path)
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert list(read_tensors(path, prefix="model.w")) == ["model.weight"]
    with pytest.raises(CheckpointError, match="is not in"):
        read_tensors(path, ["model.nothing"])


def test_stock_dcp_load_reads_the_directory(tmp_path):
    (path,) = save_steps(tmp_path, 3)
    target = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items() if tensor.numel()}
    with pytest.warns(UserWarning, match="single process"):  # it says so whenever there is no process group
        dcp.load(target, checkpoint_id=path, no_dist=True)
    for name, tensor in target.items():
        assert torch.equal(tensor, TENSORS[name])


def test_manifest_says_what_was_saved(tmp_path):
    first, second = save_steps(tmp_path, 3, 6)
    manifest = read_manifest(second)
    assert (manifest.step, manifest.sequence, manifest.counters) == (6, 2, {"tokens_seen": 60})
    assert manifest.previous is not None
    assert manifest.previous.name == first.name
    assert {record.name for record in manifest.files} == {".metadata", "__0_0.distcp", "state.json"}
    assert verify(second, "deep") == manifest
    assert find_latest(tmp_path) == second


@pytest.mark.parametrize("name", ["manifest.json", "COMMITTED", "state.json", ".metadata", "__0_0.distcp"])
def test_flipped_byte_is_refused_by_name_and_latest_falls_back(tmp_path, name):
    first, second = save_steps(tmp_path, 3, 6)
    flip_byte(second / name)
    with pytest.raises(CorruptCheckpointError, match=name):
        verify(second)
    with pytest.warns(QuarantineWarning, match="step-00000006"):
        assert find_latest(tmp_path) == first
    assert (tmp_path / "quarantined-step-00000006").is_dir()
    assert not second.exists()


@pytest.mark.parametrize("reader", ["read_manifest", "_verify_tensors"])
def test_a_checkpoint_that_another_rank_quarantines_during_the_search_is_passed_over(tmp_path, monkeypatch, reader):
    first, second = save_steps(tmp_path, 3, 6)
    flip_byte(second / "__0_0.distcp")
    module = sys.modules[verify.__module__]
    original = getattr(module, reader)

    def read_late(*arguments):
        monkeypatch.setattr(module, reader, original)
        with pytest.warns(QuarantineWarning, match="step-00000006"):
            assert find_latest(tmp_path) == first
        return original(*arguments)

    monkeypatch.setattr(module, reader, read_late)
    assert find_latest(tmp_path) == first
    assert not second.exists()


@pytest.mark.parametrize("name", ["COMMITTED", "manifest.json", "__0_0.distcp", "state.json", ".metadata"])
def test_missing_or_truncated_file_is_refused(tmp_path, name):
    first, second = save_steps(tmp_path, 3, 6)
    data = (second / name).read_bytes()
    (second / name).write_bytes(data[:-1])
    with pytest.raises(CorruptCheckpointError, match=name):
        verify(second, "quick")
    (second / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=name):
        verify(second, "quick")
    with pytest.warns(QuarantineWarning, match=name):
        assert find_latest(tmp_path) == first


def test_where_every_checkpoint_is_bad_none_is_taken_and_none_is_moved(tmp_path):
    first, second = save_steps(tmp_path, 3, 6)
    flip_byte(first / "__0_0.distcp")
    flip_byte(second / "state.json")
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match="none of the 2 checkpoints"):
            find_latest(tmp_path)
    assert first.is_dir()
    assert second.is_dir()


def test_nothing_there_is_none(tmp_path):
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="no such directory"):
        read_manifest(tmp_path / "nowhere")


def test_a_checkpoint_is_never_written_over(tmp_path):
    (path,) = save_steps(tmp_path, 3)
    before = path.stat()
    with pytest.raises(SaveFailedError, match="never overwritten"):
        save_steps(tmp_path, 3)
    assert path.stat() == before
    assert verify(path, "deep").step == 3


def test_retention_after_commit_leaves_foreign_and_in_flight_alone(tmp_path):
    for name in ("mine", "step-00000001.staging-abc", "step-notes", "quarantined-step-00000001"):
        (tmp_path / name).mkdir()
    save_steps(tmp_path, 2, 3, 4, 5, 6, retention=Retention(keep_last=2, keep_every_n_steps=3))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        *("mine", "step-00000001.staging-abc", "step-notes", "quarantined-step-00000001"),
        *("step-00000003", "step-00000005", "step-00000006", ".trash"),
    }
    assert not list((tmp_path / ".trash").iterdir())


def test_latest_follows_the_lineage_not_the_number(tmp_path):
    (newer_number,) = save_steps(tmp_path, 5)
    target = SaveTarget(tmp_path, Ranks())
    target.continue_from(None, 1)
    saved = save_blocking(target, lambda: Snapshot(3, {}, local_shards("x", torch.ones(2), "parameter"), {}))
    assert find_latest(tmp_path) == saved != newer_number


def test_every_single_byte_flip_is_refused(tmp_path):
    (path,) = save_steps(tmp_path, 1, tensors={"model.x": torch.arange(6.0)})
    generator = random.Random(0)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for _ in range(40):
            at, mask = generator.randrange(len(data)), generator.randrange(1, 256)
            file.write_bytes(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
            with pytest.raises(CheckpointError):
                verify(path)
        file.write_bytes(data)
    verify(path, "deep")


def test_a_newer_schema_is_refused_by_name(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    current = f'"schema_version": {read_manifest(path).schema_version}'.encode()
    data = (path / "manifest.json").read_bytes().replace(current, b'"schema_version": 99')
    (path / "manifest.json").write_bytes(data)
    (path / "COMMITTED").write_bytes(b"blake3:" + hash_bytes(data, "blake3").encode())
    with pytest.raises(CheckpointError, match="schema 99"):
        find_latest(tmp_path)
    assert path.exists()


def test_a_second_run_in_one_directory_is_refused(tmp_path):
    lock = DirectoryLock(tmp_path)
    with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()}"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


def test_no_tensor_is_cast_or_reshaped_on_restore(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    manifest = read_manifest(path)
    for wrong in (torch.zeros(7, 5, dtype=torch.float64), torch.zeros(5, 7)):
        with pytest.raises(CheckpointError, match=r"model\.weight is float32 \[7, 5\]"):
            restore_shards(path, manifest, local_shards("model.weight", wrong, "parameter"))


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """The modules of a process that has imported the engine."""
    program = "import sys, genesis_callbacks.checkpoint; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.xdist_group("imported")
def test_engine_imports_nothing_of_lightning(imported):
    assert "lightning" not in imported


def forge_digest(path: Path, name: str) -> None:
    """Changes a tensor's digest in a manifest and makes the marker vouch for it: all hashes are right."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    digest = int(manifest["tensors"][name]["digest"], 16)
    manifest["tensors"][name]["digest"] = f"{digest ^ 1:016x}"
    data = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "COMMITTED").write_bytes(b"blake3:" + hash_bytes(data, "blake3").encode())


def test_latest_falls_back_from_a_wrong_digest_under_right_hashes(tmp_path):
    first, second = save_steps(tmp_path, 3, 6)
    forge_digest(second, "model.weight")
    assert verify(second, "full").step == 6
    with pytest.raises(CorruptCheckpointError, match=r"model\.weight has digest"):
        verify(second, "deep")
    with pytest.warns(QuarantineWarning, match=r"step-00000006 .* model\.weight has digest"):
        assert find_latest(tmp_path) == first


def test_a_copy_under_another_steps_name_is_refused_by_name_and_latest_passes_over_it(tmp_path):
    first, second = save_steps(tmp_path, 3, 6)
    copy = tmp_path / "step-00000009"
    shutil.copytree(first, copy)
    for read in (read_manifest, verify, read_tensors):
        with pytest.raises(
            CorruptCheckpointError, match="step-00000009 holds the checkpoint of step 3, not of the step"
        ):
            read(copy)
    assert [path for path, _ in list_committed(tmp_path)] == [first, second]
    with pytest.warns(QuarantineWarning, match="step-00000009 .* holds the checkpoint of step 3"):
        assert find_latest(tmp_path) == second
    assert (tmp_path / "quarantined-step-00000009").is_dir()
    # Under a name that says nothing of a step, a copy is a copy.
    shutil.copytree(first, tmp_path / "backup")
    assert verify(tmp_path / "backup", "deep").step == 3


def test_a_deep_look_reads_in_blocks_what_a_restore_reads_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(restore, "_BLOCK_BYTES", 64)
    (path,) = save_steps(tmp_path, 3)
    verify(path, "deep")
    for name in TENSORS:
        if TENSORS[name].numel():
            forge_digest(path, name)
            with pytest.raises(CorruptCheckpointError, match=f"{name} has digest"):
                verify(path, "deep")
            forge_digest(path, name)


@pytest.mark.parametrize("cut", [(1, 4), (0, 2), (2, 3)])
def test_a_deep_look_adds_up_blocks_of_a_tensor_that_is_cut_along_any_dimension(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(restore, "_BLOCK_BYTES", 64)
    dim, at = cut
    whole = torch.randn(5, 7, 4)
    parts = []
    for start, size in ((0, at), (at, whole.shape[dim] - at)):
        data = whole.narrow(dim, start, size)
        offsets = tuple(start if each == dim else 0 for each in range(3))
        parts.append(
            LocalShard(TensorShard("model.w", "parameter", (5, 7, 4), whole.dtype, offsets, tuple(data.shape)), data)
        )
    path = save_blocking(SaveTarget(tmp_path, Ranks()), lambda: Snapshot(1, {}, parts, {}))
    verify(path, "deep")
    forge_digest(path, "model.w")
    with pytest.raises(CorruptCheckpointError, match=r"model\.w has digest"):
        verify(path, "deep")


def test_a_save_that_a_full_disk_ends_is_no_value_error(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(SaveFailedError, match="File too large") as caught:
            save_steps(tmp_path, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not isinstance(caught.value, ValueError)
    assert caught.value.exit_status == 1
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("place", ["section", "recipe"])
def test_a_save_that_no_restore_would_read_fails(tmp_path, place):
    deep = 1
    for _ in range(150):
        deep = {"deeper": deep}
    origin = RunMetadata(recipe={"deep": deep} if place == "recipe" else {})
    parts = local_shards("model.weight", torch.ones(3), "parameter")
    with pytest.raises(SaveFailedError, match="nested more than 100 levels deep"):
        save_blocking(
            SaveTarget(tmp_path, Ranks(), origin=origin),
            lambda: Snapshot(1, {}, parts, deep if place == "section" else {}),
        )
    assert list_committed(tmp_path) == []


def test_statuses_of_errors_follow_one_convention():
    assert {error.exit_status for error in (SaveFailedError, CorruptCheckpointError, UnreadableCheckpointError)} == {1}
    assert {error.exit_status for error in (CheckpointError, DirectoryInUseError)} == {2}


@pytest.mark.xdist_group("imported")
def test_importing_the_engine_does_not_import_the_writers_program(imported):
    """Python warns when a module that runs as a program has been imported by its own package before."""
    assert "genesis_callbacks.checkpoint" in imported
    assert "genesis_callbacks.checkpoint.writer" not in imported
