"""Runs everything that a borrowed GPU should answer in some minutes, most important first, and records each answer.

Each part is a process with a time limit. The record is written after every part, so that stopping at any moment loses
nothing. A second run continues the record: parts that passed stay as they are, with their date, and the others run.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from genesis import __version__
from genesis.arguments import Parser, check_output
from genesis.bench.record import anonymise, describe_hardware
from genesis.device import check_available, is_host, name_device, read_properties
from genesis.errors import UserError
from genesis.processes import Ending, run_limited
from genesis.scrub import scrub_all
from genesis_callbacks.files import replace_file

SCHEMA_VERSION: Final = 1
PASSED: Final = "passed"
_LEAST_SECONDS: Final = 5.0
"""A part is not begun with less time than this."""
_NO_TESTS_STATUS: Final = 5
_INTERRUPTED: Final = 130
_ROOT: Final = Path(__file__).parents[2]
_OUT: Final = "{out}"
_GENESIS: Final = "import sys; from genesis.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class SessionPart:
    """One part of a session.

    Args:
        name: As the record has it.
        question: What it answers.
        words: Arguments of Python; `{out}` stands for the file into which the part writes its figures.
        limit_seconds: How long it may run.
        needs: A package or a path of the checkout without which the part does not apply.
    """

    name: str
    question: str
    words: tuple[str, ...]
    limit_seconds: float
    needs: str | None = None


def plan_session(kind: str, size: str) -> list[SessionPart]:
    """Returns the parts of a session, most important first: correctness, memory, speed.

    Args:
        kind: Kind of device.
        size: `full` for a GPU, `tiny` to try the session out.
    """
    is_tiny = size == "tiny"
    device = ("--device", kind)

    def genesis(*words: str) -> tuple[str, ...]:
        return ("-c", _GENESIS, *words, *device)

    def step(*words: str) -> tuple[str, ...]:
        model = ("--model", "tiny") if is_tiny else ("--config", str(_ROOT / "configs/genesis-1b.yaml"))
        pairs = (
            ("--pairs", "1", "--burst-steps", "2", "--warmup-steps", "2")
            if is_tiny
            else ("--pairs", "3", "--burst-steps", "4")
        )
        return genesis("bench", "step", *model, *pairs, *words, "--out", _OUT)

    def single(part: str) -> tuple[str, ...]:
        return ("-m", "genesis.bench.device_parts", part, *device, "--size", size, "--out", _OUT)

    checkpoint = ("--model", "tiny", "--pairs", "1", "--modes", "baseline,process") if is_tiny else ("--pairs", "2")
    memory = () if is_host(kind) or read_properties(kind) is None else ("--memory-gib", "24")
    doctor = ("--parts", "devices,proof,copies") if is_tiny else ()
    parts = [
        SessionPart("doctor", "does the device do what training needs", genesis("doctor", *doctor, "--out", _OUT), 150),
        SessionPart(
            "tests",
            "the tests that need a GPU",
            ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "cuda", str(_ROOT / "tests/cuda")),
            180,
            needs="tests/cuda",
        ),
        SessionPart("checkpoint", "what a save costs", genesis("bench", "checkpoint", *checkpoint, "--out", _OUT), 120),
        SessionPart("step", "tokens per second and MFU", step("--contenders", "genesis,matmul"), 90),
        *(
            SessionPart(
                f"step-micro-batch-{batch}{'-compiled' if compiled else ''}",
                "tokens per second and memory on a card of 24 GB",
                step("--contenders", "genesis", "--micro-batch-size", str(batch), *memory, *compiled),
                90,
            )
            for batch in (1, 2)
            for compiled in ((), ("--compile",))
            if not compiled or kind in ("cpu", "cuda", "xpu")
        ),
        SessionPart("sampling", "sampling on the host and on the device", single("sampling"), 40),
        SessionPart("decoding", "decoding with and without planned attention", single("decoding"), 60),
        SessionPart("loss", "chunks of the loss", single("loss"), 40),
    ]
    # Tiny shapes are for a machine without a GPU, where imports take most of the time.
    return [replace(part, limit_seconds=3 * part.limit_seconds) for part in parts] if is_tiny else parts


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
            record["parts"][number] = entry = _run(part, options.device, min(part.limit_seconds, left_seconds))
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
    parser = Parser(prog="genesis bench session", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda", help="kind of device (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all parts (default %(default)s)")
    parser.add_argument(
        "--size", choices=("tiny", "full"), help="shapes; default: full on a device whose memory torch knows, else tiny"
    )
    parser.add_argument("--out", type=Path, help="record (default: benchmarks/records/session-DEVICE.json)")
    parser.add_argument("--replace", action="store_true", help="start from scratch where the record exists already")
    options = parser.parse_args(argv)
    check_available(options.device)
    if not options.minutes > 0:
        raise UserError(f"--minutes is {options.minutes}: it must be above 0")
    is_large = not is_host(options.device) and read_properties(options.device) is not None
    options.size = options.size or ("full" if is_large else "tiny")
    slug = re.sub(r"[^a-z0-9]+", "-", name_device(options.device).lower()).strip("-")
    options.out = (options.out or _ROOT / "benchmarks/records" / f"session-{slug}.json").with_suffix(".json")
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
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "what": "genesis bench session",
        "command": f"genesis bench session {shlex.join(anonymise(argv))}".strip(),
        "device": options.device,
        "size": options.size,
        "hardware": describe_hardware(name_device(options.device)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "lightning")},
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
    if git is None or not (_ROOT / ".git").exists():
        return None
    command = [git, "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _run(part: SessionPart, kind: str, limit_seconds: float) -> dict[str, Any]:
    """Runs a part and returns its entry in the record."""
    missing = _find_missing(part)
    if missing is not None:
        return _describe(part, Ending(0, 0.0, ()), limit_seconds, {}, missing)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / f"{part.name}.json"
        words = [word.replace(_OUT, str(out)) for word in part.words]
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1", "GENESIS_TEST_DEVICE": kind}
        log = Path(directory) / "log"
        ending = run_limited([sys.executable, *words], limit_seconds, log, environment)
        figures = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return _describe(part, ending, limit_seconds, figures, None)


def _find_missing(part: SessionPart) -> str | None:
    if part.needs is not None and not (_ROOT / part.needs).exists():
        return f"this installation has no {part.needs}"
    if "pytest" in part.words and importlib.util.find_spec("pytest") is None:
        return "pytest is not installed"
    return None


def _describe(
    part: SessionPart, ending: Ending, limit_seconds: float, figures: Mapping[str, Any], missing: str | None
) -> dict[str, Any]:
    reason = missing
    if missing is not None:
        status = "skipped"
    elif ending.status is None:
        status, reason = "failed", f"did not end within {limit_seconds:.0f} s"
    elif ending.status == _NO_TESTS_STATUS and "pytest" in part.words:
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
    lines = [
        f"# A session on {record['hardware'].rpartition(', ')[2]}",
        "",
        f"- command: `{record['command']}`",
        f"- hardware: {record['hardware']}; device `{record['device']}`, shapes {record['size']}",
        f"- versions: genesis {record['genesis']} ({record['commit'] or 'no checkout'}), {versions}",
        "",
        "| part | status | s | question | found |",
        "|---|---|---|---|---|",
    ]
    for entry in record["parts"]:
        reason = f" ({entry['reason']})" if entry.get("reason") else ""
        seconds = entry.get("seconds", "")
        found = "; ".join(_summarise(entry.get("figures", {}))).replace("|", "/")
        lines.append(f"| {entry['name']} | {entry['status']}{reason} | {seconds} | {entry['question']} | {found} |")
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
    for name, value in {"": figures, **figures}.items():
        if isinstance(value, Mapping) and ("before" in value or "after" in value):
            sides = [f"{side} {value[side]:.4g}" for side in ("before", "after") if side in value]
            found.append(f"{name} {', '.join(sides)} ({value.get('unit', figures.get('unit', ''))})".strip())
    return [*found, *figures.get("findings", [])]
