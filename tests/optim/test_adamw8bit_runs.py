"""Moments of 8 bits in runs: killed and resumed, and restored under every other layout, bit for bit."""

import os
import shutil
import signal
from dataclasses import replace
from itertools import groupby, pairwise, permutations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from genesis.model.attention import AttentionConfig
from genesis.optim import AdamW8bit
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, SkipAwareLR, TokenCounters
from genesis_callbacks.checkpoint import read_tensors, verify
from genesis_callbacks.checkpoint.collect import name_parameters, state_holder
from genesis_callbacks.testing import run_ranks
from tests.train.support import TINY, build_strategy, build_trainer, run_in_turn, whole

pytestmark = [pytest.mark.slow, pytest.mark.process]

BLOCK = 16
DECODER = replace(
    TINY,
    vocab_size=320,
    dim=40,
    num_heads=None,
    num_kv_heads=None,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8),
    ffn_dim=64,
    dropout=0.1,
)
"""Rows of 40 values have a last block of 8; the columns that tensor parallelism cuts are 32 and 64."""
STEPS, HALF = 5, 3
LAYOUTS = {"single": 1, "zero1": 2, "full": 2, "tensor": 2, "pipeline": 2, "hybrid": 4, "tensor, pipeline": 4}
"""The number of ranks of each layout."""
CHAIN = [*pairwise(LAYOUTS), *((name, "single") for name in [*LAYOUTS][1:])]
"""Pairs in which each layout restores what the one before has saved, and one process what each has."""


class Keep(pl.Callback):
    """Keeps the optimizer's states as the first step of this process finds them."""

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == HALF:
            names = name_parameters(pl_module)
            for parameter, state in state_holder(trainer.optimizers[0]).state.items():
                for key, value in state.items():
                    self.states[f"optimizer.0.{names[id(parameter)]}.{key}"] = whole(value)


class Kill(pl.Callback):
    """Kills the last rank in the step after a save."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == HALF and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(directory: Path, corpus: Path, layout: str, *further: pl.Callback) -> dict[str, Any]:
    """Trains on from the newest checkpoint in `directory`, if there is one."""
    module = GenesisModule(DECODER, AdamW8bit(lr=3e-3, block=BLOCK))
    data = CorpusDataModule(str(corpus), seq_len=16, micro_batch_size=2, global_batch_size=8)
    checkpoint, keep = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=HALF, mode="sync"), Keep()
    callbacks = [TokenCounters(), SkipAwareLR(total_updates=STEPS), CheckpointVerification(), keep, *further]
    world_size = int(os.environ["WORLD_SIZE"])
    trainer = build_trainer(build_strategy(layout), world_size, STEPS, [*callbacks, checkpoint], gradient_clip_val=1.0)
    trainer.fit(module, data, ckpt_path=checkpoint.latest())
    weights = {name: whole(parameter) for name, parameter in module.named_parameters()}
    return {"weights": weights, "states": keep.states}


def train_each(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return run_in_turn(train, cases)


class Stop(pl.Callback):
    """Ends a run after a step, by default after its first save."""

    def __init__(self, step: int = HALF) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self._step


def by_size() -> list[tuple[int, list[str]]]:
    """Returns the layouts of each number of ranks, whose fits share processes."""
    return [(size, list(names)) for size, names in groupby(LAYOUTS, key=lambda name: LAYOUTS[name])]


@pytest.mark.each
@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        ("zero1", 2),
        ("tensor, pipeline", 4),
        # Each of these restores the same bytes below, and is killed and resumed with other optimizers.
        *(pytest.param(*case, marks=pytest.mark.repeat) for case in (("full", 2), ("tensor", 2), ("pipeline", 2))),
        pytest.param("hybrid", 4, marks=pytest.mark.repeat),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit_from_honest_bytes(
    tmp_path: Path, tiny_corpus: Path, layout: str, num_ranks: int
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "run"
    with pytest.raises(AssertionError):
        run_ranks(train_each, num_ranks, [(resumed, tiny_corpus, layout, Kill())])
    found = run_ranks(train_each, num_ranks, [(resumed, tiny_corpus, layout), (straight, tiny_corpus, layout)])
    for one, other in found:
        assert one["states"], "it went on from a save"
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
    path = next((resumed / "checkpoints").glob(f"step-*{HALF}"))
    records = verify(path, "deep").tensors
    codes = [name for name, record in records.items() if record.torch_dtype == torch.uint8]
    assert {name.rpartition(".")[2] for name in codes if name.startswith("optimizer.")} == {"average", "root"}
    for name in codes:
        if name.startswith("optimizer."):
            *rows, width = records[name].shape
            assert records[f"{name}_scale"].shape == (*rows, -(-width // BLOCK))


@pytest.mark.parametrize("pairs", [CHAIN, [pair for pair in permutations(LAYOUTS, 2) if pair not in CHAIN]])
def test_every_layout_restores_the_states_of_others_bit_for_bit(
    tmp_path: Path, tiny_corpus: Path, pairs: list[tuple[str, str]]
) -> None:
    for size, names in by_size():
        run_ranks(train_each, size, [(tmp_path / name, tiny_corpus, name, Stop()) for name in names])
    for size, names in by_size():
        of_size = [pair for pair in pairs if pair[1] in names]
        cases: list[tuple[Any, ...]] = []
        for saver, name in of_size:
            shutil.copytree(tmp_path / saver, tmp_path / f"{saver} to {name}")
            cases.append((tmp_path / f"{saver} to {name}", tiny_corpus, name, Stop(HALF + 1)))
        of_ranks = run_ranks(train_each, size, cases, timeout_seconds=900.0)
        for (saver, name), *found in zip(of_size, *of_ranks, strict=True):
            files = read_tensors(next((tmp_path / saver / "checkpoints").glob("step-*")))
            restored = {key: tensor for one in found for key, tensor in one["states"].items()}
            assert restored.keys() == {key for key in files if key.startswith("optimizer.")}, (saver, name)
            for one in found:
                assert all(torch.equal(tensor, files[key]) for key, tensor in one["states"].items()), (saver, name)
