"""`genesis doctor --device`: examines the machine's devices, part by part, and writes a report for an issue."""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from genesis.base.arguments import Parser, check_output
from genesis.base.console import Console
from genesis.base.device import check_available, counts_memory, find_kind, is_host
from genesis.base.errors import UserError
from genesis.base.processes import run_limited
from genesis.operations.doctor.parts import PARTS, Part, find_part
from genesis.operations.doctor.probe import Task, read_findings
from genesis.operations.doctor.report import begin_report, describe_part, judge, print_report, write_report

_DESCRIPTION = """Examines the devices of this machine: what they compute, how fast they copy and train, and whether a
killed run resumes bit for bit. Prints a table and writes a JSON file without names of the machine or its user, which
can be attached to a public issue. Each part has a process and a time limit of its own.
Example: genesis doctor --device cuda --out doctor-cuda.json"""
_FAILED_CHECK: Final = 1
_INTERRUPTED: Final = 130
_PLAIN_WIDTH: Final = 120
_FIND: Final = "found"


def main(argv: list[str]) -> int:
    """Runs `genesis doctor` and returns its exit status: 0, 1 if a part failed, 130 if it was interrupted."""
    options = _parse(argv)
    parts = [find_part(name) for name in options.parts]
    size = options.size or ("small" if _is_large(options.device) else "tiny")
    report = begin_report(options.device, size, parts)
    write_report(report, options.out)  # reports a path that cannot be written before the measurements
    progress = Console(stderr=True)
    is_interrupted = False
    try:
        with _interrupted_by_termination():
            for number, part in enumerate(parts):
                progress.print(f"{number + 1}/{len(parts)} {part.name}: {part.summary}", highlight=False)
                report["parts"][number] = _run_part(part, options, size)
                report["verdict"] = judge(report)
                write_report(report, options.out)
    except KeyboardInterrupt:
        is_interrupted = True
        report["verdict"] = "failed" if judge(report) == "failed" else "interrupted"
        write_report(report, options.out)
    print_report(report, Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH))
    print(f"{report['verdict']}; the report is in {options.out}")
    if is_interrupted:
        return _INTERRUPTED
    return _FAILED_CHECK if report["verdict"] == "failed" else 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="genesis doctor", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        nargs="?",
        const=_FIND,
        metavar="KIND",
        help="kind of device: cpu, cuda, xpu ...; without a value the accelerator that torch finds, else the CPU",
    )
    parser.add_argument("--out", type=Path, help="file for the report (default: doctor-KIND.json)")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="directory whose disk holds the checkpoints (default: this one)"
    )
    names = ",".join(part.name for part in PARTS)
    parser.add_argument("--parts", default=names, help="parts to run (default: %(default)s)")
    parser.add_argument("--size", choices=("tiny", "small"), help="model shape (default: small on GPUs, else tiny)")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="factor for all time limits, for a busy machine (default %(default)s)",
    )
    options = parser.parse_args(argv)
    if options.device is None:
        raise UserError("these options measure devices: give --device (cpu, cuda ...)")
    options.device = find_kind() if options.device == _FIND else options.device
    check_available(options.device)
    if options.patience <= 0:
        raise UserError(f"--patience is {options.patience}: it must be above 0")
    if not options.dir.is_dir():
        raise UserError(f"--dir is {options.dir}: no such directory")
    if not os.access(options.dir, os.W_OK):
        raise UserError(f"--dir is {options.dir}, which you cannot write to: name another directory")
    options.out = options.out or Path(f"doctor-{options.device}.json")
    check_output(options.out, "--out")
    if not options.out.parent.is_dir():
        raise UserError(f"--out is {options.out}: no such directory: {options.out.parent}")
    options.parts = _choose_parts(options.parts)
    return options


def _choose_parts(text: str) -> Sequence[str]:
    known = [part.name for part in PARTS]
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UserError(f"--parts has {unknown[0] if unknown else 'no part'!r}: choose from {', '.join(known)}")
    return names


def _is_large(kind: str) -> bool:
    return not is_host(kind) and counts_memory(kind)


def _run_part(part: Part, options: argparse.Namespace, size: str) -> dict[str, Any]:
    """Runs a part in its own process and returns its entry."""
    part = replace(part, limit_seconds=part.limit_seconds * options.patience)
    with tempfile.TemporaryDirectory() as own, _empty_directory(options.dir) as directory:
        findings = Path(own) / "findings.json"
        task = Task(options.device, size, str(directory))
        command = [
            sys.executable,
            "-P",
            "-m",
            "genesis.operations.doctor.worker",
            part.name,
            task.to_json(),
            str(findings),
        ]
        ending = run_limited(command, part.limit_seconds, Path(own) / "log", {"PYTHONUNBUFFERED": "1"})
        return describe_part(part, read_findings(findings), ending)


@contextlib.contextmanager
def _empty_directory(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=parent, prefix=".genesis-doctor-", ignore_cleanup_errors=True) as directory:
        yield Path(directory).resolve()


@contextlib.contextmanager
def _interrupted_by_termination() -> Iterator[None]:
    """Handles SIGTERM and SIGHUP like Ctrl-C within the block, so that the report and the processes end in order."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
