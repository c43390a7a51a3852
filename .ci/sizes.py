"""Fails if a module or class of the two packages is too large; `--statistics` prints the sizes.

A module has at most MAX_LINES lines and a class at most MAX_METHODS methods. EXCEPTIONS lists larger modules and
classes with the reason; an exception that is no longer needed is also a failure.
"""

import argparse
import ast
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("genesis", "callbacks/src")
MAX_LINES = 500
MAX_METHODS = 30

EXCEPTIONS: dict[str, str] = {}
"""`path` or `path::Class`, and why the module or class may be larger."""


def measure_modules(root: Path) -> dict[str, int]:
    """Returns the number of lines of every module, by its path below `root`."""
    return {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def measure_classes(root: Path) -> dict[str, int]:
    """Returns the number of methods of every class, as `path::Class`; inherited methods are not counted."""
    sizes = {}
    for name in measure_modules(root):
        for node in ast.walk(ast.parse((root / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))]
                sizes[f"{name}::{node.name}"] = len(methods)
    return sizes


def find_faults(root: Path, exceptions: dict[str, str]) -> list[str]:
    """Returns a line for each module and class that is too large, and for each exception that is not needed."""
    modules, classes = measure_modules(root), measure_classes(root)
    large = {name: f"{size} lines, more than {MAX_LINES}" for name, size in modules.items() if size > MAX_LINES}
    large |= {name: f"{size} methods, more than {MAX_METHODS}" for name, size in classes.items() if size > MAX_METHODS}
    return [
        *(
            f"{name} has {size}: split it, or name it in .ci/sizes.py with the reason"
            for name, size in large.items()
            if name not in exceptions
        ),
        *(
            f"{name} is not too large: remove it from the exceptions in .ci/sizes.py"
            for name in exceptions
            if name not in large
        ),
    ]


def print_statistics(root: Path) -> None:
    """Prints median, 90th percentile and maximum of the modules' lines, and the class with the most methods."""
    modules, classes = measure_modules(root), measure_classes(root)
    lines = sorted(size for size in modules.values() if size)
    longest, largest = max(modules, key=modules.__getitem__), max(classes, key=classes.__getitem__)
    print(f"modules        {len(lines)}, without empty ones")
    print(f"lines, median  {statistics.median(lines):.0f}")
    print(f"lines, p90     {statistics.quantiles(lines, n=10)[-1]:.0f}")
    print(f"lines, max     {modules[longest]}  {longest}")
    print(f"methods, max   {classes[largest]}  {largest}")


def main() -> int:
    """Prints the faults, or the statistics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--statistics", action="store_true", help="print how large modules and classes are")
    if parser.parse_args().statistics:
        print_statistics(ROOT)
        return 0
    faults = find_faults(ROOT, EXCEPTIONS)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
