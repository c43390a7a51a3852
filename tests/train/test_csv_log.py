"""The run's log: a row a step, whatever is logged when, and however often the run is killed and goes on."""

import csv
import os
import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from genesis.train.csv_log import CSVLog
from genesis_callbacks.testing import run_ranks
from tests.train.support import build_module, build_strategy, build_trainer, loader

LOSS, GRAD_NORM, VALIDATION_LOSS = "train/loss", "train/grad_norm", "validation/loss"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.csv"


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def losses_by_step(path: Path) -> dict[int, float]:
    return {int(row["step"]): float(row[LOSS]) for row in read_rows(path)}


def log_steps(log: CSVLog, steps: range, loss: float) -> None:
    for step in steps:
        log.log_metrics({LOSS: loss}, step)


def test_nothing_is_made_until_something_is_logged(path: Path) -> None:
    CSVLog(path)
    assert not path.parent.exists()


def test_each_step_is_a_row_and_on_disk_at_once(path: Path) -> None:
    log = CSVLog(path)
    for step in range(1, 4):
        log.log_metrics({LOSS: 1 / step}, step)
        assert losses_by_step(path) == {earlier: 1 / earlier for earlier in range(1, step + 1)}


@pytest.mark.parametrize("later", [{VALIDATION_LOSS: 4.0625}, {GRAD_NORM: 0.5, "train/new": 1.0}])
def test_an_open_file_has_whole_rows_as_far_as_it_went_while_a_row_is_lengthened(
    path: Path, later: dict[str, float]
) -> None:
    log = CSVLog(path)
    for step in (1, 2):
        log.log_metrics({LOSS: 3.0, **({VALIDATION_LOSS: 4.0} if step == 1 else {})}, step)
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        log.log_metrics(later, 2)
        log.log_metrics({LOSS: 2.0}, 3)
        header, *lines = file.read(num_bytes).decode().splitlines(keepends=True)
    whole = [line.rstrip() for line in lines if line.endswith("\n")]
    assert header.rstrip() == f"step,{LOSS},{VALIDATION_LOSS}"
    assert whole in (["1,3.0,4.0"], ["1,3.0,4.0", "2,3.0,"])


def test_what_is_logged_later_for_a_step_joins_its_row(path: Path) -> None:
    log = CSVLog(path)
    for step in (1, 2):
        log.log_metrics({LOSS: 3.0, GRAD_NORM: 0.5}, step)
        log.log_metrics({VALIDATION_LOSS: 4.0}, step)
    assert read_rows(path) == [
        {"step": step, LOSS: "3.0", GRAD_NORM: "0.5", VALIDATION_LOSS: "4.0"} for step in ("1", "2")
    ]


def test_a_new_column_keeps_the_rows_before_and_leaves_them_empty_there(path: Path) -> None:
    log = CSVLog(path)
    log_steps(log, range(1, 3), loss=3.0)
    log.log_metrics({LOSS: 2.0, GRAD_NORM: 0.5}, 3)
    log.log_metrics({LOSS: 1.0}, 4)
    rows = read_rows(path)
    assert [row[GRAD_NORM] for row in rows] == ["", "", "0.5", ""]
    assert [row[LOSS] for row in rows] == ["3.0", "3.0", "2.0", "1.0"]


def test_a_resumed_run_replaces_the_rows_that_it_repeats(path: Path) -> None:
    log_steps(CSVLog(path), range(1, 8), loss=3.0)
    resumed = CSVLog(path)
    log_steps(resumed, range(5, 7), loss=1.0)
    assert losses_by_step(path) == {1: 3.0, 2: 3.0, 3: 3.0, 4: 3.0, 5: 1.0, 6: 1.0}


def test_a_validation_of_the_restored_step_joins_the_row_of_that_step(path: Path) -> None:
    log = CSVLog(path)
    log_steps(log, range(1, 8), loss=3.0)
    resumed = CSVLog(path)
    resumed.continue_after(4)
    resumed.log_metrics({VALIDATION_LOSS: 4.0}, 4)
    assert [(row["step"], row[LOSS], row[VALIDATION_LOSS]) for row in read_rows(path)] == [
        *((str(step), "3.0", "") for step in (1, 2, 3)),
        ("4", "3.0", "4.0"),
    ]
    log_steps(resumed, range(5, 7), loss=1.0)
    assert [row["step"] for row in read_rows(path)] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("first_step", [5, 6])
def test_rows_after_the_restored_step_are_cut_wherever_the_resumed_run_logs_first(path: Path, first_step: int) -> None:
    log_steps(CSVLog(path), range(1, 8), loss=3.0)
    resumed = CSVLog(path)
    resumed.continue_after(4)
    log_steps(resumed, range(first_step, 9, 2), loss=1.0)
    assert losses_by_step(path) == {1: 3.0, 2: 3.0, 3: 3.0, 4: 3.0, **dict.fromkeys(range(first_step, 9, 2), 1.0)}


def test_a_resumed_run_keeps_the_columns_in_their_order_and_adds_its_own(path: Path) -> None:
    first = CSVLog(path)
    first.log_metrics({GRAD_NORM: 0.5, LOSS: 3.0}, 1)
    resumed = CSVLog(path)
    resumed.log_metrics({LOSS: 2.0, VALIDATION_LOSS: 4.0}, 2)
    assert list(read_rows(path)[0]) == ["step", GRAD_NORM, LOSS, VALIDATION_LOSS]
    assert read_rows(path) == [
        {"step": "1", GRAD_NORM: "0.5", LOSS: "3.0", VALIDATION_LOSS: ""},
        {"step": "2", GRAD_NORM: "", LOSS: "2.0", VALIDATION_LOSS: "4.0"},
    ]


@pytest.mark.parametrize("num_bytes_lost", range(1, 9))
def test_a_row_torn_by_a_kill_does_not_spoil_the_log(path: Path, num_bytes_lost: int) -> None:
    log_steps(CSVLog(path), range(1, 13), loss=3.0)
    path.write_bytes(path.read_bytes()[:-num_bytes_lost])
    log_steps(CSVLog(path), range(12, 14), loss=1.0)
    assert losses_by_step(path) == {**dict.fromkeys(range(1, 12), 3.0), 12: 1.0, 13: 1.0}


def test_a_torn_row_of_a_later_step_is_gone_though_its_number_reads_as_an_earlier_one(path: Path) -> None:
    log_steps(CSVLog(path), range(8, 13), loss=3.0)
    # "12,3.0" is left as "1": a whole number, but no row.
    path.write_bytes(path.read_bytes()[: -len("2,3.0\r\n")])
    log_steps(CSVLog(path), range(12, 13), loss=1.0)
    assert losses_by_step(path) == {8: 3.0, 9: 3.0, 10: 3.0, 11: 3.0, 12: 1.0}


def test_a_log_without_a_whole_header_begins_anew(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"")
    log_steps(CSVLog(path), range(5, 7), loss=1.0)
    assert losses_by_step(path) == {5: 1.0, 6: 1.0}


def test_a_number_comes_back_as_it_was(path: Path) -> None:
    CSVLog(path).log_metrics({LOSS: 0.1 + 0.2}, 1)
    assert losses_by_step(path) == {1: 0.1 + 0.2}


def test_only_rank_zero_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    CSVLog(path).log_metrics({LOSS: 1.0}, 1)
    assert not path.exists()


def test_an_error_of_a_full_disk_names_the_log(path: Path) -> None:
    log = CSVLog(path)
    log.log_metrics({LOSS: 1.0}, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            log.log_metrics({LOSS: 2.0}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path)


def train(directory: str, rank: int, max_steps: int = 3) -> list[str]:
    """Trains on one of two ranks with a log of its own; returns the names of the files there are."""
    loggers: list[Any] = [CSVLog(Path(directory) / f"rank-{rank}.csv"), CSVLogger(directory, "other", "0")]
    trainer = build_trainer(build_strategy("replicated"), 2, max_steps, [], logger=loggers)
    trainer.fit(build_module(), loader(max_steps, rank, 2))
    return [logger.__class__.__name__ for logger in trainer.loggers]


def train_as_ranked(directory: str) -> list[str]:
    return train(directory, rank=pl.utilities.rank_zero_only.rank)


def test_a_trainer_logs_beside_other_loggers_and_on_rank_zero_alone(tmp_path: Path) -> None:
    for names in run_ranks(train_as_ranked, 2, str(tmp_path)):
        assert names == ["CSVLog", "CSVLogger"]
    assert [path.name for path in tmp_path.glob("rank-*.csv")] == ["rank-0.csv"]
    ours, other = losses_by_step(tmp_path / "rank-0.csv"), read_rows(tmp_path / "other" / "0" / "metrics.csv")
    assert list(ours) == [1, 2, 3]
    assert [float(row[LOSS]) for row in other] == list(ours.values())
