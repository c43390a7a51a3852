"""The imports of a fit before those of Lightning: packages for other metrics are left out, unless others need them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from genesis.cli.start_fit import _NO_WRITER, names_others
from tests.cli.test_main import modules_after


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], False),
        (["--trainer.strategy.class_path=genesis.strategies.Sharded", "--data.seq_len", "16"], False),
        (["--trainer.logger", "lightning.pytorch.loggers.CSVLogger"], False),
        (["--trainer.callbacks+=mine.metrics.BertScore"], True),
        (["--trainer.callbacks", json.dumps([{"class_path": "tests.cli.test_run.SendSignals"}])], True),
        (["--data.prompts.reward", "reward.py:score"], True),
        (["--config", "RECIPE"], True),
    ],
)
def test_code_of_others_is_found_in_arguments_and_recipes(words: list[str], expected: bool, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer: {callbacks: [{class_path: torchmetrics.text.BERTScore}]}\n")
    assert names_others([str(recipe) if word == "RECIPE" else word for word in words]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fit --config a.yaml", False),
        ("--checkpoint.mode process", False),
        ("--checkpoint.mode sync", True),
        ("--checkpoint.mode=thread", True),
        ("checkpoint:\n  mode: thread\n", True),
        ("--print_config", True),
        ("trainer: {fast_dev_run: true}", True),
        ("trainer: {fast_dev_run: false}", False),
    ],
)
def test_no_writer_starts_early_for_a_fit_that_has_none(text: str, expected: bool) -> None:
    assert (_NO_WRITER.search(text) is not None) == expected


@pytest.mark.slow
def test_a_fit_imports_no_packages_for_metrics_of_others() -> None:
    program = "from genesis.cli.start_fit import import_torchmetrics\nimport_torchmetrics([])\nimport genesis.cli.fit"
    assert not {"google.protobuf", "matplotlib", "regex", "scipy", "transformers"} & modules_after(program)


@pytest.mark.slow
def test_a_fit_forks_its_writer_which_is_found_as_one() -> None:
    program = """
import os, sys
from genesis.base.processes import Mark, find_kind, find_processes
from genesis.cli.start_fit import begin_fit
begin_fit([])
from genesis_callbacks.checkpoint.forked_writer import ForkedWriter
from genesis_callbacks.checkpoint.writer_process import WriterProcess
writer = WriterProcess()
writer.wait_ready()
assert isinstance(writer._process, ForkedWriter)
print([find_kind(process) for process in find_processes(Mark("WRITER_OF", "this")) if process.pid != os.getpid()])
"""
    environment = {**os.environ, "WRITER_OF": "this"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "['writer']\n"
