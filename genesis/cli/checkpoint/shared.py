"""Shared by the commands of `genesis checkpoint`: options, help texts, the lock, and the output of results."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.errors import printable
from genesis.base.progress import stage
from genesis_callbacks.checkpoint import CheckpointError, VerifyLevel
from genesis_callbacks.checkpoint.inventory import InventoryEntry, find_problems
from genesis_callbacks.checkpoint.lineage import DirectoryLock

_PLAIN_WIDTH = 120  # not that of `genesis.cli.options`, which takes longer to import than a listing
BAD = 1
"""Exit status if a problem was found."""
LEVELS = ("quick", "full", "deep")
RUN_HELP = "a run: its directory, or its name in runs/"
CHECKPOINT_HELP = "a checkpoint, a run (its newest), RUN/best or RUN/STEP"


def build_parser(name: str, description: str) -> Parser:
    """Returns a parser of `genesis checkpoint <name>`, with --json."""
    parser = Parser(
        prog=f"genesis checkpoint {name}", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


@contextmanager
def hold_directory(directory: Path, *, is_needed: bool) -> Iterator[None]:
    """Holds the directory's lock inside the context, if `is_needed`.

    Raises:
        DirectoryInUseError: A run holds the lock.
    """
    lock = DirectoryLock(directory) if is_needed else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def find_problems_shown(entries: Sequence[InventoryEntry], level: VerifyLevel) -> dict[Path, CheckpointError | None]:
    """Returns the result of `find_problems`, and shows how many bytes are hashed."""
    num_bytes = sum(entry.num_bytes for entry in entries if entry.state == "committed" and level != "quick")
    with stage("verifying checkpoints", num_bytes, "bytes") as shown:
        return find_problems(entries, level, shown.advance)


def without_path(path: Path, problem: object) -> str:
    """Returns a problem of the checkpoint at `path` without the path, for a line that begins with the name."""
    return str(problem).removeprefix(f"{path}: ")


def complain(error: Exception) -> int:
    """Prints the problem of a checkpoint and returns the exit status."""
    print(f"genesis: error: {printable(str(error))}", file=sys.stderr)
    return BAD


def print_json(content: Any) -> None:
    """Prints a command's result as JSON."""
    print(json.dumps(content, indent=2, allow_nan=False, default=str))


def build_console() -> Console:
    """Returns a console as wide as the terminal; without a terminal, of a fixed width."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def build_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Iterable[str]], right: Sequence[str] = ()
) -> Table:
    """Returns a table without its empty columns."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_header=any(columns))
    filled = [[printable(cell) for cell in row] for row in rows]
    kept = [number for number in range(len(columns)) if not filled or any(row[number] for row in filled)]
    for number in kept:
        column = columns[number]
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in filled:
        table.add_row(*(Text(row[number]) for number in kept))
    return table


def format_number(value: Any) -> str:
    """Returns a number in readable form; an empty text for None."""
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def format_duration(seconds: float) -> str:
    """Returns a length of time in its two largest units: `3 d 4 h`."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if left >= length or (unit == "s" and not parts):
            parts.append(f"{left // length} {unit}")
            left %= length
    return " ".join(parts[:2])
