"""`genesis checkpoint list`: lists the content of a run's checkpoint directory."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.text import Text

from genesis.base.errors import UserError
from genesis.cli.checkpoint.shared import (
    BAD,
    LEVELS,
    RUN_HELP,
    build_console,
    build_parser,
    build_table,
    find_problems_shown,
    format_duration,
    format_number,
    print_json,
    without_path,
)
from genesis.generate.checkpoint_reference import find_run
from genesis_callbacks.checkpoint import read_best
from genesis_callbacks.checkpoint.best import Best
from genesis_callbacks.checkpoint.inventory import InventoryEntry, read_inventory
from genesis_callbacks.checkpoint.lineage import checkpoints_in

_DESCRIPTION = """Lists the content of a run's checkpoint directory: committed checkpoints in the order of the run,
then saves in flight, and quarantined checkpoints. Exit status 1 if a committed checkpoint does not verify.
Example: genesis checkpoint list runs/demo/run"""


def main(argv: list[str]) -> int:
    """Runs `genesis checkpoint list` and returns its exit status."""
    parser = build_parser("list", _DESCRIPTION)
    parser.add_argument("run", type=Path, help=RUN_HELP)
    parser.add_argument("--level", choices=LEVELS, default="quick", help="verification level; default quick")
    arguments = parser.parse_args(argv)
    run = find_run(arguments.run)
    entries = read_inventory(run)
    if not entries:
        raise UserError(f"{run} has no checkpoint; give a run's directory")
    problems = find_problems_shown(entries, arguments.level)
    entries = [entry for entry in entries if entry.state != "committed" or entry.path in problems]
    directory = checkpoints_in(run)
    best = read_best(directory)
    marks = {} if best is None else _describe_marks(directory, best)
    rows = [
        {
            **_describe_entry(directory, entry, problems, arguments.level),
            "is_best": best is not None and entry.path == directory / best.name,
            "metric": marks.get(entry.path),
        }
        for entry in entries
    ]
    bad = [(path, problem) for path, problem in problems.items() if problem is not None]
    if arguments.json:
        print_json({"directory": str(directory), "best": best and asdict(best), "checkpoints": rows})
        return BAD if bad else 0
    console = build_console()
    now_seconds = time.time()
    console.print(
        build_table(
            str(directory),
            ("checkpoint", "step", "tokens", "age", "size", "state", "verified", "metric"),
            (
                (
                    row["name"],
                    format_number(row["step"]),
                    format_number(row["tokens_seen"]),
                    format_duration(now_seconds - row["created_seconds"]),
                    decimal(row["num_bytes"]),
                    row["state"],
                    "no" if row["problem"] else row["verified"] or "",
                    _mark(row["metric"]),
                )
                for row in rows
            ),
            right=("step", "tokens", "age", "size"),
        )
    )
    for path, problem in bad:
        console.print(Text(f"{path.name}: {without_path(path, problem)}"))
    return BAD if bad else 0


def _describe_marks(directory: Path, best: Best) -> dict[Path, dict[str, Any]]:
    """Returns the metric of each marked checkpoint by its path; the rank of the best is 1."""
    return {
        directory / marked.name: {"name": best.monitor, "value": marked.value, "rank": place}
        for place, marked in enumerate(best.ranked, start=1)
    }


def _mark(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return ""
    return f"{metric['name']} {metric['value']:.6g}{' (best)' if metric['rank'] == 1 else ''}"


def _describe_entry(
    directory: Path, entry: InventoryEntry, problems: Mapping[Path, Exception | None], level: str
) -> dict[str, Any]:
    manifest, problem = entry.manifest, problems.get(entry.path)
    is_verified = entry.path in problems and problem is None
    return {
        "name": str(entry.path.relative_to(directory)),
        "path": str(entry.path),
        "state": entry.state,
        "step": None if manifest is None else manifest.step,
        "tokens_seen": None if manifest is None else manifest.counters.get("tokens_seen"),
        "created_seconds": entry.modified_seconds if manifest is None else manifest.created_seconds,
        "num_bytes": entry.num_bytes,
        "verified": level if is_verified else None,
        "problem": None if problem is None else str(problem),
    }
