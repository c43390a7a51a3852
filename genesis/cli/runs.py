"""`genesis runs`: lists the runs under a directory."""

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from genesis.base.arguments import Parser
from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.base.run_directory import RUNS_NAME
from genesis.operations.supervise.goodput import format_seconds
from genesis.operations.supervise.runs import RunSummary, find_runs, summarise_run

_DESCRIPTION = """Lists the runs under a directory: recipe, steps, tokens, loss, state, crashes, checkpoints and size.
States: training; waiting, for ranks or resources, under a supervisor; ended; crashed; stopped, after its supervisor
gave up; new. Running trainings are not disturbed.
Example: genesis runs"""
_RIGHT = ("step", "tokens", "loss", "crashes", "saved", "size", "last sign")
_PLAIN_WIDTH = 160


def main(argv: list[str]) -> int:
    """Runs `genesis runs` and returns its exit status."""
    parser = Parser(prog="genesis runs", description=_DESCRIPTION)
    parser.add_argument("directory", type=Path, nargs="?", default=Path(RUNS_NAME), help="default runs/")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    runs = [summarise_run(path, arguments.directory) for path in find_runs(arguments.directory)]
    if arguments.json:
        print(json.dumps([_plain(run) for run in runs], indent=2, allow_nan=False))
        return 0
    if not runs:
        raise UserError(f"there is no run under {arguments.directory}; `genesis fit` makes runs in {RUNS_NAME}/")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("run", "recipe", "state", *_RIGHT):
        table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
    now_seconds = time.time()
    for run in runs:
        table.add_row(*map(Text, _describe(run, now_seconds)))
    Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False).print(table)
    return 0


def _plain(run: RunSummary) -> dict[str, Any]:
    has_loss = run.loss is not None and math.isfinite(run.loss)
    return {**asdict(run), "path": str(run.path), "loss": run.loss if has_loss else None}


def _describe(run: RunSummary, now_seconds: float) -> tuple[str, ...]:
    return (
        run.name,
        run.recipe,
        run.state,
        "" if run.step is None else f"{run.step:,}",
        "" if run.tokens is None else f"{run.tokens:,}",
        "" if run.loss is None else f"{run.loss:.4f}",
        str(run.num_crashes) if run.num_crashes else "",
        str(run.num_checkpoints) if run.num_checkpoints else "",
        decimal(run.num_bytes),
        "" if run.changed_seconds is None else f"{format_seconds(max(0.0, now_seconds - run.changed_seconds))} ago",
    )
