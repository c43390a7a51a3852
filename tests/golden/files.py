"""Golden texts: what a review sees when a result changes. `make golden` writes them again."""

import os
from pathlib import Path

GOLDEN = Path(__file__).parent


def read_golden(name: str, fresh: str) -> str:
    """Returns the golden text `name`; with GENESIS_UPDATE_GOLDEN=1 it becomes `fresh` before."""
    path = GOLDEN / name
    if os.environ.get("GENESIS_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fresh, encoding="utf-8")
    assert path.exists(), f"there is no golden text {name}; `make golden` writes it"
    return path.read_text(encoding="utf-8")
