"""A run by the command line: what it leaves behind, a signal in its middle, and going on."""

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe

DEADLINE_SECONDS = 120
POLL_SECONDS = 0.05


def logged_steps(run_dir: Path) -> list[int]:
    with (run_dir / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def committed_steps(run_dir: Path) -> list[int]:
    return sorted(int(marker.parent.name[5:]) for marker in run_dir.glob("checkpoints/step-*/COMMITTED"))


def test_a_run_leaves_its_recipe_its_log_and_its_checkpoints(genesis: Genesis, recipe: Path) -> None:
    run_dir = recipe.parent / "run"
    assert genesis("fit", "--config", str(recipe)).status == 0
    assert committed_steps(run_dir) == [2, 4]
    assert logged_steps(run_dir) == [1, 2, 3, 4]
    resolved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert resolved["model"]["decoder"]["dim"] == 32
    assert resolved["data"]["prefetch_windows"] == 2


def test_the_recipe_that_a_run_leaves_makes_the_same_run(genesis: Genesis, recipe: Path, tmp_path: Path) -> None:
    assert genesis("fit", "--config", str(recipe)).status == 0
    left = tmp_path / "run" / "config.yaml"
    again = genesis("fit", "--config", str(left), "--run_dir", str(tmp_path / "again"))
    assert again.status == 0
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


def losses(run_dir: Path) -> list[str]:
    with (run_dir / "metrics.csv").open() as file:
        return [row["train/loss"] for row in csv.DictReader(file)]


def test_a_validation_prints_the_loss_and_leaves_the_run_alone(genesis: Genesis, recipe: Path) -> None:
    run_dir = recipe.parent / "run"
    assert genesis("fit", "--config", str(recipe)).status == 0
    before = (run_dir / "metrics.csv").read_text()
    outcome = genesis("validate", "--config", str(recipe), "--ckpt_path", "latest")
    assert outcome.status == 0
    assert "validation/loss" in outcome.out
    assert (run_dir / "metrics.csv").read_text() == before
    assert not list(run_dir.glob("config.resume-*.yaml"))


def test_sigterm_in_mid_training_saves_ends_with_143_and_latest_goes_on(
    genesis: Genesis, tiny_corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    endless = {"trainer.max_steps": 1_000_000, "checkpoint.every_n_steps": 1_000_000, "checkpoint.save_at_end": False}
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, run_dir), endless)
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "genesis", "fit", "--config", str(recipe)], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            wait_for_steps(process, run_dir)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM, (tmp_path / "output").read_text()
        finally:
            process.kill()
            process.wait()
    (saved,) = committed_steps(run_dir)
    assert logged_steps(run_dir) == list(range(1, saved + 1))
    resumed = genesis(
        "fit",
        *("--config", str(recipe), "--ckpt_path", "latest", "--trainer.max_steps", str(saved + 2)),
        *("--checkpoint.save_at_end", "true", "--checkpoint.allow_changed", "[trainer.max_steps]"),
    )
    assert resumed.status == 0, resumed.err
    assert committed_steps(run_dir) == [saved, saved + 2]
    assert logged_steps(run_dir) == list(range(1, saved + 3))
    assert (run_dir / "config.resume-1.yaml").exists()


def wait_for_steps(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (run_dir / "metrics.csv").exists() or len(logged_steps(run_dir)) < 3:
        assert process.poll() is None, (run_dir.parent / "output").read_text()
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(POLL_SECONDS)
