"""Forged checkpoints: no call on one runs code, ends in a traceback, hangs or takes gigabytes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_module
from tests.forged.checkpoints import FORGERIES

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_QUICK = 8
"""Kinds of forgeries in the quick tier."""


def attack(run: Path, directory: Path, seed: int, count: int) -> dict[str, Any]:
    done = run_module("tests.forged.checkpoints", run, directory, str(seed), str(count), cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def check(result: dict[str, Any], count: int) -> None:
    assert not result["failures"], json.dumps(result["failures"][:5], indent=1)
    assert result["num_ran_code"] == 0
    assert result["num_calls"] >= 15 * count


@pytest.mark.process
@pytest.mark.parametrize("count", [NUM_QUICK, pytest.param(len(FORGERIES), marks=pytest.mark.slow)])
def test_one_forgery_of_each_kind_ends_every_call_in_a_line_of_text(run: Path, tmp_path: Path, count: int) -> None:
    check(attack(run, tmp_path, 0, count), count)


@pytest.mark.repeat
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_other_forgeries_of_each_kind_end_every_call_in_a_line_of_text(run: Path, tmp_path: Path) -> None:
    """Five hundred take minutes of a core: benchmarks/records/forged-checkpoints.md has their results."""
    check(attack(run, tmp_path, 1, 4 * len(FORGERIES)), 4 * len(FORGERIES))
