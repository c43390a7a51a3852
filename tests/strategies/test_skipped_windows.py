"""Windows that change nothing, and bfloat16, where ranks share rows, matrices or layers: all ranks decide alike."""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genesis.strategies import Sharded
from genesis_callbacks import TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.strategies.test_pipeline import Watch
from tests.strategies.test_tensor_parallel import DENSE
from tests.train.support import build_module, build_trainer, counters_of, loader, run_in_turn, whole

STEPS, EMPTY, SPOILED = 4, 1, 2
AXES = ("tensor", "context", "pipeline")


class SpoilRank(pl.Callback):
    """Makes the output of the last block infinite in one step, on the last rank alone."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.handle: Any = None
        if batch_idx == SPOILED and trainer.global_rank == trainer.world_size - 1:
            block = pl_module.decoder.numbered_blocks[DENSE.num_layers - 1]
            self.handle = block.feed_forward.register_forward_hook(lambda _, __, out: (out[0] * torch.inf, out[1]))

    def on_train_batch_end(self, *_: Any) -> None:
        if self.handle is not None:
            self.handle.remove()


def train(axis: str | None, precision: str) -> dict[str, Any]:
    world_size, watch = int(os.environ["WORLD_SIZE"]), Watch()
    strategy: Any = "auto" if axis is None else Sharded(**{f"{axis}_parallel": 2})
    callbacks = [TokenCounters(), SpoilRank(), watch]
    trainer = build_trainer(strategy, world_size, STEPS, callbacks, precision=precision)
    module = build_module(DENSE)
    trainer.fit(module, loader(STEPS, 0, 1, (EMPTY,)))
    return {
        "skips": watch.skips,
        "counters": counters_of(trainer).checkpoint_counters(),
        "losses": [row["train/loss"] for step, row in enumerate(watch.rows) if step not in (EMPTY, SPOILED)],
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
    }


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 1e-2)])
def test_empty_and_spoiled_windows_are_skipped_by_all_ranks_and_bfloat16_trains_as_on_one(
    precision: str, tolerance: float
) -> None:
    ((alone,),) = run_ranks(run_in_turn, 1, train, [(None, precision)])
    found = run_ranks(run_in_turn, 2, train, [(axis, precision) for axis in AXES])
    assert alone["skips"] == [None, "no_valid_tokens", "nonfinite_gradient", None]
    for axis, *of_ranks in zip(AXES, *found, strict=True):
        for of_rank in of_ranks:
            assert (of_rank["skips"], of_rank["counters"]) == (alone["skips"], alone["counters"]), axis
            assert of_rank["losses"] == pytest.approx(alone["losses"], rel=tolerance), axis
            for name, tensor in of_rank["weights"].items():
                assert bool(tensor.isfinite().all())
                assert torch.equal(tensor, of_ranks[0]["weights"].get(name, tensor)), (axis, name)
