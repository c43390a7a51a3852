"""Every byte of a committed checkpoint is vouched for: flips, zeroes, stubs, stale and swapped shards are refused."""

import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from plain_project import run_training

from genesis_callbacks import _trainer_restore
from genesis_callbacks.base.hashing import hash_bytes
from genesis_callbacks.base.local_shards import LocalShard
from genesis_callbacks.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    QuarantineWarning,
    find_latest,
    read_tensors,
    verify,
)

NUM_FLIPS = 1000
FILES = ("COMMITTED", "manifest.json", "state.json", ".metadata", "__0_0.distcp", "__1_0.distcp")


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory) -> Path:
    """A run on two ranks with the checkpoints of steps 2 and 4."""
    root = tmp_path_factory.mktemp("flips") / "run"
    run_training(2, root, "fsdp2", 4, every_n_steps=2, mode="sync")
    return root


@pytest.fixture
def run_dir(saved_run, tmp_path) -> Path:
    """A copy, to be spoilt."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


@pytest.mark.slow
def test_a_thousand_flips_of_single_bytes_are_all_refused_and_passed_over(run_dir):
    old, new = (run_dir / "checkpoints" / f"step-{step:08d}" for step in (2, 4))
    assert {path.name for path in new.iterdir()} == set(FILES)
    generator = random.Random(7)
    for number in range(NUM_FLIPS):
        path = new / FILES[number % len(FILES)]
        data = path.read_bytes()
        at, mask = generator.randrange(len(data)), generator.randrange(1, 256)
        path.write_bytes(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
        with pytest.raises(CorruptCheckpointError, match=path.name):
            verify(new, "full")
        with pytest.warns(QuarantineWarning, match="step-00000004 does not verify and is passed over"):
            assert find_latest(run_dir, quarantine_bad=False) == old
        path.write_bytes(data)
    assert verify(new, "deep").step == 4
    assert find_latest(run_dir) == new


def zero_a_page(old: Path, new: Path) -> None:
    data = bytearray((new / "__1_0.distcp").read_bytes())
    data[4096:8192] = bytes(4096)
    (new / "__1_0.distcp").write_bytes(data)


def truncate(old: Path, new: Path) -> None:
    data = (new / "__0_0.distcp").read_bytes()
    (new / "__0_0.distcp").write_bytes(data[:-100])


def append(old: Path, new: Path) -> None:
    with (new / "__0_0.distcp").open("ab") as file:
        file.write(b"\0")


def take_a_stale_shard(old: Path, new: Path) -> None:
    assert (old / "__1_0.distcp").stat().st_size == (new / "__1_0.distcp").stat().st_size
    shutil.copy(old / "__1_0.distcp", new / "__1_0.distcp")


def take_the_old_manifest(old: Path, new: Path) -> None:
    for name in ("manifest.json", "COMMITTED"):
        shutil.copy(old / name, new / name)


def swap_shards(old: Path, new: Path) -> None:
    (new / "__0_0.distcp").rename(new / "kept")
    (new / "__1_0.distcp").rename(new / "__0_0.distcp")
    (new / "kept").rename(new / "__1_0.distcp")


def lose_a_shard(old: Path, new: Path) -> None:
    (new / "__1_0.distcp").unlink()


def leave_a_stub(old: Path, new: Path) -> None:
    (new / "__0_0.distcp").write_bytes(bytes(39 << 10))


def empty_a_shard(old: Path, new: Path) -> None:
    (new / "__0_0.distcp").write_bytes(b"")


def put_a_directory_there(old: Path, new: Path) -> None:
    (new / "__0_0.distcp").unlink()
    (new / "__0_0.distcp").mkdir()


def lose_the_marker(old: Path, new: Path) -> None:
    (new / "COMMITTED").unlink()


DAMAGES: list[Callable[[Path, Path], None]] = [
    *(zero_a_page, truncate, append, take_a_stale_shard, take_the_old_manifest, swap_shards, lose_a_shard),
    *(leave_a_stub, empty_a_shard, put_a_directory_there, lose_the_marker),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_and_the_one_before_is_taken(run_dir, damage):
    old, new = (run_dir / "checkpoints" / f"step-{step:08d}" for step in (2, 4))
    damage(old, new)
    with pytest.raises(CorruptCheckpointError):
        verify(new, "full")
    with pytest.warns(QuarantineWarning, match="step-00000004 does not verify and is quarantined as quarantined-step-"):
        assert find_latest(run_dir) == old


def vouch(path: Path, spoil: Callable[[dict], None] = lambda manifest: None) -> None:
    """Makes all sizes and hashes right again after damage: only digests can tell now."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    spoil(manifest)
    for record in manifest["files"]:
        file = path / record["name"]
        data = file.read_bytes() if file.is_file() else b""
        record["num_bytes"], record["hash"] = file.stat().st_size, hash_bytes(data, "blake3")
    data = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "COMMITTED").write_bytes(b"blake3:" + hash_bytes(data, "blake3").encode())


def swap_tensors(manifest: dict) -> None:
    first, second = (manifest["tensors"][f"optimizer.0.net.body.0.weight.{key}"] for key in ("exp_avg", "exp_avg_sq"))
    first["chunks"], second["chunks"] = second["chunks"], first["chunks"]


@pytest.mark.parametrize("damage", [zero_a_page, take_a_stale_shard, swap_tensors])
def test_damage_that_every_hash_vouches_for_is_caught_by_digests(run_dir, damage):
    old, new = (run_dir / "checkpoints" / f"step-{step:08d}" for step in (2, 4))
    if damage is swap_tensors:
        vouch(new, swap_tensors)
    else:
        damage(old, new)
        vouch(new)
    verify(new, "full")
    for read in (read_tensors, lambda path: verify(path, "deep")):
        with pytest.raises(CorruptCheckpointError, match="has digest"):
            read(new)


@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp2", 2), pytest.param("single", 1, marks=pytest.mark.slow)])
def test_a_restore_of_vouched_for_damage_names_the_tensors_on_every_rank(run_dir, strategy, world_size):
    old, new = (run_dir / "checkpoints" / f"step-{step:08d}" for step in (2, 4))
    take_a_stale_shard(old, new)
    vouch(new)
    with pytest.raises(AssertionError) as caught:
        run_training(world_size, run_dir, strategy, 6, ckpt_path="latest", mode="sync", verify_level="full")
    assert str(caught.value).count("CorruptCheckpointError: ") >= world_size
    assert "digest" in str(caught.value)
    assert "model.net." in str(caught.value)


class SwapAfterReading(Callback):
    """Maps two tensors of one shape wrongly on one rank: what was read into one lies in the other."""

    FIRST, SECOND = (f"optimizer.0.net.body.0.weight.{key}" for key in ("exp_avg", "exp_avg_sq"))

    def setup(self, trainer, pl_module, stage) -> None:
        if trainer.global_rank == 1:
            if trainer.strategy.restore_checkpoint_after_setup:
                _trainer_restore.restore_shards = self.restore_swapped
            else:
                trainer.strategy.load_optimizer_state_dict = self.load_swapped
        self.trainer = trainer

    def restore_swapped(self, path: Path, manifest: object, targets: list[LocalShard]) -> None:
        swap = {self.FIRST: self.SECOND, self.SECOND: self.FIRST}
        data = {target.part.name: target.data for target in targets}
        wrong = [LocalShard(target.part, data[swap.get(target.part.name, target.part.name)]) for target in targets]
        REAL_RESTORE_PARTS(path, manifest, wrong)

    def load_swapped(self, checkpoint: dict) -> None:
        (optimizer,) = self.trainer.optimizers
        (state,) = checkpoint["optimizer_states"]
        one = next(iter(state["state"].values()))
        one["exp_avg"], one["exp_avg_sq"] = one["exp_avg_sq"], one["exp_avg"]
        optimizer.load_state_dict(state)


REAL_RESTORE_PARTS = _trainer_restore.restore_shards


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_local_shard_that_one_rank_maps_wrongly_is_named_on_every_rank(run_dir, strategy):
    with pytest.raises(AssertionError) as caught:
        run_training(2, run_dir, strategy, 6, ckpt_path="latest", mode="sync", callbacks=(SwapAfterReading(),))
    text = str(caught.value)
    assert text.count("CorruptCheckpointError: step 4 was saved with other values of 2 tensors") == 2
    assert ".exp_avg: " in text
    assert ".exp_avg_sq: " in text


def drop_optimizer(manifest: dict) -> None:
    manifest["tensors"] = {
        name: record for name, record in manifest["tensors"].items() if not name.startswith("optimizer.")
    }


@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp2", 2), pytest.param("single", 1, marks=pytest.mark.slow)])
def test_an_emptied_optimizer_is_refused(run_dir, strategy, world_size):
    new = run_dir / "checkpoints/step-00000004"
    vouch(new, drop_optimizer)
    with pytest.raises(AssertionError, match="optimizer 0 had state, but the checkpoint has none of it"):
        run_training(world_size, run_dir, strategy, 6, ckpt_path="latest", mode="sync", verify_level="full")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda chunk: chunk.update(byte_offset=-100, data_offset=-50),
        lambda chunk: chunk.update(data_offset=1 << 40),
        lambda chunk: chunk.update(num_bytes=1 << 40),
        lambda chunk: chunk.update(offsets=[5] * len(chunk["offsets"])),
    ],
)
def test_chunks_that_lie_nowhere_are_refused_by_name(run_dir, spoil):
    new = run_dir / "checkpoints/step-00000004"
    vouch(new, lambda manifest: spoil(manifest["tensors"]["model.net.body.0.weight"]["chunks"][0]))
    with pytest.raises(CheckpointError, match=r"model\.net\.body\.0\.weight"):
        verify(new, "quick")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuarantineWarning)
        assert find_latest(run_dir).name == "step-00000002"


def test_names_of_files_cannot_leave_the_directory(run_dir):
    new = run_dir / "checkpoints/step-00000004"
    (run_dir / "checkpoints/outside").write_bytes(b"mine")
    original = (new / "manifest.json").read_bytes()
    for name in ("../outside", "/etc/passwd", "..", "."):
        (new / "manifest.json").write_bytes(original)

        def rename(manifest: dict, name: str = name) -> None:
            (record,) = [record for record in manifest["files"] if record["name"] == "state.json"]
            record["name"] = name

        vouch(new, rename)
        with pytest.raises(CorruptCheckpointError):
            verify(new, "full")


def test_what_is_read_is_what_was_saved(saved_run):
    """The fixture itself is whole: what the tests above refuse, they refuse for their damage."""
    for path in sorted((saved_run / "checkpoints").glob("step-*")):
        verify(path, "deep")
        assert all(bool(torch.isfinite(tensor).all()) for tensor in read_tensors(path, prefix="model.").values())
