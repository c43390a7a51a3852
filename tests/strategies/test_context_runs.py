"""Runs whose ranks share rows or matrices: killed and resumed, hanging, and from the command line."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genesis.strategies import Sharded
from genesis_callbacks import HangWatch, Heartbeat, TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import run_genesis
from tests.strategies.test_pipeline_runs import (
    DECODER,
    HALF,
    STEPS,
    Kill,
    join_weights,
    read_log,
    train_alike,
)
from tests.train.support import build_module, build_trainer, loader

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


class Stick(pl.Callback):
    """Stops the process of a rank between the two exchanges of a layer."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            output = pl_module.decoder.blocks[0].attention.output
            output.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))


def stick(run_dir: Path, options: dict[str, Any]) -> None:
    callbacks = [TokenCounters(), Stick(), Heartbeat(run_dir), HangWatch(timeout_seconds=4.0)]
    trainer = build_trainer(Sharded(**options), 2, 6, callbacks)
    trainer.fit(build_module(DECODER), loader(6, 0, 1))


@pytest.mark.parametrize("options", [CP2, TP2], ids=["context", "tensor"])
def test_a_rank_that_sticks_in_an_exchange_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(stick, 2, tmp_path / "run", options, timeout_seconds=60.0)
    (verdict,) = (tmp_path / "run").rglob("verdict.txt")
    assert verdict.read_text().startswith("rank 1 is missing")


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
