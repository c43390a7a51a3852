"""One device needs nobody: no process group, and no port that another program could have or reach."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import REPOSITORY, run_module

DEADLINE_SECONDS = 120


def run_alone(strategy: str, run_dir: Path) -> list[dict[str, Any]]:
    """Runs `alone.py` in a process that no test has given a process group."""
    run_dir.mkdir()
    done = run_module("tests.strategies.alone", strategy, run_dir, cwd=REPOSITORY, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads((run_dir / "seen.json").read_text())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What Lightning's own strategy for one device does."""
    return run_alone("single", tmp_path_factory.mktemp("alone") / "single")


@pytest.mark.parametrize("strategy", ["replicated", pytest.param("zero1", marks=pytest.mark.slow)])
def test_one_device_listens_on_no_port_and_trains_bit_for_bit_as_lightnings_own_strategy(
    strategy: str, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    seen = run_alone(strategy, tmp_path / "run")
    assert [run["step"] for run in seen] == [2, 4]
    assert [run["ports"] for run in seen] == [[], []]
    assert not any(run["has_group"] for run in seen)
    assert seen == expected


@pytest.mark.slow
def test_the_program_sees_the_ports_of_a_process_group(tmp_path: Path) -> None:
    seen = run_alone("full", tmp_path / "run")
    assert all(run["has_group"] for run in seen)
    assert all(run["ports"] for run in seen)
