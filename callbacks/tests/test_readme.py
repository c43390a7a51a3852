"""The README: its code runs, and its tables name every option with its default."""

import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from genesis_callbacks import (
    AsyncProcessCheckpoint,
    CheckpointVerification,
    ResumableLoader,
    SkipAwareLR,
    TokenCounters,
)
from genesis_callbacks.checkpoint import list_committed

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run_blocks(*blocks: str) -> dict[str, object]:
    """Runs blocks one after another as a reader would, and returns their names."""
    names: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning has advice for a toy model
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_readmes_code_starts_a_run_goes_on_and_reads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, script, reading, inference, story = BLOCKS
    run_blocks(script.replace("max_steps=60", "max_steps=30"))
    assert [manifest.step for _, manifest in list_committed("runs/mine")] == [20, 30]
    names = run_blocks(script, reading, inference, story)
    assert names["checkpoint"].restore_report.step == 30
    assert [manifest.step for _, manifest in list_committed("runs/mine")] == [30, 40, 60]
    assert list_committed("runs/mine")[-1][1].counters == {
        "step": 60,
        "tokens_seen": 60 * 32,
        "updates": 60,
        "tokens_updated": 60 * 32,
    }
    assert [event.kind for event in names["new_ones"]].count("started") == 2
    assert (names["event"].kind, names["event"].step) == ("ended", 60)
    assert names["weights"].keys() == {"model.layer.weight", "model.layer.bias"}
    for name, tensor in names["model"].state_dict().items():
        assert torch.equal(tensor, names["weights"][f"model.{name}"])


def test_the_example_is_ten_lines_or_so():
    lines = [line for line in BLOCKS[1].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 10


FIRST_ROW = ("AsyncProcessCheckpoint", "ResumableLoader", "46 of 46")


@pytest.mark.process
@pytest.mark.parametrize(
    "num_rows",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_the_experiment_at_its_top_gives_the_figures_that_stand_there(tmp_path, num_rows):
    rows = re.findall(r"^\|.*`(\w+)` \|.*`(\w+)` \| (\d+ of \d+) \|", README, re.MULTILINE)
    assert (len(rows), rows[0]) == (4, FIRST_ROW)
    script = BLOCKS[0]
    if num_rows == 1:
        for both in ('("AsyncProcessCheckpoint", "ModelCheckpoint")', '("ResumableLoader", "DataLoader")'):
            assert both in script
            script = script.replace(both, both.split(",")[0] + ",)")
    (tmp_path / "experiment.py").write_text(script, encoding="utf-8")
    run = subprocess.run([sys.executable, "experiment.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    printed = re.findall(r"(\w+) and (\w+): (\d+ of \d+) tensors are equal", run.stdout)
    assert sorted(printed) == sorted(rows[:num_rows])
    assert len(list(tmp_path.glob("*/killed"))) == num_rows


OPTIONS = [AsyncProcessCheckpoint, CheckpointVerification, ResumableLoader, TokenCounters, SkipAwareLR]


@pytest.mark.parametrize("kind", OPTIONS)
def test_each_option_stands_in_the_table_of_its_callback(kind):
    section = re.search(rf"### {kind.__name__}\n(.*?)(\n### |\Z)", README, re.DOTALL)
    assert section is not None
    rows = [line.split("|") for line in section[1].splitlines() if line.startswith("| `")]
    cells = {name: row[2].strip() for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    parameters = inspect.signature(kind).parameters
    assert cells.keys() == parameters.keys()
    for name, parameter in parameters.items():
        if parameter.default not in (None, inspect.Parameter.empty):
            assert cells[name] == repr(parameter.default).replace("'", '"'), name
