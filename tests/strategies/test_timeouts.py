"""The limit of collectives: on every process group, and above the limits of `HangWatch`."""

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from genesis.base.errors import UserError
from genesis.strategies import Replicated, Sharded
from genesis.strategies.timeouts import choose_timeout, read_timeout
from genesis.train.telemetry import TelemetryOptions, build_telemetry, outlast_hang_watch
from genesis_callbacks import HangWatch
from genesis_callbacks.host_group import HostGroup
from genesis_callbacks.phases import PHASES
from genesis_callbacks.testing import run_ranks
from tests.train.support import build_module, build_strategy, build_trainer, loader


@pytest.mark.parametrize(
    ("given", "hang_seconds", "chosen"),
    [(None, None, 1800.0), (None, 60.0, 1800.0), (None, 7200.0, 7500.0), (900.0, 7200.0, 900.0), (None, 1e12, 1e8)],
)
def test_collectives_outlast_the_watch_unless_the_recipe_decides(
    given: float | None, hang_seconds: float | None, chosen: float
) -> None:
    assert choose_timeout(given, hang_seconds) == chosen


@pytest.mark.parametrize("given", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_limit_that_is_no_time_is_refused(given: float) -> None:
    with pytest.raises(UserError, match=r"timeout_seconds is .*: give a positive number of seconds"):
        read_timeout(given)


def build(tmp_path: Path, strategy: Any, options: TelemetryOptions, num_ranks: int = 2) -> pl.Trainer:
    callbacks = [each for each in build_telemetry(options, tmp_path) if isinstance(each, HangWatch)]
    return pl.Trainer(
        accelerator="cpu", devices=num_ranks, strategy=strategy, callbacks=callbacks, logger=False,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip


@pytest.mark.parametrize("strategy_class", [Replicated, Sharded])
def test_the_default_limits_leave_the_watch_time_to_name_the_rank(tmp_path: Path, strategy_class: type) -> None:
    strategy = strategy_class()
    outlast_hang_watch(build(tmp_path, strategy, TelemetryOptions()))
    watch = HangWatch()
    limits = [watch.longest_seconds, watch.timeout_seconds]
    assert len(PHASES) > 2
    assert choose_timeout(strategy.timeout_seconds, strategy.hang_seconds) > max(limits)
    without = strategy_class()
    outlast_hang_watch(build(tmp_path, without, TelemetryOptions(hang_seconds=None)))
    assert choose_timeout(without.timeout_seconds, without.hang_seconds) == 1800.0


def test_a_limit_below_that_of_the_watch_is_a_warning_where_there_are_ranks(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"timeout_seconds is 600, and telemetry.hang_seconds 1800: a run that hangs"):
        outlast_hang_watch(build(tmp_path, Replicated(timeout_seconds=600.0), TelemetryOptions()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outlast_hang_watch(build(tmp_path, Replicated(timeout_seconds=600.0), TelemetryOptions(), num_ranks=1))
        outlast_hang_watch(build(tmp_path, Replicated(timeout_seconds=4000.0), TelemetryOptions()))


class ReadLimits(pl.Callback):
    """Reads the limit of every process group of this rank."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        group = HostGroup()
        group.join()
        for number, each in enumerate(dist.distributed_c10d._world.pg_map):
            if dist.get_backend(each) == "gloo":
                limit = each._get_backend(torch.device("cpu")).options._timeout
                self.seconds[f"{number} {each.group_desc}"] = limit / timedelta(seconds=1)


def read_limits(run_dir: str, strategy: str) -> dict[str, float]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    built, limits = build_strategy(strategy), ReadLimits()
    built.hang_seconds = 7200.0
    trainer = build_trainer(built, world_size, 1, [limits], default_root_dir=run_dir)
    trainer.fit(build_module(), loader(1, rank, world_size))
    return limits.seconds


@pytest.mark.parametrize("strategy", ["replicated", pytest.param("full", marks=pytest.mark.slow)])
def test_every_process_group_has_the_limit(tmp_path: Path, strategy: str) -> None:
    for limits in run_ranks(read_limits, 2, str(tmp_path), strategy):
        short = {name: seconds for name, seconds in limits.items() if seconds != 7500.0}
        assert len(limits) >= 2
        # The groups of the comparison of starts have shorter limits of their own.
        assert all(seconds < 1800.0 for seconds in short.values()), limits
