"""Which rows of the table apply to which metrics."""

import math

import pytest

from genesis_callbacks.symptoms import SYMPTOMS, find_symptoms, render_table, summarize_series


def names(metrics: dict[str, float]) -> list[str]:
    return [row.name for row in find_symptoms(metrics)]


@pytest.mark.parametrize("row", SYMPTOMS, ids=[row.name for row in SYMPTOMS])
def test_each_row_applies_just_beyond_its_bounds_and_not_within_them(row) -> None:
    crossed, kept = {}, {}
    for condition in row.conditions:
        whole = 1.0 if condition.of is None else 200.0
        step = 0.001 if condition.is_above else -0.001
        crossed[condition.key] = whole * (condition.bound + step)
        kept[condition.key] = whole * (condition.bound - step)
        if condition.of is not None:
            crossed[condition.of] = kept[condition.of] = whole
    assert row.name in names(crossed)
    assert row.name not in names(kept)


def test_missing_and_bad_values_are_no_symptom() -> None:
    assert names({}) == []
    assert names({"time/data_wait_ms": 5.0, "time/step_ms": 0.0}) == []
    assert names({"time/data_wait_ms": math.nan, "time/step_ms": 1.0, "gradient/nonfinite": math.inf}) == []


def test_a_series_gives_medians_counts_and_trends() -> None:
    steps = [100.0] * 12 + [200.0] * 4
    losses = [4.0, 3.9, 3.8, 3.7, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, math.nan]
    summary = summarize_series({"time/step_ms": steps, "train/loss": losses, "gradient/spikes": [0.0, 1.0, 7.0]})
    assert summary["gradient/spikes"] == 7.0
    assert (summary["time/step_ms"], summary["trend/step_ms"], summary["trend/loss"]) == (100.0, 2.0, 1.5)
    assert names(summary) == ["step_time_rises", "loss_rises", "spikes"]
    assert "trend/step_ms" not in summarize_series({"time/step_ms": [1.0] * 15})


def test_the_table_has_a_line_for_each_row() -> None:
    lines = render_table().splitlines()
    assert len(lines) == 2 + len(SYMPTOMS)
    assert all(line.count("|") == 5 for line in lines)
