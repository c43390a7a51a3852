"""Options of a strategy with which ranks cannot train: `genesis fit` prints one line, and nothing is lost."""

import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from genesis_callbacks.checkpoint import list_committed
from tests.cli.test_lost_rank import free_port
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import STDOUT, run_genesis, start_genesis

MIXTURE = {
    "class_path": "genesis.model.mixture.MixtureConfig",
    "init_args": {"num_experts": 6, "top_k": 2, "ffn_dim": 16},
}
FILE_LIMIT = 16_384
"""Bytes: less than a rank's optimizer states, and more than the log of a few steps."""
DEADLINE_SECONDS = 120


def build(corpus: Path, path: Path, run: Path, strategy: dict[str, Any], changes: dict[str, Any]) -> Path:
    """Writes the recipe of a mixture under `Sharded`."""
    recipe = build_recipe(corpus, run)
    if "model.decoder.ffn_dim" not in changes:
        del recipe["model"]["decoder"]["ffn_dim"]
        recipe["model"]["decoder"]["feed_forward"] = MIXTURE
    recipe["trainer"]["strategy"] = {"class_path": "genesis.strategies.Sharded", "init_args": strategy}
    return write_recipe(path, recipe, {"trainer.devices": 2, "trainer.enable_progress_bar": False} | changes)


MUON = {"model.optimizer": {"name": "muon"}}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "muon": (
        {"expert_parallel": 2},
        MUON | {"trainer.devices": 4},
        "optimizer.name is 'muon', which needs whole matrices, and with expert_parallel 2 always 2 ranks hold the same "
        "3 experts, which they can't share without cutting one: choose expert_parallel 1, or adamw",
    ),
    "indivisible experts": (
        {"expert_parallel": 4},
        {"trainer.devices": 4},
        "expert_parallel 4 does not divide num_experts 6, and every rank holds as many experts: choose expert_parallel "
        "1 or 2",
    ),
    "indivisible ranks": (
        {"expert_parallel": 3},
        {"trainer.devices": 4},
        "expert_parallel is 3, which does not divide the 4 ranks of a shard group; one of [1, 2, 4] does",
    ),
    "no rank": (
        {"expert_parallel": 0},
        {},
        "expert_parallel is 0; it is a number of ranks, at least 1",
    ),
    "no experts": (
        {"expert_parallel": 2},
        {"model.decoder.ffn_dim": 48},
        "expert_parallel is 2, but the model has no experts: leave it at 1, or give model.decoder.feed_forward a "
        "MixtureConfig",
    ),
    "missing directory": (
        {"optimizer_offload": 1.0, "optimizer_offload_directory": "{path}/nowhere"},
        {},
        "optimizer_offload_directory {path}/nowhere does not exist: create it, or give another directory",
    ),
    "a file": (
        {"optimizer_offload": 1.0, "optimizer_offload_directory": "{path}/recipe.yaml"},
        {},
        "optimizer_offload_directory {path}/recipe.yaml is not a directory: give one, on a local disk",
    ),
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", REFUSED)
def test_fit_refuses_it_in_one_line_before_ranks_start(name: str, tiny_corpus: Path, tmp_path: Path) -> None:
    strategy, changes, message = REFUSED[name]
    given = {key: value.format(path=tmp_path) if isinstance(value, str) else value for key, value in strategy.items()}
    run = tmp_path / "run"
    recipe = build(tiny_corpus, tmp_path / "recipe.yaml", run, given, changes)
    done = run_genesis("fit", "--config", recipe, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"genesis: error: {message.format(path=tmp_path)}\n"
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("lacking", [(1,), (0, 1)])
def test_ranks_whose_directory_has_no_room_end_all_ranks_with_one_line(
    lacking: tuple[int, ...], tiny_corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "states").mkdir()
    offload = {
        "expert_parallel": 2,
        "optimizer_offload": 1.0,
        "optimizer_offload_directory": str(tmp_path / "states"),
    }
    recipe = build(tiny_corpus, tmp_path / "recipe.yaml", tmp_path / "run", offload, {})
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": "0"}
    with (tmp_path / "output").open("w") as output:
        ranks = [
            start_genesis(
                "fit", "--config", recipe, env={**place, "LOCAL_RANK": str(rank)}, stdout=output, stderr=STDOUT
            )
            for rank in (0, 1)
        ]
        try:
            for rank in lacking:
                resource.prlimit(ranks[rank].pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
            statuses = [rank.wait(DEADLINE_SECONDS) for rank in ranks]
        finally:
            for one in ranks:
                one.kill()
                one.wait()
    words = (tmp_path / "output").read_text()
    assert statuses == [2, 2], words
    (line,) = [line for line in words.splitlines() if "error" in line]
    where = "" if len(lacking) == 2 else "rank 1: "
    assert line.startswith(f"genesis: error: {where}optimizer_offload_directory {tmp_path / 'states'} takes no files")
    assert line.endswith("(File too large): give a directory on a disk with room, or lower optimizer_offload")
    assert len(words.splitlines()) <= 2, words
    assert not list_committed(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.process
def test_a_disk_that_fails_in_a_step_ends_the_run_and_the_run_goes_on_bit_for_bit(
    tiny_corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "states").mkdir()
    offload = {"optimizer_offload": 1.0, "optimizer_offload_directory": str(tmp_path / "states")}
    changes = {"trainer.devices": 1, "trainer.max_steps": 40, "checkpoint.every_n_steps": 4}
    run, whole = tmp_path / "run", tmp_path / "whole"
    recipe = build(tiny_corpus, tmp_path / "recipe.yaml", run, offload, changes)
    never = run_genesis("fit", "--config", recipe, "--run_dir", whole, cwd=tmp_path)
    assert never.returncode == 0, never.stderr
    with (tmp_path / "output").open("w") as output:
        fit = start_genesis("fit", "--config", recipe, stdout=output, stderr=STDOUT)
        try:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while not list_committed(run):
                assert fit.poll() is None, (tmp_path / "output").read_text()
                assert time.monotonic() < deadline, "nothing was saved"
                time.sleep(0.01)
            # Writes beyond this size fail from now on, in files whose room is allocated.
            resource.prlimit(fit.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
            status = fit.wait(DEADLINE_SECONDS)
        finally:
            fit.kill()
            fit.wait()
    words = (tmp_path / "output").read_text()
    assert status == 1, words
    last = words.splitlines()[-1]
    assert last.startswith(
        f"genesis: error: optimizer_offload_directory {tmp_path / 'states'}: File too large: this step"
    )
    assert "Traceback" not in words
    resumed = run_genesis("fit", "--config", recipe, "--ckpt_path", "latest", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert _read_last(run) == _read_last(whole)


def _read_last(run: Path) -> dict[str, bytes]:
    """Returns the bytes of all tensors of the last checkpoint."""
    checkpoint, _ = list_committed(run)[-1]
    tensors = [load_file(path) for path in sorted(checkpoint.glob("**/*.safetensors"))]
    return {name: tensor.numpy().tobytes() for part in tensors for name, tensor in part.items()}


@pytest.mark.slow
@pytest.mark.process
def test_validation_needs_no_directory_for_the_states_of_an_optimizer(tiny_corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    offload = {"optimizer_offload": 1.0, "optimizer_offload_directory": str(tmp_path / "states")}
    recipe = build(tiny_corpus, tmp_path / "recipe.yaml", tmp_path / "run", offload, {"trainer.devices": 1})
    done = run_genesis("fit", "--config", recipe, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "states").rmdir()
    validated = run_genesis("validate", "--config", recipe, "--ckpt_path", "latest", cwd=tmp_path)
    assert validated.returncode == 0, validated.stderr
    refused = run_genesis("fit", "--config", recipe, "--ckpt_path", "latest", cwd=tmp_path)
    assert refused.returncode == 2
    assert "does not exist: create it" in refused.stderr
