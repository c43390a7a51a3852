"""Runs the command line within the test's process: importing Lightning costs many seconds in a new one."""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Before a test captures stderr: Lightning's log keeps the stderr that it finds when it is imported.
import lightning.pytorch  # noqa: F401
import pytest
import torch.distributed as dist

from genesis.cli.main import main
from tests.cli.tiny import build_recipe, write_recipe


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


Genesis = Callable[..., Outcome]


@pytest.fixture
def genesis(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Genesis:
    """Returns a function that runs `genesis` with its arguments, as a shell would."""
    # A run sets it; it must not outlive the test.
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["genesis", *arguments])
        capsys.readouterr()
        environment = dict(os.environ)
        try:
            status = main(list(arguments))
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            # Lightning leaves these to the process's end.
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(environment)
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def recipe(tmp_path: Path, tiny_corpus: Path) -> Path:
    return write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, tmp_path / "run"))
