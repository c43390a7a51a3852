"""Runs under a pipeline: killed and resumed, and from the command line."""

import csv
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genesis.model.decoder import DecoderConfig
from genesis.strategies import Sharded
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, SkipAwareLR, TokenCounters
from genesis_callbacks.checkpoint import read_manifest
from genesis_callbacks.testing import run_ranks
from tests.algorithms import algorithm_of
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import run_genesis
from tests.train.support import TINY, build_trainer, counters_of, run_in_turn, whole

pytestmark = [pytest.mark.slow, pytest.mark.process]

DECODER = replace(TINY, vocab_size=320, num_layers=4)
STEPS, HALF = 6, 3
STAGES: dict[str, Any] = {"pipeline_parallel": 2, "stages_per_rank": 2}


class Kill(pl.Callback):
    """Kills the process of a rank within the step after a save."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == HALF + 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    directory: Path,
    corpus: Path,
    options: dict[str, Any] | None,
    max_steps: int,
    *further: pl.Callback,
    optimizer: str = "adamw",
    dropout: float = 0.0,
    decoder: DecoderConfig = DECODER,
) -> dict[str, Any]:
    """Trains to `max_steps`, from the newest checkpoint in `directory` if there is one."""
    module = GenesisModule(replace(decoder, dropout=dropout), algorithm_of(optimizer, lr=3e-3))
    data = CorpusDataModule(str(corpus), seq_len=16, micro_batch_size=2, global_batch_size=8)
    checkpoint = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=HALF, mode="sync")
    verification = CheckpointVerification()
    callbacks = [TokenCounters(), SkipAwareLR(total_updates=STEPS), verification, *further, checkpoint]
    strategy: Any = "auto" if options is None else Sharded(**options)
    trainer = build_trainer(strategy, int(os.environ["WORLD_SIZE"]), max_steps, callbacks, gradient_clip_val=1.0)
    latest = checkpoint.latest()
    trainer.fit(module, data, ckpt_path=latest)
    assert verification.num_bad == 0
    return {
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "counters": counters_of(trainer).checkpoint_counters(),
        "position": data.training.cursor.position,
        "from": None if latest is None else read_manifest(Path(latest)).step,
    }


def train_each(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return run_in_turn(train, cases)


def train_alike(optimizer: str, *arguments: Any) -> dict[str, Any]:
    return train(*arguments, optimizer=optimizer, dropout=0.1)


def join_weights(of_ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Returns the weights of all stages; those that two of them hold must be equal."""
    joined: dict[str, torch.Tensor] = {}
    for found in of_ranks:
        for name, tensor in found["weights"].items():
            assert torch.equal(joined.setdefault(name, tensor), tensor), name
    return joined


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_pipeline_goes_on_bit_for_bit(tmp_path: Path, tiny_corpus: Path, optimizer: str) -> None:
    straight = run_ranks(train_alike, 2, optimizer, tmp_path / "straight", tiny_corpus, STAGES, STEPS)
    with pytest.raises(AssertionError):
        run_ranks(train_alike, 2, optimizer, tmp_path / "run", tiny_corpus, STAGES, STEPS, Kill())
    resumed = run_ranks(train_alike, 2, optimizer, tmp_path / "run", tiny_corpus, STAGES, STEPS)
    assert [found["from"] for found in resumed] == [HALF, HALF]
    weights, expected = join_weights(resumed), join_weights(straight)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    for found, right in zip(resumed, straight, strict=True):
        assert (found["counters"], found["position"]) == (right["counters"], right["position"])


def read_log(run_dir: Path) -> list[dict[str, float]]:
    with (run_dir / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    alike, unlike = ("train/", "validation/", "counters/", "step"), ("train/scale_factor", "train/tokens_per_second")
    return [
        {name: value for name, value in row.items() if name.startswith(alike) and not name.startswith(unlike)}
        for row in rows
    ]


def test_fit_trains_through_a_pipeline_as_in_one_process(tmp_path: Path, tiny_corpus: Path) -> None:
    strategy = {"class_path": "genesis.strategies.Sharded", "init_args": STAGES}
    of_pipeline = {"trainer.devices": 2, "trainer.strategy": strategy}
    for name, changes in {"one": {}, "stages": of_pipeline}.items():
        further = {"model.decoder.num_layers": 4, "trainer.enable_progress_bar": False, **changes}
        recipe = write_recipe(tmp_path / f"{name}.yaml", build_recipe(tiny_corpus, tmp_path / name), further)
        done = run_genesis("fit", "--config", recipe, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, stages = (read_log(tmp_path / name) for name in ("one", "stages"))
    assert one[-1]["step"] == 4
    for row, expected in zip(stages, one, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    with (tmp_path / "stages/metrics.csv").open() as file:
        *_, last = csv.DictReader(file)
    assert 0.0 < float(last["parallel/bubble_share"]) < 1.0
    assert float(last["parallel/bubble_share_ideal"]) == pytest.approx(1 / 9)
