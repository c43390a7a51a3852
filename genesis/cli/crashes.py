"""`genesis crashes`."""

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.errors import UserError, printable
from genesis.base.run_directory import RUNS_NAME, RunDirectory
from genesis.cli.options import PLAIN_WIDTH
from genesis.operations.supervise.crashes import CrashRecord, read_crashes
from genesis.operations.supervise.goodput import describe_goodput, format_seconds
from genesis.operations.supervise.status import read_status

_DESCRIPTION = """Lists the crashes of a supervised run: class, first failing rank, step, what was done, and the time
lost; then what share of wall time trained new tokens. RUN/crashes/NUMBER-CLASS holds output and stacks of each crash.
Example: genesis crashes runs/mine"""


def main(argv: list[str]) -> int:
    """Runs `genesis crashes` and returns its exit status."""
    parser = Parser("genesis crashes", description=_DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's directory, or its name in runs/")
    parser.add_argument("--json", action="store_true", help="print the records as JSON")
    arguments = parser.parse_args(argv)
    run = _find(arguments.run)
    crashes, status = read_crashes(run), read_status(run)
    if arguments.json:
        content = {
            "crashes": [asdict(crash) for crash in crashes],
            "status": None if status is None else asdict(status),
        }
        print(json.dumps(content, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    if crashes:
        console.print(build_table(crashes))
    else:
        console.print(f"{printable(str(run))} has no crash", soft_wrap=True, markup=False)
    if status is not None:
        console.print(describe_goodput(status.goodput), soft_wrap=True, markup=False)
    return 0


def _find(given: Path) -> Path:
    for path in (given, Path(RUNS_NAME) / given):
        run = RunDirectory(path)
        if any(each.is_dir() for each in (run.supervisor, run.crashes, run.checkpoints)):
            return path
    raise UserError(f"{given} is no run; give the directory of a run, such as runs/NAME")


def build_table(crashes: list[CrashRecord]) -> Table:
    """Returns the crashes as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    right = ("crash", "rank", "step", "repeated", "lost")
    for column in ("crash", "time (UTC)", "class", "rank", "step", "action", "repeated", "lost"):
        table.add_column(column, justify="right" if column in right else "left")
    for crash in crashes:
        table.add_row(*(Text(cell) for cell in describe(crash)))
    return table


def describe(crash: CrashRecord) -> tuple[str, ...]:
    """Returns the cells of a crash's row."""
    cost = "" if crash.cost is None else f" ({crash.cost:.2f})"
    return (
        str(crash.number),
        datetime.fromtimestamp(crash.time_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        crash.end_class,
        "" if crash.rank is None else str(crash.rank),
        "" if crash.step is None else str(crash.step),
        crash.action,
        "" if crash.repeated_steps is None else str(crash.repeated_steps),
        "" if crash.lost_seconds is None else format_seconds(crash.lost_seconds) + cost,
    )
