"""The main road under `python -O`, which leaves asserts out. `tests/test_asserts.py` proves that asserts do no work."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.tiny import build_recipe, write_recipe
from tests.data.corpus_support import make_texts, make_tokenizer, write_jsonl

_MAIN_ROAD = """
import json, sys
from genesis.cli.main import main

assert False, "python -O leaves this out"
for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command
    status = main(command)
    if status:
        sys.exit(f"genesis {' '.join(command)}: exit status {status}")
"""


def run_optimized(*arguments: str) -> None:
    outcome = subprocess.run([sys.executable, "-O", *arguments], capture_output=True, text=True, timeout=280)
    assert outcome.returncode == 0, outcome.stderr


def read_steps(run_dir: Path) -> list[str]:
    with (run_dir / "metrics.csv").open() as file:
        return [row["step"] for row in csv.DictReader(file) if row["train/loss"]]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Returns a directory with a tokenizer and a file of texts."""
    make_tokenizer(tmp_path)
    write_jsonl(tmp_path / "web.jsonl", make_texts(300, seed=1))
    return tmp_path


@pytest.mark.repeat
@pytest.mark.process
@pytest.mark.slow
def test_prepare_fit_resume_and_generate_work_without_asserts(texts: Path) -> None:
    corpus = {
        "name": "corpus",
        "tokenizer": str(texts),
        "sources": [{"name": "web", "paths": [str(texts / "web.jsonl")]}],
        "validation_fraction": 0.1,
    }
    (texts / "corpus.yaml").write_text(yaml.safe_dump(corpus))
    recipe = build_recipe(texts / "corpus", texts / "run")
    path = write_recipe(texts / "recipe.yaml", recipe, {"checkpoint.mode": "process"})
    fit = ["fit", "--config", str(path)]
    commands = [
        ["data", "prepare", "--config", str(texts / "corpus.yaml"), "--out", str(texts)],
        fit,
        [
            *fit,
            "--ckpt_path",
            "latest",
            "--trainer.max_steps",
            "8",
            "--checkpoint.allow_changed",
            "[trainer.max_steps]",
        ],
        ["checkpoint", "verify", str(texts / "run")],
        ["generate", str(texts / "run"), "--max_new_tokens", "4"],
    ]
    run_optimized("-c", _MAIN_ROAD, json.dumps(commands))
    assert read_steps(texts / "run") == [str(step) for step in range(1, 9)]


@pytest.mark.repeat
@pytest.mark.process
@pytest.mark.slow
def test_a_run_from_a_stream_trains_and_saves_without_asserts(texts: Path) -> None:
    recipe: dict[str, Any] = build_recipe(texts, texts / "run")
    del recipe["data"]["corpus"]
    recipe["data"]["stream"] = {
        "tokenizer": str(texts),
        "sources": [{"name": "web", "paths": [str(texts / "web.jsonl")]}],
        "block_tokens": 400,
    }
    recipe["trainer"] |= {"max_steps": 12, "limit_val_batches": 0}
    run_optimized("-m", "genesis", "fit", "--config", str(write_recipe(texts / "recipe.yaml", recipe)))
    assert len(read_steps(texts / "run")) == 12
    assert (texts / "run/checkpoints/step-00000012/COMMITTED").exists()
