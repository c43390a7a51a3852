"""A run that is stopped and goes on in a new process ends where an uninterrupted one ends."""

import csv
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from genesis.model.decoder import DecoderConfig
from genesis.train.csv_log import CSVLog
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, SkipAwareLR, TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.algorithms import algorithm_of
from tests.train.support import build_strategy, build_trainer, counters_of, whole

DECODER = DecoderConfig(
    vocab_size=320, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=16, dropout=0.1
)
STEPS = 40


class Record(pl.Callback):
    """What each step trained on, and at what rate."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.lrs: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append([micro_batch.input_ids.tolist() for micro_batch in batch.micro_batches])
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])


def train(directory: str, corpus: str, strategy: str, max_steps: int, optimizer: str, dropout: float) -> dict[str, Any]:
    """Trains to `max_steps`, from the newest checkpoint in `directory` if there is one."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    module = GenesisModule(
        DecoderConfig(**{**DECODER.__dict__, "dropout": dropout}),
        algorithm_of(optimizer, lr=3e-3),
    )
    data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    checkpoint = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=max_steps, mode="sync")
    record = Record()
    callbacks = [TokenCounters(), SkipAwareLR(total_updates=STEPS, warmup_updates=5), checkpoint, record]
    log = CSVLog(Path(directory) / "metrics.csv")
    trainer = build_trainer(
        build_strategy(strategy), world_size, max_steps, callbacks, logger=log, gradient_clip_val=1.0
    )
    trainer.fit(module, data, ckpt_path=checkpoint.latest())
    return {
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "batches": record.batches,
        "lrs": record.lrs,
        "counters": counters_of(trainer).checkpoint_counters(),
        "position": data.training.cursor.position,
        "report": checkpoint.restore_report,
    }


Straight = Callable[[str, int, str, float], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def straight(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Returns the uninterrupted run of a strategy: its directory and what its ranks tell. Each is run once."""

    @cache
    def run(strategy: str, world_size: int, optimizer: str, dropout: float) -> tuple[Path, list[dict[str, Any]]]:
        directory = tmp_path_factory.mktemp("straight")
        return directory, run_ranks(
            train, world_size, str(directory), str(tiny_corpus), strategy, STEPS, optimizer, dropout
        )

    return run


def stop_and_resume(
    directory: Path, corpus: Path, before: tuple[str, int], after: tuple[str, int], optimizer: str, dropout: float
) -> list[dict[str, Any]]:
    """Trains half of the steps, and the other half in new processes; returns what those tell."""
    run_ranks(train, before[1], str(directory), str(corpus), before[0], STEPS // 2, optimizer, dropout)
    return run_ranks(train, after[1], str(directory), str(corpus), after[0], STEPS, optimizer, dropout)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("replicated", 1),
        pytest.param("replicated", 2, marks=pytest.mark.slow),
        pytest.param("zero1", 2, marks=pytest.mark.slow),
        pytest.param("full", 2, marks=pytest.mark.slow),  # test_ladder.py kills and resumes one in the quick tier
        pytest.param("offload", 2, marks=pytest.mark.slow),
    ],
)
def test_twenty_and_twenty_steps_are_bit_equal_to_forty(
    tmp_path: Path, tiny_corpus: Path, straight: Straight, strategy: str, world_size: int, optimizer: str
) -> None:
    directory, ranks = straight(strategy, world_size, optimizer, 0.1)
    resumed = stop_and_resume(
        tmp_path, tiny_corpus, (strategy, world_size), (strategy, world_size), optimizer, dropout=0.1
    )
    for one, other in zip(ranks, resumed, strict=True):
        assert equal(one["weights"], other["weights"])
        assert one["batches"][STEPS // 2 :] == other["batches"]
        assert one["lrs"][STEPS // 2 :] == other["lrs"]
        assert one["counters"] == other["counters"]
        assert one["position"] == other["position"]
    assert losses(directory) == losses(tmp_path)


def losses(directory: Path) -> list[float]:
    """Returns the loss of every step that the run's log has."""
    with (directory / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    return [float(row["train/loss"]) for row in rows]


def global_batches(ranks: list[dict[str, Any]]) -> list[Any]:
    """Returns each step's rows over all ranks, in the order of the global batch."""
    num_steps = len(ranks[0]["batches"])
    return [
        [row for rank in ranks for micro_batch in rank["batches"][step] for row in micro_batch]
        for step in range(num_steps)
    ]


@pytest.mark.parametrize(
    ("optimizer", "tolerance"), [("adamw", 1e-5), pytest.param("muon", 5e-3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        # test_data_module.py changes the number of ranks in the quick tier.
        pytest.param(("full", 2), ("replicated", 1), marks=pytest.mark.slow),
        pytest.param(("single", 1), ("full", 2), marks=pytest.mark.slow),
        pytest.param(("replicated", 2), ("full", 1), marks=pytest.mark.slow),
        pytest.param(("zero1", 2), ("full", 4), marks=pytest.mark.slow),
    ],
)
def test_another_world_size_and_strategy_goes_on_with_the_same_batches_and_losses(
    tmp_path: Path,
    tiny_corpus: Path,
    straight: Straight,
    before: tuple[str, int],
    after: tuple[str, int],
    optimizer: str,
    tolerance: float,
) -> None:
    directory, ranks = straight(*before, optimizer, 0.0)
    resumed = stop_and_resume(tmp_path, tiny_corpus, before, after, optimizer, dropout=0.0)
    assert global_batches(ranks)[STEPS // 2 :] == global_batches(resumed)
    assert losses(tmp_path) == pytest.approx(losses(directory), abs=tolerance)
    assert resumed[0]["counters"] == ranks[0]["counters"]


@pytest.mark.slow
def test_a_restore_says_what_it_kept_rebuilt_and_reset(tmp_path: Path, tiny_corpus: Path) -> None:
    resumed = stop_and_resume(tmp_path, tiny_corpus, ("replicated", 1), ("replicated", 1), "adamw", dropout=0.0)
    report = resumed[0]["report"].text
    assert "  kept     " in report
    assert "step 20" in report
