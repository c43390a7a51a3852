"""`genesis fit` straight from raw shards: killed and resumed, equal to a run that was not."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import run_genesis, start_genesis
from tests.data.dataset_hub import serve_datasets
from tests.data.stream.streams import make_texts, make_tokenizer, write_files

DEADLINE_SECONDS = 120
POLL_SECONDS = 0.02
STEPS = 30


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with a tokenizer, and two sources in compressed files."""
    directory = tmp_path_factory.mktemp("sources")
    make_tokenizer(directory)
    write_files(directory / "web", make_texts(200, seed=1), ".jsonl.zst")
    write_files(directory / "code", make_texts(100, seed=2), ".jsonl.gz")
    return directory


def build_streamed_recipe(sources: Path, run_dir: Path, **stream: Any) -> dict[str, Any]:
    recipe = build_recipe(sources, run_dir)
    del recipe["data"]["corpus"]
    recipe["data"]["packing"] = "best_fit"
    recipe["data"]["stream"] = {
        "tokenizer": str(sources),
        "sources": [
            {"name": "web", "paths": [str(sources / "web")], "weight": 2},
            {"name": "code", "paths": [str(sources / "code")], "weight": 1},
        ],
        "block_tokens": 400,
        "num_workers": 1,
        **stream,
    }
    recipe["trainer"] |= {"max_steps": STEPS, "limit_val_batches": 0}
    recipe["checkpoint"] |= {"every_n_steps": 3, "keep_last": 3}
    return recipe


def losses(run_dir: Path) -> list[tuple[str, str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        return [(row["step"], row["train/loss"], row["data/tokens_web"]) for row in csv.DictReader(file)]


def digests(run_dir: Path) -> dict[str, Any]:
    manifest = json.loads((run_dir / f"checkpoints/step-{STEPS:08d}/manifest.json").read_text())
    return {name: tensor["digest"] for name, tensor in manifest["tensors"].items()}


@pytest.mark.slow
@pytest.mark.repeat  # a resume at every step is in `tests/train/test_stream_data_module.py`
def test_a_streamed_run_that_is_killed_and_resumed_equals_one_that_was_not(
    genesis: Genesis, sources: Path, tmp_path: Path
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    recipe = write_recipe(tmp_path / "straight.yaml", build_streamed_recipe(sources, straight))
    outcome = genesis("fit", "--config", str(recipe))
    assert outcome.status == 0, outcome.err
    recipe = write_recipe(tmp_path / "killed.yaml", build_streamed_recipe(sources, killed))
    process = start_genesis("fit", "--config", recipe)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not list(killed.glob("checkpoints/step-*[69]/COMMITTED")):
            assert process.poll() is None
            assert time.monotonic() < deadline, "training did not begin"
            time.sleep(POLL_SECONDS)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    # With other workers: how many there are does not matter.
    resumed = genesis("fit", "--config", str(recipe), "--ckpt_path", "latest", "--data.stream.num_workers", "2")
    assert resumed.status == 0, resumed.err
    resumed_recipe = yaml.safe_load((killed / "config.resume-1.yaml").read_text())
    assert resumed_recipe["data"]["stream"]["num_workers"] == 2
    assert len(losses(straight)) == STEPS
    # Also the row of the step that was saved right before the kill.
    assert losses(killed) == losses(straight)
    assert digests(killed) == digests(straight)
    with (straight / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert float(last["data/tokens_per_second"]) > 0.0
    assert float(last["data/headroom"]) > 0.0
    assert float(last["data/queue_depth_0"]) >= 0.0
    assert 0.5 < float(last["data/packer_fill"]) <= 1.0


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"data.stream.tokenizer": None}, ("the stream has no tokenizer", "give data.stream.tokenizer")),
        ({"data.max_epochs": {"wbe": 1}}, ("data.max_epochs names the source 'wbe'",)),
        ({"data.mix": {"wbe": 1}}, ("did you mean 'web'?",)),
        ({"data.stream": None}, ("there is nothing to train on", "data.stream")),
    ],
)
def test_a_bad_stream_is_refused_in_one_line(
    genesis: Genesis, sources: Path, tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", build_streamed_recipe(sources, tmp_path / "run"), changes)
    outcome = genesis("fit", "--config", str(path))
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("genesis: error: ")
    assert outcome.err.count("\n") == 1, outcome.err
    assert all(part in outcome.err for part in parts), outcome.err


@pytest.mark.slow
def test_a_resume_on_changed_files_is_refused(genesis: Genesis, sources: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "sources" / "web", make_texts(60, seed=1), ".jsonl")
    write_files(tmp_path / "sources" / "code", make_texts(60, seed=2), ".jsonl")
    tokenizer = {"data.stream.tokenizer": str(sources), "trainer.max_steps": 3}
    recipe = build_streamed_recipe(tmp_path / "sources", tmp_path / "run")
    path = write_recipe(tmp_path / "recipe.yaml", recipe, tokenizer)
    assert genesis("fit", "--config", str(path)).status == 0
    with (tmp_path / "sources" / "web" / "0.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    outcome = genesis(
        *("fit", "--config", str(path), "--ckpt_path", "latest", "--trainer.max_steps", "6"),
        *("--checkpoint.allow_changed", "[trainer.max_steps,stream]"),
    )
    assert outcome.status == 2
    assert "the checkpoint's stream has files web: " in outcome.err


@pytest.mark.slow
def test_a_stream_from_the_hub_trains_as_one_from_local_files(sources: Path, tmp_path: Path) -> None:
    with serve_datasets() as hub:
        files = [path for path in sources.rglob("*") if path.parent.name in ("web", "code")]
        hub.datasets["lab/texts"] = {"v1": {str(path.relative_to(sources)): path.read_bytes() for path in files}}
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        for name, place in (("local", str(sources)), ("hub", "hf://datasets/lab/texts@v1")):
            recipe = build_streamed_recipe(sources, tmp_path / name)
            for source in recipe["data"]["stream"]["sources"]:
                source["paths"] = [f"{place}/{source['name']}"]
            recipe["trainer"]["max_steps"] = 3
            written = write_recipe(tmp_path / f"{name}.yaml", recipe)
            cache = {"GENESIS_CACHE_DIR": str(tmp_path / "cache")}
            fit = ["fit", "--config", str(written)]
            if name == "local":
                done = run_genesis(*fit, env={**environment, **cache}, cwd=tmp_path)
            else:  # A real start: what imports the Hub's client reads the address of the Hub.
                python = [sys.executable, "-m", "genesis", *fit]
                done = subprocess.run(
                    python, env={**environment, **cache}, cwd=tmp_path, capture_output=True, text=True
                )
            assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "hub") == losses(tmp_path / "local")
    assert len(losses(tmp_path / "hub")) == 3
