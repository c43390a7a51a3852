"""Runs everything that a borrowed GPU should answer in some minutes, most important first, and records each answer.

Each part is a process with a time limit. The record is written after every part, so that stopping at any moment loses
nothing. A second run continues the record: parts that passed stay as they are, with their date, and the others run.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import RECORDS, ROOT, anonymise, begin_record, build_parser, format_table
from benchmarks.session_plan import OUT, PYTEST, SCRATCH, SessionPart, plan_session
from genesis import __version__
from genesis.base.arguments import check_output
from genesis.base.console import Console
from genesis.base.device import check_available, is_host, name_device, read_properties
from genesis.base.errors import UserError
from genesis.base.processes import Ending, run_limited, run_program
from genesis.base.scrub import scrub_all
from genesis_callbacks.base.files import replace_file

SCHEMA_VERSION: Final = 1
PASSED: Final = "passed"
_LEAST_SECONDS: Final = 5.0
"""A part is not begun with less time than this."""
_NO_TESTS_STATUS: Final = 5
_INTERRUPTED: Final = 130
_TEST_LINE: Final = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (?P<with_xdist>[A-Z]+) (?P<worker>\S+::.+?)"
    r"|(?P<test>\S+::.+?) (?P<alone>[A-Z]+)(?: .*)?)\s*$",
    re.M,
)
"""A line of `pytest -v`, with pytest-xdist and without."""


def main(argv: list[str]) -> int:
    """Runs the session and returns 0, 1 if a part failed, or 130 if it was interrupted."""
    options = _parse(argv)
    parts = plan_session(options.device, options.size)
    record = _begin(options, argv, parts)
    console = Console(stderr=True)
    _write(record, options.out)
    deadline_seconds = time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number, part in enumerate(parts):
            entry = record["parts"][number]
            if entry["status"] == PASSED:
                console.print(f"{part.name}: passed on {entry['date']}, kept", highlight=False)
                continue
            left_seconds = deadline_seconds - time.monotonic()
            if left_seconds < _LEAST_SECONDS:
                entry.update(status="not run", reason=f"the {options.minutes:g} minutes were over")
                continue
            console.print(f"{part.name}: {part.question} ({left_seconds:.0f} s left)", highlight=False)
            over = f"the {options.minutes:g} minutes were over" if left_seconds < part.limit_seconds else None
            record["parts"][number] = entry = _run(part, options.device, min(part.limit_seconds, left_seconds), over)
            console.print(
                f"  {entry['status']} after {entry['seconds']:.0f} s {entry['reason'] or ''}", highlight=False
            )
            _write(record, options.out)
    except KeyboardInterrupt:
        _write(record, options.out)
        console.print(f"interrupted; what was measured is in {options.out}", highlight=False)
        return _INTERRUPTED
    _write(record, options.out)
    statuses = [entry["status"] for entry in record["parts"]]
    print(f"{statuses.count(PASSED)} of {len(statuses)} parts passed; the record is in {options.out}")
    return 1 if "failed" in statuses else 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = build_parser("session", __doc__)
    parser.add_argument("--device", default="cuda", help="kind of device (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=15.0, help="time for all parts (default %(default)s)")
    parser.add_argument(
        "--size", choices=("tiny", "full"), help="shapes; default: full on a device whose memory torch knows, else tiny"
    )
    parser.add_argument("--replace", action="store_true", help="start from scratch where the record exists already")
    options = parser.parse_args(argv)
    check_available(options.device)
    if not options.minutes > 0:
        raise UserError(f"--minutes is {options.minutes}: it must be above 0")
    is_large = not is_host(options.device) and read_properties(options.device) is not None
    options.size = options.size or ("full" if is_large else "tiny")
    slug = re.sub(r"[^a-z0-9]+", "-", name_device(options.device).lower()).strip("-")
    options.out = (options.out or RECORDS / f"session-{slug}.json").with_suffix(".json")
    check_output(options.out, "--out")
    if not options.out.parent.is_dir():
        raise UserError(f"--out is {options.out}: no such directory: {options.out.parent}")
    if (options.out.exists() and not os.access(options.out, os.W_OK)) or not os.access(options.out.parent, os.W_OK):
        raise UserError(f"--out is {options.out}, which you cannot write: name another file")
    return options


# ---- the record


def _begin(options: argparse.Namespace, argv: Sequence[str], parts: Sequence[SessionPart]) -> dict[str, Any]:
    """Returns the record of a session that has run nothing, or the one that is continued.

    Raises:
        UserError: The record that exists is of another device, size or version.
    """
    what = "all that a borrowed GPU should answer"
    record = {
        "schema_version": SCHEMA_VERSION,
        **begin_record("session", what, argv, ("torch", "lightning"), name_device(options.device)),
        "device": options.device,
        "size": options.size,
        "genesis": __version__,
        "commit": _read_commit(),
        "parts": [{"name": part.name, "question": part.question, "status": "not run"} for part in parts],
    }
    if options.replace or not options.out.exists():
        return record
    try:
        before = json.loads(options.out.read_text(encoding="utf-8"))
        kept = {entry["name"]: entry for entry in before["parts"] if entry["status"] == PASSED}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{options.out} is no record of a session: name another file, or give --replace") from error
    for key in ("schema_version", "device", "size", "hardware", "versions", "genesis", "commit"):
        if before.get(key) != record[key]:
            raise UserError(
                f"{options.out} has {key} {before.get(key)!r} and this session {record[key]!r}: give --replace to "
                "start from scratch, or name another file by --out"
            )
    record["parts"] = [kept.get(entry["name"], entry) for entry in record["parts"]]
    return record


def _read_commit() -> str | None:
    """Returns the commit of the checkout and whether it was changed; None without a checkout or git."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return None
    command = [git, "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = run_program(command, capture_output=True, text=True)
    return found.stdout.strip() or None


def _run(part: SessionPart, kind: str, limit_seconds: float, over: str | None) -> dict[str, Any]:
    """Runs a part and returns its entry in the record; `over` says why its limit is not the part's own."""
    missing = _find_missing(part)
    if missing is not None:
        return _describe(part, Ending(0, 0.0, ()), limit_seconds, {}, missing, over)
    with tempfile.TemporaryDirectory() as directory, _scratch(part) as scratch:
        out = Path(directory) / f"{part.name}.json"
        words = [word.replace(OUT, str(out)).replace(SCRATCH, scratch) for word in part.words]
        environment = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "300",  # pytest cuts the reasons of failed tests to the width of the terminal
            "GENESIS_TEST_DEVICE": kind,
        }
        log = Path(directory) / "log"
        ending = run_limited([sys.executable, *words], limit_seconds, log, environment)
        figures = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        if PYTEST in part.words:
            figures = read_tests(log.read_text(encoding="utf-8", errors="replace"))
    return _describe(part, ending, limit_seconds, figures, None, over)


@contextmanager
def _scratch(part: SessionPart) -> Iterator[str]:
    """Yields a directory beside the checkout's files for the parts that want one; the system's may lie in memory."""
    if SCRATCH not in part.words:
        yield ""
        return
    place = ROOT / "runs"
    place.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix="session-") as directory:
        yield directory


def read_tests(log: str) -> dict[str, Any]:
    """Returns the names of tests by outcome, from what `pytest -v -rfE` printed, also if it did not end.

    `findings` has the failed ones with the first line of the reason, if the summary was reached.
    """
    outcomes: dict[str, list[str]] = {}
    for line in _TEST_LINE.finditer(log):
        name, outcome = line["worker"] or line["test"], line["with_xdist"] or line["alone"]
        outcomes.setdefault(outcome.lower(), []).append(name)
    reasons = {
        name: found[1]
        for names in outcomes.values()
        for name in names
        if (found := re.search(rf"^(?:FAILED|ERROR) {re.escape(name)} - (.+)$", log, re.M)) is not None
    }
    failed = [*outcomes.get("failed", []), *outcomes.get("error", [])]
    counts = ", ".join(f"{len(names)} {outcome}" for outcome, names in sorted(outcomes.items()))
    findings = [f"failed {name}{f': {reasons[name]}' if name in reasons else ''}" for name in failed]
    return {"tests": outcomes, "findings": [counts, *findings] if outcomes else []}


def _find_missing(part: SessionPart) -> str | None:
    for needs in (part.needs, PYTEST if PYTEST in part.words else None):
        if needs is not None and not (ROOT / needs).exists() and not _is_installed(needs):
            return f"this installation has no {needs}"
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # a path, or a module of a package that is not installed
        return False


def _describe(
    part: SessionPart,
    ending: Ending,
    limit_seconds: float,
    figures: Mapping[str, Any],
    missing: str | None,
    over: str | None,
) -> dict[str, Any]:
    reason = missing
    if missing is not None:
        status = "skipped"
    elif ending.status is None and over is not None:
        status, reason = "not run to its end", over
    elif ending.status is None:
        status, reason = "failed", f"did not end within {limit_seconds:.0f} s"
    elif ending.status == _NO_TESTS_STATUS and PYTEST in part.words:
        status, reason = "skipped", "no test applies to this device"
    elif ending.status != 0:
        status, reason = "failed", f"ended with status {ending.status}"
    else:
        status = PASSED
    entry: dict[str, Any] = scrub_all(
        {
            "name": part.name,
            "question": part.question,
            "command": shlex.join(["python", *anonymise(part.words)]),
            "status": status,
            "reason": reason,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(ending.seconds, 1),
            "figures": dict(figures),
            "last_lines": list(ending.last_lines[-4:] if status == PASSED else ending.last_lines),
        }
    )
    return entry


def _write(record: Mapping[str, Any], path: Path) -> None:
    replace_file(path.resolve(), (json.dumps(record, indent=1) + "\n").encode())
    replace_file(path.with_suffix(".md").resolve(), _format(record).encode())


def _format(record: Mapping[str, Any]) -> str:
    """Returns a record as a page of Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    rows = [
        [
            entry["name"],
            entry["status"] + (f" ({entry['reason']})" if entry.get("reason") else ""),
            str(entry.get("seconds", "")),
            entry["question"],
            "; ".join(_summarise(entry.get("figures", {}))).replace("|", "/"),
        ]
        for entry in record["parts"]
    ]
    lines = [
        f"# A session on {record['hardware'].rpartition(', ')[2]}",
        "",
        f"- command: `{record['command']}`",
        f"- hardware: {record['hardware']}; device `{record['device']}`, shapes {record['size']}",
        f"- versions: genesis {record['genesis']} ({record['commit'] or 'no checkout'}), {versions}",
        "",
        *format_table(("part", "status", "s", "question", "found"), rows)[:-1],
    ]
    return "\n".join(lines) + "\n"


def _summarise(figures: Mapping[str, Any]) -> list[str]:
    """Returns the figures of a part that a page shows; the JSON record has all of them."""
    if "verdict" in figures:  # the doctor's
        return [f"{part['name']}: {part['status']}" for part in figures["parts"]]
    found = []
    for name, contender in figures.get("contenders", {}).items():
        mfu = "" if contender.get("mfu") is None else f", MFU {contender['mfu']:.3f}"
        memory = contender.get("peak_device_bytes")
        on_device = "" if memory is None else f", {memory / 2**30:.1f} GiB"
        found.append(f"{name}: {contender['tokens_per_second']:,.0f} tokens/s{mfu}{on_device}")
    return [*found, *figures.get("findings", [])]
