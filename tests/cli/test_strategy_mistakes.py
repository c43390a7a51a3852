"""Options of a strategy with which ranks cannot train: `genesis fit` prints one line, and nothing is lost."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import run_genesis

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


MUON = {"model.optimizer": {"class_path": "genesis.optim.Muon"}}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "muon": (
        {"expert_parallel": 2},
        MUON | {"trainer.devices": 4},
        "the optimizer is muon, which needs whole matrices, and with expert_parallel 2 always 2 ranks hold the same "
        "3 experts, which they can't share without cutting one: choose expert_parallel 1, or another optimizer, such "
        "as adamw",
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
    "indivisible heads": (
        {"tensor_parallel": 3},
        {"trainer.devices": 3, "model.decoder.ffn_dim": 48},
        "tensor_parallel is 3, and so many ranks cannot share num_kv_heads 2: set it to 1, and change "
        "data.global_batch_size or data.micro_batch_size, which do not fit it",
    ),
    "no experts": (
        {"expert_parallel": 2},
        {"model.decoder.ffn_dim": 48},
        "expert_parallel is 2, but the model has no experts: leave it at 1, or give model.decoder.feed_forward a "
        "MixtureConfig",
    ),
    "more stages than layers": (
        {"pipeline_parallel": 2},
        {},
        "the pipeline has 2 stages, and the model 1 layer: lower pipeline_parallel or stages_per_rank until their "
        "product is at most the number of layers; pipeline_parallel 1 fits",
    ),
    "too few micro-batches": (
        {"pipeline_parallel": 2},
        {"model.decoder.num_layers": 2, "data.global_batch_size": 2},
        "the micro-batches of a window are 1, and pipeline_parallel is 2: some stages would never work; a pipeline "
        "needs at least 2 micro-batches, so change data.global_batch_size or data.micro_batch_size",
    ),
    "states on a disk": (
        {"optimizer_offload": 1.0, "optimizer_offload_directory": "{path}"},
        {},
        "trainer.strategy.init_args.optimizer_offload_directory is {path}: optimizer states are offloaded to the "
        "host's memory alone: leave it out and lower optimizer_offload, or shard over more ranks",
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
