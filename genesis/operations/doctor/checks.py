"""One result of the doctor, and the table and the JSON of all of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich import box
from rich.markup import escape
from rich.table import Table

from genesis.base.console import Console
from genesis.base.scrub import scrub_all
from genesis_callbacks.base.files import replace_file

Status = Literal["passed", "failed", "warning", "does not apply"]

SCHEMA_VERSION: Final = 1
_STYLES: Final[Mapping[Status, str]] = {
    "passed": "green",
    "failed": "bold red",
    "warning": "yellow",
    "does not apply": "dim",
}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: What was checked, in a word or two; the same in every run.
        status: A warning is advice, and does not fail the command.
        found: What was found, with its figures; for a check that does not apply, the reason.
        remedy: What to do about a failure or a warning.
        seconds: The time that the check took.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""
    seconds: float = 0.0


def judge(name: str, is_right: bool, found: str, remedy: str) -> Check:
    """Returns a check that passed, or failed with its remedy."""
    return Check(name, "passed", found) if is_right else Check(name, "failed", found, remedy)


def has_failed(checks: Iterable[Check]) -> bool:
    """Returns whether a check failed."""
    return any(check.status == "failed" for check in checks)


def print_checks(title: str, checks: Sequence[Check], console: Console) -> None:
    """Prints a table of checks; the remedies stand below what was found."""
    table = Table(box=box.SIMPLE, title=escape(title), title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for check in checks:
        text = escape(check.found) + (f"\n-> {escape(check.remedy)}" if check.remedy else "")
        table.add_row(check.name, f"[{_STYLES[check.status]}]{check.status}[/]", text)
    console.print(table)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report without names of the machine and its user, in place of an earlier one."""
    content = scrub_all({"schema_version": SCHEMA_VERSION, **report})
    replace_file(path.resolve(), (json.dumps(content, indent=1) + "\n").encode())


def list_plain(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Returns the checks in plain types, for JSON."""
    return [{**asdict(check), "seconds": round(check.seconds, 2)} for check in checks]
