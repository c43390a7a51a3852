"""A trace of chosen steps, and nothing otherwise."""

import json
from pathlib import Path

import pytest
from clock_runs import LIGHTNING_WARNINGS, Module, loader, trainer

from genesis_callbacks import StepTimer, TraceSteps
from genesis_callbacks.base.errors import UserError
from genesis_callbacks.trace_steps import TraceWarning

pytestmark = LIGHTNING_WARNINGS


def fit(directory: Path, *callbacks, num_steps: int = 6):
    run = trainer(directory, list(callbacks))
    run.fit(Module(), loader([1] * num_steps))
    return run


def test_traces_hold_the_operators_of_their_steps_under_the_names_of_hooks(tmp_path: Path) -> None:
    timer = StepTimer()
    run = fit(tmp_path, TraceSteps([3, 1, 2, 5, 90], tmp_path / "run"), timer)
    files = sorted(path.name for path in (tmp_path / "run/traces").iterdir())
    assert files == ["steps-1-3-rank-0.json", "steps-5-5-rank-0.json"]
    first = [
        event.get("name", "") for event in json.loads((tmp_path / f"run/traces/{files[0]}").read_text())["traceEvents"]
    ]
    assert first.count("[Strategy]SingleDeviceStrategy.training_step") == 3
    assert "aten::addmm" in first
    assert "start" not in vars(run.profiler)
    assert run.callback_metrics["time/step_ms"] > 0


def test_without_steps_nothing_is_written_and_nobody_listens(tmp_path: Path) -> None:
    fit(tmp_path, TraceSteps(run_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_trace_ends_with_the_run_and_other_ranks_have_none(tmp_path: Path) -> None:
    fit(tmp_path, TraceSteps([4, 5, 6, 7], tmp_path / "a"), TraceSteps([1], tmp_path / "b", ranks=[1]))
    assert [path.name for path in (tmp_path / "a/traces").iterdir()] == ["steps-4-5-rank-0.json"]
    assert not (tmp_path / "b").exists()


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.warns(TraceWarning, match="the trace of step 1 is not written"):
        fit(tmp_path, TraceSteps([1], tmp_path / "run"))


def test_a_step_before_the_first_is_refused() -> None:
    with pytest.raises(UserError, match="steps has -1"):
        TraceSteps([2, -1])
