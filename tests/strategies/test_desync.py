"""A forward that one rank enters alone is named and ends the run."""

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genesis.strategies import Sharded
from genesis.strategies.desync import ForwardLog, LogExchange, find_divergence, find_leader, interval_seconds
from genesis_callbacks.host_group import HostGroup
from genesis_callbacks.testing import run_ranks
from tests.train.support import build_module, build_trainer, loader


class SampleOnRankZero(pl.Callback):
    """Somebody's sampling callback: a forward on rank 0 alone."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 2:
            with torch.no_grad():
                pl_module.decoder(torch.zeros(1, 4, dtype=torch.long))


class SampleWhileOthersWait(pl.Callback):
    """The same by somebody careful, who lets the other ranks wait: nobody else ever enters that forward."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            if trainer.global_rank == 0:
                pl_module.decoder(torch.zeros(1, 4, dtype=torch.long))
            HostGroup().sum((1,)).wait()


def run_with(callback: type[pl.Callback], directory: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    file = os.open(f"{directory}/stderr-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    trainer = build_trainer(Sharded(desync_seconds=3.0), world_size, 50, [callback()])
    trainer.fit(build_module(), loader(50, rank, world_size))


@pytest.mark.slow
@pytest.mark.parametrize("callback", [SampleOnRankZero, SampleWhileOthersWait])
def test_a_forward_of_one_rank_alone_is_named_within_seconds(callback: type[pl.Callback], tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError):
        run_ranks(run_with, 2, callback, str(tmp_path), timeout_seconds=60)
    # Far below any process group's timeout; the fork server's first import is in it.
    assert time.monotonic() - began < 45
    words = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "rank 0" in words
    assert "every rank must run every forward" in words
    assert "test_desync.py" in words


def test_a_divergence_names_the_rank_that_is_alone() -> None:
    logs = [ForwardLog(0, 3, "tte"), ForwardLog(1, 3, "ttt"), ForwardLog(2, 2, "tt")]
    assert find_divergence(logs) is None
    logs[2] = ForwardLog(2, 4, "tttt")
    assert find_divergence(logs) == (2, 0, "without gradients")


def test_kinds_that_are_no_longer_kept_are_not_compared() -> None:
    assert find_divergence([ForwardLog(0, 9, "tt"), ForwardLog(1, 9, "ettttt")]) is None


def test_a_leader_is_a_rank_that_is_ahead() -> None:
    assert find_leader([ForwardLog(0, 3, "ttt"), ForwardLog(1, 3, "ttt")]) is None
    assert find_leader([ForwardLog(0, 3, "ttt"), ForwardLog(1, 4, "tttt")]) == (3, 1)


def test_nobody_leads_before_every_rank_has_ended_its_first_windows() -> None:
    logs = [ForwardLog(0, 5, "ttttt", num_windows=2), ForwardLog(1, 3, "ttt", num_windows=1)]
    assert find_leader(logs) is None
    logs[1] = ForwardLog(1, 3, "ttt", num_windows=2)
    assert find_leader(logs) == (3, 0)


class CountingStore:
    """A store in memory that counts the requests a server would get."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_requests = 0

    def set(self, key: str, value: str) -> None:
        self.num_requests += 1
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self.num_requests += 1
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self.num_requests += 1
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.num_requests += 1
        return [self.values[key] for key in keys]


@pytest.mark.parametrize("num_ranks", [2, 128, 1024])
def test_the_store_gets_few_requests_a_second_however_many_ranks_there_are(num_ranks: int) -> None:
    store, ranks = CountingStore(), range(num_ranks)
    exchanges = [LogExchange(store, rank, ranks) for rank in ranks]
    for _ in range(3):
        store.num_requests = 0
        for rank, exchange in enumerate(exchanges):
            exchange.publish(ForwardLog(rank, 3, "ttt", 2))
        logs = exchanges[0].read_logs()
        assert not any(exchange.is_judge or exchange.read_verdict() for exchange in exchanges[1:])
    assert len(logs) == num_ranks
    assert store.num_requests <= 2 * num_ranks  # the logs by one request, of one rank
    assert store.num_requests / interval_seconds(num_ranks) <= 256


def test_no_log_is_compared_before_every_rank_has_published_one_and_all_read_one_verdict() -> None:
    store = CountingStore()
    first, second = (LogExchange(store, rank, (0, 1)) for rank in (0, 1))
    first.publish(ForwardLog(0, 3, "tte", 2))
    assert first.read_logs() == []
    second.publish(ForwardLog(1, 2, "tt", 1))
    assert first.read_logs() == [ForwardLog(0, 3, "tte", 2), ForwardLog(1, 2, "tt", 1)]
    assert second.read_verdict() is None
    first.send_verdict("rank 0 is alone")
    assert second.read_verdict() == "rank 0 is alone"


class CompileLongOnRankZero(pl.Callback):
    """A first window that takes rank 0 longer than a rank may be alone."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 0:
            time.sleep(3.0)


def run_a_slow_start() -> int:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer = build_trainer(Sharded(desync_seconds=1.0), world_size, 4, [CompileLongOnRankZero()])
    trainer.fit(build_module(), loader(4, rank, world_size))
    return trainer.global_step


@pytest.mark.slow
def test_a_rank_may_take_long_for_its_first_window() -> None:
    assert run_ranks(run_a_slow_start, 2) == [4, 4]
