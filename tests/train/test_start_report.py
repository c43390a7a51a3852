"""The lines at the start of a fit that are functions of the Trainer's settings alone."""

import pytest

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
