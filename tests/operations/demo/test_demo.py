"""The README's first command, shortened: a real kill, a real resume, and a picture that shows both."""

import csv
import json
import re
from pathlib import Path

import pytest

from genesis.cli.main import main
from genesis.operations.demo.scale import scale_recipe
from tests.commands import REPOSITORY, STDOUT, run_genesis
from tests.operations.demo.picture import check_picture

STEPS = 40
RECIPE = {
    "trainer": {"max_steps": 1000, "log_every_n_steps": 5, "val_check_interval": 200},
    "checkpoint": {"every_n_steps": 100, "keep_every_n_steps": 200},
}


def test_everything_that_counts_steps_is_scaled() -> None:
    words = scale_recipe(RECIPE, 60)
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--trainer.max_steps": "60",
        "--data.limit_validation_sequences": "64",
        "--checkpoint.every_n_steps": "6",
        "--checkpoint.keep_every_n_steps": "12",
        "--trainer.log_every_n_steps": "1",
        "--trainer.val_check_interval": "12",
    }


def test_too_few_steps_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert main(["demo", "--steps", "5"]) == 2
    assert (
        capsys.readouterr().err
        == "genesis: error: --steps is 5; give at least 40, so that a kill comes between two saves\n"
    )


@pytest.mark.demo
@pytest.mark.early
@pytest.mark.process
@pytest.mark.timeout(900)
def test_the_short_demo_is_killed_goes_on_and_draws_what_happened(tmp_path: Path) -> None:
    interrupted = tmp_path / "runs/demo/tokenizer"  # of an earlier demo
    interrupted.mkdir(parents=True)
    (interrupted / "tokenizer.model").touch()
    done = run_genesis("demo", "--steps", str(STEPS), cwd=tmp_path, stderr=STDOUT)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "runs/demo/tokenizer.before-1/tokenizer.model").exists()
    said = re.search(r"SIGKILL at step (\d+); the newest checkpoint is step-(\d+)", done.stdout)
    assert said, done.stdout
    killed_at, resumed_from = map(int, said.groups())
    assert STEPS // 2 <= resumed_from < killed_at < STEPS
    run_dir = tmp_path / "runs/demo/run"
    # The run was begun once and resumed once, and lost no step.
    assert (run_dir / "config.yaml").exists()
    assert (run_dir / "config.resume-1.yaml").exists()
    assert not (run_dir / "config.resume-2.yaml").exists()
    with (run_dir / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, STEPS + 1))
    manifest = json.loads((run_dir / f"checkpoints/step-{STEPS:08d}/manifest.json").read_text())
    assert manifest["counters"]["updates"] == STEPS
    check_picture(run_dir / "loss.png", run_dir / "metrics.csv", killed_at, resumed_from)
    assert "Left out" in (run_dir / "report.html").read_text()
    assert {"overview.png", "loss.png", "timeline-0.png"} <= {path.name for path in (run_dir / "pictures").iterdir()}
    # Two texts for each prompt: of an early and of the last checkpoint.
    assert done.stdout.count("class Stack:") >= 2
    assert " at the start)" in done.stdout
