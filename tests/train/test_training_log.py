"""The log of the training steps: exact over resumes and world sizes, and silent about what it does not know."""

import csv
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Checkpoint

from genesis.objectives.cross_entropy import CrossEntropy
from genesis.train.csv_log import CSVLog
from genesis.train.data_module import CorpusDataModule
from genesis.train.training_log import TrainingLog
from genesis_callbacks import AsyncProcessCheckpoint, TokenCounters
from genesis_callbacks.checkpoint import read_manifest
from genesis_callbacks.testing import run_ranks
from tests.train.support import TINY, build_module, build_strategy, build_trainer, counters_of, loader

DECODER = replace(TINY, vocab_size=320)
LOSSES = ("train/loss", "train/perplexity", "train/bits_per_byte", "validation/loss", "validation/perplexity")
STEPS = 13
LOG_EVERY = 3


class KillSelf(pl.Callback):
    """Sends SIGKILL to its rank at the begin of the batch after `step`, or raises."""

    def __init__(self, step: int | None, *, has_mercy: bool) -> None:
        self.step, self.has_mercy = step, has_mercy

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            if self.has_mercy:
                raise RuntimeError("ended by the test")
            os.kill(os.getpid(), signal.SIGKILL)


class KillAfterSave(Checkpoint):
    """Sends SIGKILL to its rank right after the save of `step`, before Lightning passes the step to the loggers."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class StopAt(Checkpoint):
    """Asks for the end of training after `step`, where a signal does: after all other callbacks."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


def train(
    directory: str,
    corpus: str,
    strategy: str,
    every_n_steps: int | None,
    ends_at: int | None = None,
    end: str = "SIGKILL",
) -> dict[str, Any]:
    """Trains from the newest checkpoint in `directory`, or from the beginning; ends after `ends_at` steps by `end`."""
    world_size = int(os.environ["WORLD_SIZE"])
    data = CorpusDataModule(corpus, seq_len=16, micro_batch_size=2, global_batch_size=8)
    checkpoint = AsyncProcessCheckpoint(
        run_dir=directory, every_n_steps=every_n_steps, mode="sync", save_on_exception=end == "exception"
    )
    killer = (
        KillAfterSave(ends_at) if end == "SIGKILL after the save" else KillSelf(ends_at, has_mercy=end == "exception")
    )
    callbacks = [TokenCounters(), checkpoint, killer]
    log, newest = CSVLog(Path(directory) / "metrics.csv"), checkpoint.latest()
    if newest is not None:  # as `genesis fit` does
        log.continue_after(read_manifest(newest).step)
    trainer = build_trainer(
        *(build_strategy(strategy), world_size, STEPS, callbacks),
        **{"logger": log, "log_every_n_steps": LOG_EVERY, "val_check_interval": LOG_EVERY},
    )
    trainer.fit(build_module(DECODER), data, ckpt_path=newest)
    (training_log,) = [callback for callback in trainer.callbacks if isinstance(callback, TrainingLog)]
    return {**training_log.state_dict(), "tokens": counters_of(trainer).tokens_seen}


def read_rows(directory: Path) -> dict[int, dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["step"] for row in rows}) == len(rows)
    return {int(row["step"]): row for row in rows}


def read_losses(directory: Path) -> dict[int, list[str]]:
    """Returns the losses of every row that has some, to their last digit; a save may have a row of its own."""
    rows = read_rows(directory).items()
    return {step: [row[column] for column in LOSSES] for step, row in rows if any(row[column] for column in LOSSES)}


@pytest.fixture(scope="module")
def straight_losses(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """Returns the losses that a run on one rank logs that is never ended."""
    directory = tmp_path_factory.mktemp("straight")
    run_ranks(train, 1, str(directory), str(tiny_corpus), "replicated", None)
    return read_losses(directory)


@pytest.mark.parametrize(
    ("every_n_steps", "ends_at", "end"),
    [
        pytest.param(4, 5, "SIGKILL", marks=pytest.mark.slow),
        (5, 11, "SIGKILL"),
        (6, 6, "SIGKILL after the save"),
        pytest.param(None, 7, "exception", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_logs_the_losses_of_one_that_is_not(
    tmp_path: Path,
    tiny_corpus: Path,
    straight_losses: dict[int, list[str]],
    every_n_steps: int | None,
    ends_at: int,
    end: str,
) -> None:
    with pytest.raises(AssertionError, match=r"died without a word|ended by the test"):
        run_ranks(train, 1, str(tmp_path), str(tiny_corpus), "replicated", every_n_steps, ends_at, end)
    run_ranks(train, 1, str(tmp_path), str(tiny_corpus), "replicated", every_n_steps)
    assert list(straight_losses) == [3, 6, 9, 12]
    assert read_losses(tmp_path) == straight_losses


@pytest.mark.slow
@pytest.mark.repeat  # one process is killed above, and ranks are fewer below
@pytest.mark.process
def test_sharded_ranks_that_are_killed_log_the_losses_of_those_that_are_not(tmp_path: Path, tiny_corpus: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    first, second = run_ranks(train, 2, str(straight), str(tiny_corpus), "full", None)
    assert first == second, "the sums are those of all ranks, on each of them"
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(train, 2, str(killed), str(tiny_corpus), "full", 5, 11)
    run_ranks(train, 2, str(killed), str(tiny_corpus), "full", 5)
    assert list(read_losses(straight)) == [3, 6, 9, 12]
    assert read_losses(killed) == read_losses(straight)


@pytest.mark.slow
@pytest.mark.process
def test_a_run_that_goes_on_with_fewer_ranks_logs_the_mean_over_the_steps_of_both(
    tmp_path: Path, tiny_corpus: Path, straight_losses: dict[int, list[str]]
) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(train, 2, str(tmp_path), str(tiny_corpus), "replicated", 5, 11)
    run_ranks(train, 1, str(tmp_path), str(tiny_corpus), "replicated", None)
    losses = read_losses(tmp_path)
    assert list(losses) == list(straight_losses)
    for step, values in straight_losses.items():  # that of step 12 is over steps 10, of two ranks, to 12, of one
        assert list(map(float, losses[step])) == pytest.approx(list(map(float, values)), rel=1e-5)


def train_once(directory: str, empty_steps: tuple[int, ...], stop_step: int) -> None:
    """Trains without a checkpoint, with windows that are skipped, and asks for the end after `stop_step`."""
    log = CSVLog(Path(directory) / "metrics.csv")
    callbacks = [TokenCounters(), StopAt(stop_step)]
    trainer = build_trainer("auto", 1, STEPS, callbacks, logger=log, log_every_n_steps=LOG_EVERY)
    trainer.fit(build_module(), loader(STEPS, 0, 1, empty_steps))


def test_a_log_line_repeats_no_value_that_it_does_not_know(tmp_path: Path) -> None:
    run_ranks(train_once, 1, str(tmp_path), (3, 4, 5), 11)
    rows = read_rows(tmp_path)
    assert list(rows) == [3, 6, 9]  # and nothing at the stop
    assert [step for step, row in rows.items() if row["train/loss"]] == [3, 9]
    assert not any(rows[6].get(column) for column in LOSSES)
    assert rows[6]["train/valid_tokens"] == "0.0"
    assert [row["counters/step"] for row in rows.values()] == ["3.0", "6.0", "9.0"]
    assert rows[6]["counters/skips_no_valid_tokens"] == "3.0"


def test_a_checkpoint_without_the_sums_of_the_log_starts_them_at_zero() -> None:
    log = TrainingLog(lambda: pytest.fail("no window has ended"), CrossEntropy().measure)
    state = {"version": 1, "loss_sum": 0.1 + 0.2, "num_tokens": 2**53 + 1, "num_bytes": 3}
    assert log.state_dict() == {"version": 1, "loss_sum": 0.0, "num_tokens": 0, "num_bytes": 0}
    log.load_state_dict(state)
    assert log.state_dict() == state
    others = {"terms": {"pairs": 0.5}, "figures": {"margin": 2.0}, "counts": {"pairs": 3}}
    log.load_state_dict({**state, "objective": others})
    assert log.state_dict() == {**state, "objective": others}
    with pytest.raises(ValueError, match="training log has version 2"):
        log.load_state_dict({**state, "version": 2})
