"""The fake CUDA's shim, compiled for the torch at hand; without a compiler the tests are skipped, or fail in CI."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

REQUIRED: Final = "GENESIS_REQUIRE_COMPILER"
"""Set to 1 where a missing compiler is a failure."""

_SOURCE: Final = Path(__file__).with_name("shim.cpp")


def find_compiler() -> str:
    """Returns the C++ compiler. Without one it skips the test, or fails it where one is required."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is not None:
        return found
    reason = "there is no g++ (nor what CXX names) to build the fake CUDA with"
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{reason}, and {REQUIRED} is 1")
    pytest.skip(reason)


def build_shim() -> Path:
    """Returns the compiled shim; it is kept in the directory for temporary files, by source and version of torch."""
    compiler = find_compiler()
    spec = importlib.util.find_spec("torch")  # not imported: its own process loads the shim before
    assert spec is not None
    assert spec.submodule_search_locations is not None
    torch = Path(spec.submodule_search_locations[0])
    key = hashlib.sha256(_SOURCE.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode()).hexdigest()
    built = Path(tempfile.gettempdir()) / f"genesis-fakecuda-{os.getuid()}-{key[:16]}.so"
    if not built.exists():
        own = built.with_suffix(f".{os.getpid()}")
        command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", str(_SOURCE), "-o", str(own)]
        command += [
            f"-I{torch / 'include'}",
            f"-L{torch / 'lib'}",
            "-lc10",
            "-ltorch_cpu",
            f"-Wl,-rpath,{torch / 'lib'}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        own.rename(built)
    return built
