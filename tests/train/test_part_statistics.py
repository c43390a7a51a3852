"""A part with an auxiliary loss and counts of its own trains, is logged and goes on, under every strategy alike."""

import csv
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from genesis.data.window import IGNORE_INDEX
from genesis.model.decoder import Decoder
from genesis.train.csv_log import CSVLog
from genesis.train.data_module import CorpusDataModule
from genesis_callbacks import AsyncProcessCheckpoint, SkipAwareLR, TokenCounters
from genesis_callbacks.checkpoint import read_manifest
from genesis_callbacks.testing import run_ranks
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import REPOSITORY, run_genesis
from tests.model.mixture_part import MixtureConfig
from tests.train.support import (
    TINY,
    KeepGradients,
    build_module,
    build_strategy,
    build_trainer,
    loader,
    rows_of_step,
    whole,
)

MIXED = replace(TINY, ffn_dim=None, feed_forward=MixtureConfig(num_experts=3, ffn_dim=16, num_dense_layers=1))
PART = "blocks.1.feed_forward"


def reference(step: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Returns the gradient and the log of one big batch, in float64: the slow obvious way."""
    model = Decoder(MIXED)
    model.init_weights(0)
    model.double()
    rows = rows_of_step(step)
    logits, statistics = model(rows.input_ids, document_ids=rows.document_ids, has_statistics=True)
    num_valid = int((rows.labels != IGNORE_INDEX).sum())
    loss = cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    auxiliary = statistics[PART].loss_sum
    ((loss + auxiliary) / num_valid).backward()
    gradients = {f"decoder.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    auxiliary, load = auxiliary.detach(), statistics[PART].counts["load_tokens"]
    return gradients, {
        "train/loss": float(loss.detach()) / num_valid,
        "train/auxiliary_loss": float(auxiliary) / num_valid,
        f"parts/{PART}.loss_sum": float(auxiliary),
        **{f"parts/{PART}.load_tokens.{index}": float(count) for index, count in enumerate(load)},
    }


def one_step(strategy: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    keep, module = KeepGradients(), build_module(MIXED)
    trainer = build_trainer(build_strategy(strategy), world_size, 1, [keep, TokenCounters()])
    trainer.fit(module, loader(1, rank, world_size))
    return keep.gradients, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("single", 1),
        ("replicated", 2),
        ("full", 2),
        ("checkpointing", 2),
        pytest.param("compiled_shards", 2, marks=pytest.mark.long),
    ],
)
def test_auxiliary_loss_and_counts_are_those_of_one_big_batch(strategy: str, world_size: int) -> None:
    gradients, logged = reference(0)
    for ours, metrics in run_ranks(one_step, world_size, strategy):
        assert ours.keys() == gradients.keys()
        for name, gradient in ours.items():
            assert (gradient.double() - gradients[name]).abs().max() < 1e-6, name
        for name, value in logged.items():
            assert metrics[name] == pytest.approx(value, rel=0 if "load" in name else 1e-5), name


class Kill(pl.Callback):
    """Kills the rank when a step begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(directory: str, corpus: str, strategy: str, kill_at_step: int) -> dict[str, Tensor]:
    """Trains to step 6, from the newest checkpoint in `directory` if there is one, unless it is killed before."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    module = build_module(replace(MIXED, vocab_size=320, dropout=0.1))
    checkpoint = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=2, mode="sync")
    callbacks = [TokenCounters(), SkipAwareLR(total_updates=6, warmup_updates=2), checkpoint, Kill(kill_at_step)]
    log = CSVLog(Path(directory) / "metrics.csv")
    trainer = build_trainer(build_strategy(strategy), world_size, 6, callbacks, logger=log, gradient_clip_val=1.0)
    data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    trainer.fit(module, data, ckpt_path=checkpoint.latest())
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def read_log(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k.startswith(("parts/", "train/loss", "train/aux"))} for row in rows]


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("replicated", 1),
        pytest.param("replicated", 2, marks=pytest.mark.slow),
        pytest.param("checkpointing", 2, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(strategy: str, world_size: int, tiny_corpus: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    expected = run_ranks(train, world_size, str(straight), str(tiny_corpus), strategy, -1)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(train, world_size, str(killed), str(tiny_corpus), strategy, 3)
    found = run_ranks(train, world_size, str(killed), str(tiny_corpus), strategy, -1)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert read_log(killed) == read_log(straight)
    names = read_manifest(killed / "checkpoints/step-00000006").tensors
    assert {f"model.decoder.{PART}.{name}" for name in ("router", "up", "down")} <= names.keys()


def test_a_command_chooses_a_part_by_its_class(tiny_corpus: Path, tmp_path: Path) -> None:
    recipe = build_recipe(tiny_corpus, tmp_path / "run")
    del recipe["model"]["decoder"]["ffn_dim"]
    part = {"class_path": "tests.model.mixture_part.MixtureConfig", "init_args": {"num_experts": 3, "ffn_dim": 16}}
    recipe["model"]["decoder"]["feed_forward"] = part
    path = write_recipe(tmp_path / "recipe.yaml", recipe, {"trainer.max_steps": 2})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    done = run_genesis("fit", "--config", path, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    held = read_manifest(tmp_path / "run/checkpoints/step-00000002").recipe["model"]["decoder"]["feed_forward"]
    assert held == {**part, "init_args": {**part["init_args"], "num_dense_layers": 0, "loss_weight": 0.1}}
    (_, last) = read_log(tmp_path / "run")
    load = [float(last[f"parts/blocks.0.feed_forward.load_tokens.{expert}"]) for expert in range(3)]
    assert sum(load) == 8 * 16
