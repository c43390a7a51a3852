"""The doctor's report: JSON in a versioned form that names no machine and no user, and a table."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.markup import escape
from rich.table import Table

from genesis import __version__
from genesis.base.console import Console
from genesis.base.errors import numbered
from genesis.base.processes import Ending
from genesis.base.scrub import scrub_all
from genesis.operations.doctor.parts import Part
from genesis.operations.doctor.probe import Findings
from genesis_callbacks.base.files import replace_file

SCHEMA_VERSION: Final = 1
PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"
_PACKAGES: Final = ("torch", "lightning", "torchmetrics", "numpy", "triton")
_STYLES: Final = {PASSED: "green", FAILED: "red", SKIPPED: "yellow", NOT_RUN: "dim"}


def begin_report(kind: str, size: str, parts: Sequence[Part]) -> dict[str, Any]:
    """Returns the report of a doctor that has run no part yet."""
    return {
        "schema_version": SCHEMA_VERSION,
        "what": "genesis doctor --device",
        "genesis": __version__,
        "date": date.today().isoformat(),
        "device": kind,
        "size": size,
        "verdict": "interrupted",
        "environment": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "packages": {name: found for name in _PACKAGES if (found := _find_version(name)) is not None},
        },
        "parts": [
            {"name": part.name, "summary": part.summary, "status": NOT_RUN, "limit_seconds": part.limit_seconds}
            for part in parts
        ],
    }


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_part(part: Part, findings: Findings, ending: Ending) -> dict[str, Any]:
    """Returns the entry of a part that has ended, by itself or at its limit."""
    reason = None
    if ending.status is None:
        status, reason = FAILED, f"did not end within {part.limit_seconds:.0f} s"
    elif ending.status != 0:
        end = f"signal {-ending.status}" if ending.status < 0 else f"status {ending.status}"
        status, reason = FAILED, f"ended with {end}: {ending.last_lines[-1] if ending.last_lines else 'no output'}"
    elif findings.is_failed:
        status = FAILED
    else:
        status = PASSED if findings.skipped is None else SKIPPED
    entry: dict[str, Any] = {
        "name": part.name,
        "summary": part.summary,
        "status": status,
        "limit_seconds": part.limit_seconds,
        "seconds": round(ending.seconds, 1),
        "reason": reason or findings.skipped,
        "figures": findings.figures,
        "checks": findings.checks,
        "notes": findings.notes,
        "last_lines": list(ending.last_lines) if reason is not None else [],
    }
    scrubbed: dict[str, Any] = scrub_all(entry)
    return scrubbed


def judge(report: Mapping[str, Any]) -> str:
    """Returns the verdict on all parts: `failed` if a part failed, `interrupted` if a part has not run, or `passed`."""
    statuses = {part["status"] for part in report["parts"]}
    if FAILED in statuses:
        return "failed"
    return "interrupted" if NOT_RUN in statuses else "passed"


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Writes the report atomically, in place of an earlier one."""
    replace_file(path.resolve(), (json.dumps(report, indent=1) + "\n").encode())


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Prints the report as a table."""
    table = Table(box=box.SIMPLE, title=f"genesis doctor: {escape(report['device'])}", title_justify="left")
    for column in ("part", "status", "s"):
        table.add_column(column, no_wrap=True, justify="right" if column == "s" else "left")
    table.add_column("found", overflow="fold")
    for part in report["parts"]:
        seconds = f"{part['seconds']:.0f}" if "seconds" in part else ""
        style = _STYLES[part["status"]]
        table.add_row(part["name"], f"[{style}]{part['status']}[/]", seconds, escape("\n".join(_list_findings(part))))
    console.print(table)


def _list_findings(part: Mapping[str, Any]) -> list[str]:
    if "figures" not in part:
        return [part["summary"]]
    lines = [part["reason"]] if part["reason"] else []
    for check in part["checks"]:
        if not check["passed"]:
            lines.append(f"FAILED: {check['name']}" + (f" ({check['found']})" if check["found"] else ""))
    lines += [f"{figure['name']}: {_format(figure['value'])} {figure['unit']}".rstrip() for figure in part["figures"]]
    num_passed = sum(check["passed"] for check in part["checks"])
    if num_passed:
        lines.append(f"{num_passed:,} of {numbered(len(part['checks']), 'checks')} passed")
    return [*lines, *part["notes"]]


def _format(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
