"""The simulated device as a backend that `import torch` loads, in every process with this directory in PYTHONPATH.

PYTHONPATH=callbacks/tests/simulated/backend genesis doctor --device simulated
"""

import importlib.util
from pathlib import Path


def load() -> None:
    """Makes the simulated device this process's accelerator; torch calls it at the end of its import."""
    path = Path(__file__).resolve().parents[1] / "runtime.py"
    spec = importlib.util.spec_from_file_location("genesis_simulated_runtime", path)
    assert spec is not None
    assert spec.loader is not None
    runtime = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runtime)
    runtime.load()
