"""The check of sizes finds modules and classes that have grown too large."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REMEDY = ": split it, or name it in .ci/sizes.py with the reason"
SCRIPT = Path(__file__).parents[1] / ".ci" / "sizes.py"


@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sizes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_module(root: Path, name: str, num_lines: int, num_methods: int) -> None:
    methods = "".join(
        f"    async def m{n}(self): ...\n" if n % 2 else f"    def m{n}(self): ...\n" for n in range(num_methods)
    )
    text = f"class Large:\n    x = 1\n{methods}"
    path = root / "genesis" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n" * (num_lines - text.count("\n")))


def test_what_is_at_the_limit_passes_and_what_is_over_it_is_named(sizes: ModuleType, tmp_path: Path) -> None:
    write_module(tmp_path, "good.py", 500, 30)
    assert sizes.find_faults(tmp_path, {}) == []
    write_module(tmp_path, "long.py", 501, 30)
    write_module(tmp_path, "inner/large.py", 100, 31)
    assert sizes.find_faults(tmp_path, {}) == [
        f"genesis/long.py has 501 lines, more than 500{REMEDY}",
        f"genesis/inner/large.py::Large has 31 methods, more than 30{REMEDY}",
    ]
    assert sizes.find_faults(tmp_path, {"genesis/long.py": "why", "genesis/inner/large.py::Large": "why"}) == []


def test_an_exception_that_is_no_longer_needed_is_named(sizes: ModuleType, tmp_path: Path) -> None:
    write_module(tmp_path, "good.py", 10, 1)
    (fault,) = sizes.find_faults(tmp_path, {"genesis/good.py": "it was long"})
    assert fault == "genesis/good.py is not too large: remove it from the exceptions in .ci/sizes.py"


def test_every_exception_has_a_reason(sizes: ModuleType) -> None:
    assert all(len(reason.split()) > 3 for reason in sizes.EXCEPTIONS.values())


@pytest.mark.slow
def test_statistics_are_printed() -> None:
    out = subprocess.run([sys.executable, SCRIPT, "--statistics"], capture_output=True, text=True, check=True).stdout
    assert [line.split(",")[0].split()[0] for line in out.splitlines()] == [
        "modules",
        "lines",
        "lines",
        "lines",
        "methods",
    ]
