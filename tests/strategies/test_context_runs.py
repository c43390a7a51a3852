"""Runs whose ranks share rows or matrices: killed and resumed, and from the command line."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genesis_callbacks.testing import run_ranks
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import run_genesis
from tests.strategies.test_pipeline_runs import HALF, STEPS, Kill, join_weights, read_log, train_alike

pytestmark = [pytest.mark.slow, pytest.mark.process]

CP2: dict[str, Any] = {"context_parallel": 2}
TP2: dict[str, Any] = {"tensor_parallel": 2}


@pytest.mark.parametrize(
    ("world_size", "options", "optimizer"),
    [
        (2, CP2, "adamw"),
        (4, CP2, "adamw"),
        (4, CP2 | {"pipeline_parallel": 2, "activation_checkpointing": "block"}, "adamw"),
        (4, TP2, "muon"),
        (4, TP2 | {"pipeline_parallel": 2, "activation_checkpointing": "block"}, "adamw"),
        (4, TP2 | CP2, "muon"),
    ],
)
def test_ranks_that_share_rows_or_matrices_go_on_bit_for_bit_after_a_kill(
    tmp_path: Path, tiny_corpus: Path, world_size: int, options: dict[str, Any], optimizer: str
) -> None:
    straight = run_ranks(train_alike, world_size, optimizer, tmp_path / "straight", tiny_corpus, options, STEPS)
    with pytest.raises(AssertionError):
        run_ranks(train_alike, world_size, optimizer, tmp_path / "run", tiny_corpus, options, STEPS, Kill())
    resumed = run_ranks(train_alike, world_size, optimizer, tmp_path / "run", tiny_corpus, options, STEPS)
    assert {found["from"] for found in resumed} == {HALF}
    weights, expected = join_weights(resumed), join_weights(straight)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    for found, right in zip(resumed, straight, strict=True):
        assert (found["counters"], found["position"]) == (right["counters"], right["position"])


def test_fit_trains_with_shared_rows_as_in_one_process_and_refuses_what_cannot_be_shared(
    tmp_path: Path, tiny_corpus: Path
) -> None:
    strategy = {"class_path": "genesis.strategies.Sharded", "init_args": CP2}
    shared = {"trainer.devices": 2, "trainer.strategy": strategy}
    runs: dict[str, dict[str, Any]] = {"one": {}, "shared": shared, "odd": shared | {"data.seq_len": 15}}
    done = {}
    for name, changes in runs.items():
        further = {"model.decoder.num_layers": 2, "trainer.enable_progress_bar": False, **changes}
        recipe = write_recipe(tmp_path / f"{name}.yaml", build_recipe(tiny_corpus, tmp_path / name), further)
        done[name] = run_genesis("fit", "--config", recipe, cwd=tmp_path)
    assert done["one"].returncode == done["shared"].returncode == 0, done["shared"].stderr
    one, of_ranks = (read_log(tmp_path / name) for name in ("one", "shared"))
    assert one[-1]["step"] == 4
    for row, expected in zip(of_ranks, one, strict=True):
        row.pop("train/scale_factor", None), expected.pop("train/scale_factor", None)
        assert row == pytest.approx(expected, rel=1e-5)
    assert done["odd"].returncode == 2
    message = "context_parallel 2 does not divide data.seq_len 15; set context_parallel to 1"
    assert done["odd"].stderr.strip().endswith(message)
    assert done["odd"].stderr.count("context_parallel 2") == 1, "before ranks start"
