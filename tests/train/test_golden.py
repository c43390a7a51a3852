"""The first losses of the tiny model, to full precision: a refactor must not change them.

Sums of float32 differ in their last bits from one kind of CPU to another, so they are compared to a tolerance. Muon's
orthogonalisation runs in bfloat16, which makes those bits larger.
"""

import json
from typing import Any

import lightning.pytorch as pl
import pytest

from genesis_callbacks.testing import run_ranks
from tests.golden.files import read_golden
from tests.train.support import build_module, build_strategy, build_trainer, loader

STEPS = 20
TOLERANCES = {"adamw": 5e-6, "muon": 5e-3}


class KeepLosses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss_sum"]) / batch.num_valid_tokens)


def first_losses(optimizer: str) -> list[float]:
    """Runs in a process of its own, on one thread."""
    keep = KeepLosses()
    trainer = build_trainer(build_strategy("single"), 1, STEPS, [keep], gradient_clip_val=1.0)
    trainer.fit(build_module(name=optimizer), loader(STEPS, 0, 1))
    return keep.losses


def test_first_losses_are_golden() -> None:
    losses = {optimizer: run_ranks(first_losses, 1, optimizer)[0] for optimizer in TOLERANCES}
    golden = json.loads(read_golden("losses.json", json.dumps(losses, indent=1) + "\n"))
    for optimizer, tolerance in TOLERANCES.items():
        assert len(golden[optimizer]) == STEPS
        assert losses[optimizer] == pytest.approx(golden[optimizer], rel=0, abs=tolerance)


@pytest.mark.slow
def test_the_same_run_twice_has_the_same_losses_bit_for_bit() -> None:
    assert run_ranks(first_losses, 1, "adamw") == run_ranks(first_losses, 1, "adamw")
