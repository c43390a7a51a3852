"""Fails if a package has more lines than `.ci/budget.txt` allows; `--write` puts today's lines there, rounded up.

Code is a cost, and the whole counts, not the file. A commit that needs more lines raises the number of its package and
says why; a commit that deletes lines lowers it.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / ".ci" / "budget.txt"
PARENTS = ("genesis", "genesis/operations", "callbacks/src/genesis_callbacks")
"""Each directory below these is a package with a budget of its own; what lies loose in them counts as one more."""
STEP = 50
"""Budgets are multiples of it, so that a repair of a few lines needs no new number, and two changes seldom collide."""
MAX_UNUSED = 200
"""The lines by which a budget may exceed its package: with more to spare, growth would need no reason."""


def count_lines(root: Path) -> dict[str, int]:
    """Returns the lines of Python of each package, by its path below `root`."""
    lines: dict[str, int] = {}
    for parent in PARENTS:
        for path in sorted((root / parent).rglob("*.py")):
            inner = path.relative_to(root / parent).parts
            package = parent if len(inner) == 1 else f"{parent}/{inner[0]}"
            if package not in PARENTS or package == parent:
                lines[package] = lines.get(package, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return lines


def read_table(text: str) -> dict[str, int]:
    """Returns the budgets of a table with a package and its lines in each row."""
    return {package: int(number) for package, number in map(str.split, text.splitlines())}


def format_table(lines: dict[str, int]) -> str:
    """Returns the table of packages and their budgets, by name."""
    return "".join(f"{name:<44}{-(-size // STEP) * STEP:>7}\n" for name, size in sorted(lines.items()))


def find_faults(lines: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """Returns a line for each package that is over its budget, far below it, or in one of the two alone."""
    faults = []
    for package in sorted(lines | budgets):
        size, budget = lines.get(package, 0), budgets.get(package, 0)
        if size > budget:
            faults.append(f"{package} has {size} lines, its budget is {budget}: delete, or raise it and say why")
        elif budget - size > MAX_UNUSED or not size:
            faults.append(f"{package} has {size} lines, its budget is {budget}: lower it")
    return faults


def main() -> int:
    """Prints the faults, or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write today's lines as the budgets")
    lines = count_lines(ROOT)
    if parser.parse_args().write:
        TABLE.write_text(format_table(lines), encoding="utf-8")
        return 0
    faults = find_faults(lines, read_table(TABLE.read_text(encoding="utf-8")))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
