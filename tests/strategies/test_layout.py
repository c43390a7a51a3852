"""The trainer under layouts whose data rank is not the global rank, beside ordinary ones and beside one process."""

import csv
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from genesis.base.errors import UserError
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.optim import AdamW
from genesis.strategies import Sharded
from genesis.strategies.degrees import Degrees
from genesis.strategies.layout import ParallelLayout
from genesis.strategies.mesh import WorldMesh
from genesis.train.csv_log import CSVLog
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, SkipAwareLR, TokenCounters
from genesis_callbacks.checkpoint import read_manifest
from genesis_callbacks.testing import run_ranks
from tests.strategies.layouts import LAYOUTS, share_of
from tests.train.support import (
    TINY,
    KeepGradients,
    build_module,
    build_strategy,
    build_trainer,
    counters_of,
    loader,
    whole,
)

DECODER = DecoderConfig(
    vocab_size=320, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=16, dropout=0.1
)
STEPS = 6


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def build(layout: str) -> Any:
    return LAYOUTS[layout]() if layout in LAYOUTS else build_strategy(layout)


# ---- gradients


def first_gradients(layout: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keep, counters = KeepGradients(), TokenCounters()
    trainer = build_trainer(build(layout), world_size, 1, [keep, counters], gradient_clip_val=0.0)
    trainer.fit(build_module(TINY), loader(1, *share_of(layout, rank, world_size)))
    logged = {key: float(trainer.callback_metrics[f"train/{key}"]) for key in ("loss", "grad_norm", "valid_tokens")}
    return keep.gradients, {**logged, "tokens_seen": counters.tokens_seen}


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, Tensor], dict[str, float]]:
    """What one process computes on the whole batch."""
    (answer,) = run_ranks(first_gradients, 1, "single")
    return answer


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        slow("replicated", 4), slow("full", 4), slow("hybrid", 4),
        slow("reversed", 2), ("reversed_shards", 2), ("paired_shards", 4),
    ],
)  # fmt: skip
def test_every_gradient_is_that_of_one_process_on_the_whole_batch(
    expected: tuple[dict[str, Tensor], dict[str, float]], layout: str, world_size: int
) -> None:
    gradients, figures = expected
    for found, found_figures in run_ranks(first_gradients, world_size, layout):
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (found[name] - gradient).abs().max() <= 2e-6 * gradient.abs().max(), name
        assert found_figures == pytest.approx(figures, rel=2e-6)
        assert found_figures["tokens_seen"] == found_figures["valid_tokens"] == figures["valid_tokens"]


class Averaging(Sharded):
    """Leaves FSDP2 its own average over ranks, and says so in the layout."""

    def _lay_out(self, degrees: Degrees, mesh: WorldMesh) -> ParallelLayout:
        return replace(super()._lay_out(degrees, mesh), gradient_divisor=degrees.world_size)

    def apply_to(self, decoder: Decoder) -> None:
        super().apply_to(decoder)
        for module in decoder.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(False)
                module.set_gradient_divide_factor(None)  # type: ignore[arg-type]  # torch's own default


def sum_and_average(shard: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for strategy in (Sharded, Averaging):
        keep = KeepGradients()
        built = strategy(shard=shard, ranks_per_shard_group=2)  # type: ignore[arg-type]
        build_trainer(built, world_size, 2, [keep]).fit(build_module(), loader(2, rank, world_size))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))  # Lightning removed them
        found.append(keep.gradients)
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["full", "hybrid"])
def test_summed_gradients_are_those_of_an_average_bit_for_bit_on_four_ranks(shard: str) -> None:
    for summed, averaged in run_ranks(sum_and_average, 4, shard):
        assert all(torch.equal(summed[name], averaged[name]) for name in summed)


# ---- whole runs


def train(directory: str, corpus: str, layout: str, max_steps: int) -> dict[str, Any]:
    """Trains to `max_steps`, from the newest checkpoint in `directory` if there is one."""
    module = GenesisModule(DECODER, AdamW(lr=3e-3))
    data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    checkpoint = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=STEPS // 2, mode="sync")
    log, latest = CSVLog(Path(directory) / "metrics.csv"), checkpoint.latest()
    if latest is not None:
        log.continue_after(read_manifest(Path(latest)).step)
    trainer = build_trainer(
        build(layout),
        int(os.environ["WORLD_SIZE"]),
        max_steps,
        [TokenCounters(), SkipAwareLR(total_updates=STEPS), checkpoint],
        logger=log,
        gradient_clip_val=1.0,
        val_check_interval=STEPS // 2,
        check_val_every_n_epoch=None,
    )
    trainer.fit(module, data, ckpt_path=latest)
    return {
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "counters": counters_of(trainer).checkpoint_counters(),
        "position": data.training.data_position,
    }


def read_losses(directory: Path) -> dict[tuple[str, int], float]:
    """Returns the losses and counts of every step in the run's log."""
    keys = ("train/loss", "train/valid_tokens", "counters/tokens_seen", "validation/loss")
    with (directory / "metrics.csv").open() as file:
        return {(key, int(row["step"])): float(row[key]) for row in csv.DictReader(file) for key in keys if row[key]}


Straight = Callable[[str, int], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def straight(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Returns the uninterrupted run of a layout: its directory, and what its ranks agree on. Each is run once."""

    @cache
    def run(layout: str, world_size: int) -> tuple[Path, dict[str, Any]]:
        directory = tmp_path_factory.mktemp(layout)
        first, *others = run_ranks(train, world_size, str(directory), str(tiny_corpus), layout, STEPS)
        for other in others:
            assert_equal(first, other)
        return directory, first

    return run


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, tensor in one["weights"].items():
        assert torch.equal(tensor, other["weights"][name]), name
    assert (one["counters"], one["position"]) == (other["counters"], other["position"])


@pytest.mark.parametrize(("layout", "ordinary"), [slow("reversed", "replicated"), slow("reversed_shards", "full")])
def test_a_run_depends_on_data_ranks_and_not_on_global_ranks(straight: Straight, layout: str, ordinary: str) -> None:
    directory, found = straight(layout, 2)  # two ranks that change places add the same two gradients
    ordinary_directory, expected = straight(ordinary, 2)
    assert_equal(found, expected)
    assert read_losses(directory) == read_losses(ordinary_directory)


@pytest.mark.parametrize(("layout", "world_size"), [slow("reversed", 2), slow("reversed_shards", 2)])
def test_a_run_whose_data_ranks_are_not_the_global_ranks_goes_on_bit_for_bit(
    tmp_path: Path, tiny_corpus: Path, straight: Straight, layout: str, world_size: int
) -> None:
    directory, expected = straight(layout, world_size)
    for max_steps in (STEPS // 2, STEPS):
        resumed = run_ranks(train, world_size, str(tmp_path), str(tiny_corpus), layout, max_steps)
    for rank in resumed:
        assert_equal(rank, expected)
    assert read_losses(tmp_path) == read_losses(directory)


# ---- refusals


class Unsupported(Sharded):
    def _plan_degrees(self) -> Degrees:
        return Degrees(cp=self.num_processes).resolve(self.num_processes)


def refuse(strategy: str) -> str:
    built: Any = Unsupported() if strategy == "degrees" else ModelParallelStrategy()
    with pytest.raises(UserError) as error:
        build_trainer(built, 2, 1, []).fit(build_module(), loader(1, 0, 1))
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("degrees", "context_parallel is 2, and context parallelism is not supported yet; leave it at 1"),
        ("lightning", "trainer.strategy is a ModelParallelStrategy, whose gradients the training step does not know"),
    ],
)
def test_what_the_step_cannot_train_is_refused_by_name(strategy: str, message: str) -> None:
    for words in run_ranks(refuse, 2, strategy):
        assert words.startswith(message)
