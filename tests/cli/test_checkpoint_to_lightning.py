"""`genesis checkpoint to-lightning` on a small checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from genesis.cli.checkpoint.to_lightning import main
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.checkpoint import CheckpointError, Ranks, SaveTarget, Snapshot, save_blocking
from genesis_callbacks.checkpoint.tagged_json import encode_tagged


@pytest.fixture
def run_dir(tmp_path):
    section, _ = encode_tagged(
        {"trainer": {"global_step": 3, "callbacks": {}}, "model_extras": {}, "optimizers": [], "rng": None}, "state.0"
    )
    parts = local_shards("model.weight", torch.arange(4.0), "parameter")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    target = SaveTarget(tmp_path / "run/checkpoints", Ranks())
    save_blocking(target, lambda: Snapshot(3, {"step": 3}, parts, section, has_optimizer=False))
    return tmp_path / "run"


def test_a_run_becomes_one_file_that_torch_loads_without_running_code(run_dir, tmp_path, capsys):
    target = tmp_path / "run.ckpt"
    assert main([str(run_dir), str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(target), "num_bytes": target.stat().st_size}
    content = torch.load(target, weights_only=True)
    assert torch.equal(content["state_dict"]["weight"], torch.arange(4.0))
    assert content["global_step"] == 3


def test_a_file_that_exists_is_never_written_over(run_dir, tmp_path):
    (tmp_path / "run.ckpt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists: give the name of a new file"):
        main([str(run_dir), str(tmp_path / "run.ckpt")])
    assert (tmp_path / "run.ckpt").read_text() == "mine"


def test_a_file_that_cannot_be_written_is_refused_in_one_line(run_dir, tmp_path):
    (tmp_path / "file").touch()
    for target, said in (
        (tmp_path / "nowhere/run.ckpt", "nowhere is no directory: make it, or give another"),
        (tmp_path / "file/run.ckpt", "file is no directory: make it, or give another"),
        (Path("/proc/self/run.ckpt"), "cannot be written: "),
    ):
        with pytest.raises(CheckpointError, match=said) as raised:
            main([str(run_dir), str(target)])
        assert str(raised.value).isprintable()
        assert str(target) in str(raised.value)


def test_a_damaged_checkpoint_is_reported_with_status_1(run_dir, tmp_path, capsys):
    shard = run_dir / "checkpoints/step-00000003/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main([str(run_dir / "checkpoints/step-00000003"), str(tmp_path / "run.ckpt")]) == 1
    assert capsys.readouterr().out.startswith("BAD: ")
