"""Packed and limited data by the command line: plan, train to the data's end, and go on from each checkpoint."""

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe

NAMES = ("web", "code")


@pytest.fixture
def corpus(tmp_path: Path, tiny_corpus: Path) -> Path:
    """The tiny corpus, to write a plan into."""
    return shutil.copytree(tiny_corpus, tmp_path / "corpus")


def rows_of(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["train/loss"]]


def told(row: dict[str, str]) -> list[str]:
    """What a resume must repeat of a row: not the times."""
    return [
        row[key] for key in ("train/loss", *(f"data/{what}_{name}" for what in ("tokens", "epochs") for name in NAMES))
    ]


@pytest.mark.slow
def test_a_packed_run_ends_with_its_data_and_every_resume_ends_alike(
    genesis: Genesis, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes: dict[str, Any] = {
        "data.packing": "best_fit",
        "data.max_epochs": dict.fromkeys(NAMES, 1),
        "checkpoint.keep_last": None,
        "checkpoint.every_n_steps": 5,
        "trainer.max_steps": 10_000,
        "trainer.val_check_interval": 10_000,
    }
    recipe = str(write_recipe(tmp_path / "recipe.yaml", build_recipe(corpus, tmp_path / "run"), changes))
    refused = genesis("fit", "--config", recipe)
    assert refused.status == 2
    (line,) = refused.err.splitlines()
    assert f"run `genesis data plan {corpus} --packing best_fit --seq_len 16`" in line
    assert genesis("data", "plan", str(corpus), "--packing", "best_fit", "--seq_len", "16").status == 0
    assert genesis("fit", "--config", recipe).status == 0
    assert "every source has reached its epoch limit: training ends at position" in caplog.text
    straight = rows_of(tmp_path / "run")
    assert [int(row["step"]) for row in straight] == list(range(1, len(straight) + 1))
    assert 0.9 < float(straight[-1]["data/epochs_web"]) <= 1.0
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(checkpoints) > 2
    for checkpoint in checkpoints:
        name = f"from-{checkpoint.name}"
        assert genesis("fit", "--config", recipe, "--fork", name, "--ckpt_path", str(checkpoint)).status == 0
        step = int(checkpoint.name.removeprefix("step-"))
        resumed = rows_of(tmp_path / name) if step < len(straight) else []
        assert [told(row) for row in resumed] == [told(row) for row in straight[step:]]
