"""Validation in mid-training under sharding: ranks stay in step, and no hang."""

import os
from typing import Any

import lightning.pytorch as pl
import pytest

from genesis_callbacks.testing import run_ranks
from tests.train.support import build_module, build_strategy, build_trainer, loader


class KeepValidation(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["validation/loss"]))


def hundred_steps(strategy: str) -> list[float]:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    keep = KeepValidation()
    trainer = build_trainer(
        build_strategy(strategy), world_size, 100, [keep], val_check_interval=5, check_val_every_n_epoch=None
    )
    trainer.fit(build_module(lr=1e-3), loader(100, rank, world_size), loader(3, rank, world_size))
    return keep.losses


@pytest.fixture(scope="module")
def single_losses() -> list[float]:
    (losses,) = run_ranks(hundred_steps, 1, "single")
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", "grad_op"])
def test_a_hundred_steps_with_validation_every_five_do_not_hang(strategy: str, single_losses: list[float]) -> None:
    for losses in run_ranks(hundred_steps, 2, strategy):
        assert len(losses) == 20
        assert losses == pytest.approx(single_losses, abs=1e-4)
