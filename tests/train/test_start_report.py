"""The lines at the start of a fit that are functions of the Trainer's settings alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from genesis.train import start_report
from genesis.train.start_report import describe_limits


@pytest.mark.parametrize(
    ("limits", "beginnings"),
    [
        ({}, []),
        (
            {"limit_train_batches": 1},
            ["trainer.limit_train_batches is 1: an epoch ends after 1 step, and the next one"],
        ),
        ({"limit_train_batches": 0.25}, ["trainer.limit_train_batches is 0.25: an epoch ends after 0.25 of the data"]),
        (
            {"overfit_batches": 3, "limit_train_batches": 3},
            [
                "trainer.overfit_batches is 3: an epoch ends after 3 steps",
                "trainer.overfit_batches is 3: validations end",
            ],
        ),
    ],
)
def test_limits_on_batches_are_lines(limits: dict[str, float], beginnings: list[str]) -> None:
    lines = list(describe_limits({"overfit_batches": 0.0, "limit_train_batches": 1.0, **limits}))
    assert len(lines) == len(beginnings)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, beginnings, strict=True))


def test_a_fit_of_a_run_that_was_complete_says_that_nothing_was_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(start_report, "rank_zero_info", lines.append)
    report = start_report.StartReport()
    trainer: Any = SimpleNamespace(is_global_zero=True, global_step=1)
    module: Any = SimpleNamespace()
    report.on_fit_end(trainer, module)
    assert lines == ["nothing to do: the run has its 1 step; to go on, make the run longer (trainer.max_steps)"]
    report.on_train_start(trainer, module)
    report.on_fit_end(trainer, module)
    assert len(lines) == 1
