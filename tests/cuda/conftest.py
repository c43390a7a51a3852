"""Tests for a real accelerator, deselected without one: `pytest -m cuda tests/cuda`.

GENESIS_TEST_DEVICE names another kind of device than cuda, to try the tests out (`simulated`, `xpu`).
"""

import os
from pathlib import Path

import pytest

from genesis.base.device import count_devices, is_available
from genesis.operations.doctor.fits import SIZES
from genesis.operations.doctor.probe import Probe, Task

KIND = os.environ.get("GENESIS_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_available(KIND):
        return
    here = Path(__file__).parent
    gone = [item for item in items if here in item.path.parents]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if here not in item.path.parents]


@pytest.fixture
def kind() -> str:
    return KIND


@pytest.fixture
def all_devices() -> int:
    return count_devices(KIND)


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    """Collects what a part of the doctor finds, with a tiny shape."""
    assert "tiny" in SIZES
    return Probe(Task(KIND, "tiny", str(tmp_path)))
