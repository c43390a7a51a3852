"""A rank that is stopped is named, in each axis, whatever the run does: it starts, trains, validates or saves."""

import os
import signal
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from genesis.strategies import Sharded
from genesis_callbacks import AsyncProcessCheckpoint, HangWatch, Heartbeat, TokenCounters
from genesis_callbacks.phases import Phase
from genesis_callbacks.testing import run_ranks
from tests.train.support import TINY, build_module, build_trainer, loader

pytestmark = [pytest.mark.slow, pytest.mark.process]

DECODER = replace(TINY, vocab_size=64, num_layers=4)
AXES: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel": 2},
    "cp": {"context_parallel": 2},
    "pp": {"pipeline_parallel": 2},
}
STEP = 2


class Stop(pl.Callback):
    """Stops the process of the last rank at a moment of a phase."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase

    def _stop(self, trainer: pl.Trainer, phase: Phase) -> None:
        if self.phase == phase and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stop(trainer, "start")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == STEP:
            block = next(iter(pl_module.decoder.numbered_blocks.values()))
            block.register_forward_pre_hook(lambda *_: self._stop(trainer, "train"))

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        block = next(iter(pl_module.decoder.numbered_blocks.values()))
        block.register_forward_pre_hook(lambda *_: self._stop(trainer, "validate"))

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP:  # not what is read at the start, to know the keys
            self._stop(trainer, "save")


def stick(directory: Path, axis: str, phase: Phase) -> None:
    # Only the limit for a stopped process can be over in time: the other phases have four times the time of training.
    watch = HangWatch(timeout_seconds=10.0, phase_seconds={"validate": 300.0, "save": 300.0})
    checkpoint = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=STEP, mode="sync")
    callbacks = [TokenCounters(), Heartbeat(directory), watch, Stop(phase), checkpoint]
    trainer = build_trainer(Sharded(**AXES[axis]), 2, 3 * STEP, callbacks, val_check_interval=1)
    trainer.fit(build_module(DECODER), loader(3 * STEP, 0, 1), loader(3, 0, 1))


FIRST = (("tp", "start"), ("cp", "train"), ("pp", "train"))
"""Each axis once; the others are repeated before a release."""


@pytest.mark.each
@pytest.mark.parametrize(
    ("axis", "phase"),
    [
        pytest.param(*case, marks=() if case in FIRST else pytest.mark.repeat)
        for case in product(AXES, ("start", "train", "validate", "save"))
    ],
)
def test_a_rank_that_is_stopped_is_named(tmp_path: Path, axis: str, phase: Phase) -> None:
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(stick, 2, tmp_path / "run", axis, phase, timeout_seconds=150.0)
    (verdict,) = (tmp_path / "run").rglob("verdict.txt")
    missing, waiting = verdict.read_text().splitlines()
    assert missing.startswith("rank 1 is missing")
    assert waiting.startswith(f"rank 0: {phase}")
