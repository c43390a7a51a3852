"""What each rank of a run that hangs reports, and which rank the reports blame; deciding is pure."""

import importlib
import json
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch.distributed as dist

from .base.errors import printable
from .base.files import replace_file
from .base.json_text import load_json
from .base.untrusted import open_file
from .phases import PHASES, Phase

_DUMPS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_LIMIT_SECONDS: Final = 2.0

_FOREIGN_PARTS: Final = ("/torch/", "/lightning/", "/genesis_callbacks/")
_COLLECTIVE_PARTS: Final = ("/torch/distributed/", "/torch/nn/parallel/")
_BACKWARD: Final = "_engine_run_backward"
_MAX_BYTES: Final = 1 << 16
_MAX_TEXT: Final = 300


def read_flight_record() -> bytes:
    """Returns the recorded collectives as JSON; nothing without a recorder, or if torch does not answer in time.

    torch records if `TORCH_FR_BUFFER_SIZE` (before torch 2.13: `TORCH_NCCL_TRACE_BUFFER_SIZE`) is above 0. For NCCL an
    entry has a state; gloo's entries only say that the collective was called.
    """
    dump = _find_dump()
    if dump is None:
        return b""
    answers: list[bytes] = []

    def ask() -> None:
        try:
            answers.append(dump(True, False))
        except (RuntimeError, TypeError) as error:  # no backend that records, or another signature
            answers.append(json.dumps({"error": str(error)}).encode())

    # In a thread, because NCCL's recorder takes locks that a hanging collective may hold.
    thread = threading.Thread(target=ask, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(_LIMIT_SECONDS)
    return answers[0] if answers else b""


def describe_last(record: bytes) -> str:
    """Returns the last collective of a record with the sizes of its tensors and its state; empty without one. Pure.

    Example:
        >>> describe_last(b'{"entries": [{"profiling_name": "gloo:all_reduce", "input_sizes": [[4, 3]]}]}')
        'gloo:all_reduce [[4, 3]]'
    """
    try:
        entries: list[dict[str, Any]] = load_json(record)["entries"] if record else []
        last = max(entries, key=lambda entry: int(entry.get("record_id", 0)), default=None)
    except (ValueError, TypeError, LookupError, AttributeError):
        return ""
    if last is None:
        return ""
    name, sizes = last.get("profiling_name", "unknown"), last.get("input_sizes", "unknown sizes")
    state = "" if str(name).startswith("gloo:") else f" ({last.get('state', 'state unknown')})"
    types = " ".join(map(str, last.get("input_dtypes", ())))
    return " ".join(f"{name} {sizes} {types}".split()) + state


def _find_dump() -> Callable[[bool, bool], bytes] | None:
    if not dist.is_available():
        return None
    module = importlib.import_module("torch._C._distributed_c10d")  # private: torch has no public name for the dump
    return next((getattr(module, name) for name in _DUMPS if hasattr(module, name)), None)


@dataclass(frozen=True, slots=True)
class HangReport:
    """Where one rank is, as its own watch sees it.

    Args:
        rank: The rank.
        pid: Its process.
        host: The name of its machine.
        phase: What its training thread does.
        count: Its progress (`genesis_callbacks.heartbeat.Progress`).
        step: Windows attempted.
        silent_seconds: How long it has made no progress.
        where: The innermost line of its training thread that is neither torch's nor Lightning's.
        is_waiting: Whether the training thread is in a collective, or in a backward pass, which may wait in one.
        collective: The last collective and the sizes of its tensors, by torch's flight recorder; empty without one.
    """

    rank: int
    pid: int
    host: str
    phase: Phase
    count: int
    step: int
    silent_seconds: float
    where: str
    is_waiting: bool
    collective: str

    def describe(self) -> str:
        """Returns where the rank is, in a few words."""
        work = f"; {'last ' if not self.is_waiting else ''}collective {self.collective}" if self.collective else ""
        return f"rank {self.rank}: {self.phase}, step {self.step}, in {self.where}{work}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranks for which the others wait, and how that is known."""

    ranks: tuple[int, ...]
    reason: str

    def describe(self) -> str:
        """Returns the verdict as a sentence."""
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]} is missing: {self.reason}"
        return f"ranks {', '.join(map(str, self.ranks))} are missing: {self.reason}"


def find_missing(reports: Sequence[HangReport], world_size: int) -> Verdict:
    """Returns which ranks the others wait for. Pure.

    A rank that does not even report comes first, then one that has come less far, then one that is not in a collective
    while others are, then the one whose last progress is the oldest.

    Example:
        >>> one = HangReport(0, 42, "node", "train", 9, 4, 31.0, "main.py:3 in step", True, "")
        >>> find_missing([one], 2).describe()
        'rank 1 is missing: it has written no report, so its process is stopped, gone, or stuck in native code'
    """
    silent = tuple(sorted(set(range(world_size)) - {report.rank for report in reports}))
    if silent:
        who = (
            "it has written no report, so its process is"
            if len(silent) == 1
            else "they have written no report: each is"
        )
        return Verdict(silent, f"{who} stopped, gone, or stuck in native code")
    least, most = min(report.count for report in reports), max(report.count for report in reports)
    if least < most:
        behind = [report for report in reports if report.count == least]
        return _blame(behind, f"it did not enter what other ranks have entered, and is in {behind[0].where}")
    absent = [report for report in reports if not report.is_waiting]
    if 0 < len(absent) < len(reports):
        return _blame(absent, f"other ranks wait in a collective, and it is in {absent[0].where}")
    oldest = max(reports, key=lambda report: report.silent_seconds)
    if len(reports) == 1:
        return Verdict((oldest.rank,), f"no progress for {oldest.silent_seconds:.0f} s, in {oldest.where}")
    return _blame([oldest], "all ranks are at the same point, and its last progress is the oldest")


def _blame(reports: Sequence[HangReport], reason: str) -> Verdict:
    return Verdict(tuple(sorted(report.rank for report in reports)), reason)


def locate(frame: FrameType | None) -> tuple[str, bool]:
    """Returns the innermost line of a stack that is the user's, and whether the stack may wait for other ranks."""
    stack = [] if frame is None else traceback.extract_stack(frame)
    is_waiting = any(
        entry.name == _BACKWARD or any(part in entry.filename for part in _COLLECTIVE_PARTS) for entry in stack[-8:]
    )
    own = [entry for entry in stack if not any(part in entry.filename for part in _FOREIGN_PARTS)]
    last = (own or stack)[-1:]
    return (f"{last[0].filename}:{last[0].lineno} in {last[0].name}" if last else "native code"), is_waiting


def read_main_frame(thread: int) -> FrameType | None:
    """Returns the innermost frame of a thread; None if it has ended."""
    return sys._current_frames().get(thread)


def write_report(folder: Path, report: HangReport) -> None:
    """Writes a rank's report.

    Raises:
        OSError: It cannot be written.
    """
    replace_file(folder / f"rank-{report.rank}.json", json.dumps(asdict(report), indent=2).encode() + b"\n")


def read_reports(folder: Path, world_size: int) -> list[HangReport]:
    """Returns the reports of the ranks that have written one."""
    found = (_read(folder / f"rank-{rank}.json") for rank in range(world_size))
    return [report for report in found if report is not None]


def _read(path: Path) -> HangReport | None:
    try:
        with open_file(path) as file:
            content: Mapping[str, Any] = load_json(file.read(_MAX_BYTES))
        return HangReport(
            rank=int(content["rank"]),
            pid=int(content["pid"]),
            host=_text(content["host"]),
            phase=next(phase for phase in PHASES if phase == content["phase"]),
            count=int(content["count"]),
            step=int(content["step"]),
            silent_seconds=float(content["silent_seconds"]),
            where=_text(content["where"]),
            is_waiting=content["is_waiting"] is True,
            collective=_text(content["collective"]),
        )
    # Another rank may be writing it; the caller looks again, and a rank without a report is named as such.
    except (OSError, ValueError, TypeError, LookupError, StopIteration):
        return None


def _text(value: Any) -> str:
    return printable(str(value)[:_MAX_TEXT])
