"""The engine asks one module for whatever an accelerator does, and that module asks torch for any accelerator alike."""

import re
from pathlib import Path

import genesis_callbacks
from genesis_callbacks.checkpoint.device import read_rng_state

SOURCES = Path(genesis_callbacks.__file__).parent
ONE_DEVICE = re.compile(r"torch\.(cuda|xpu|mps|hip)\b|\.is_cuda\b|\.cuda\(")
ANY_DEVICE = re.compile(r"torch\.(accelerator\b|Stream\(|Event\()")


def test_no_module_names_one_kind_of_accelerator() -> None:
    found = [path.name for path in SOURCES.rglob("*.py") if ONE_DEVICE.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_one_module_makes_streams_and_events() -> None:
    found = [path.name for path in SOURCES.rglob("*.py") if ANY_DEVICE.search(path.read_text(encoding="utf-8"))]
    assert found == ["device.py"]


def test_on_the_cpu_generators_are_saved_as_ever() -> None:
    assert list(read_rng_state()) == ["python", "numpy", "torch"]
