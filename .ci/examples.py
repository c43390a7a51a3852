"""Runs the examples in the docstrings of both distributions, those of modules that have any."""

import doctest
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Prints each example that gives something else than it says; the status is 1 then."""
    failed = 0
    for parent, package in ((ROOT, "genesis"), (ROOT / "callbacks" / "src", "genesis_callbacks")):
        for path in sorted((parent / package).rglob("*.py")):
            if "\n    >>> " in path.read_text(encoding="utf-8") or "        >>> " in path.read_text(encoding="utf-8"):
                name = ".".join(path.relative_to(parent).with_suffix("").parts).removesuffix(".__init__")
                failed += doctest.testmod(importlib.import_module(name)).failed
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
