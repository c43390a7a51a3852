"""The callbacks stand alone: nothing here can import genesis, in no process."""

import importlib
import subprocess
import sys

import pytest

import genesis_callbacks
from genesis_callbacks.testing import run_ranks


def import_genesis() -> str:
    try:
        return str(importlib.import_module("genesis").__file__)
    except ModuleNotFoundError:
        return "absent"


def test_genesis_is_absent_here_in_ranks_and_in_programs() -> None:
    assert import_genesis() == "absent"
    assert run_ranks(import_genesis, 1) == ["absent"]
    program = subprocess.run([sys.executable, "-c", "import genesis"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in program.stderr


@pytest.mark.parametrize("name", genesis_callbacks.__all__)
def test_every_callback_is_there_without_it(name: str) -> None:
    assert getattr(genesis_callbacks, name).__name__ == name
