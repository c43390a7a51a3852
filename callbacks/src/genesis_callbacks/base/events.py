"""A run's events, one JSON line for each, for people, supervisors and reports.

    kind                written by                     about
    started             every rank                     a fit has taken the run's directory, before anything is restored
    restored            rank 0                         the checkpoint from which training continues, after the restore
    saved               rank 0's writer                a checkpoint that has just been committed
    verified            rank 0                         a checkpoint that holds what it must
    quarantined         rank 0, or a command           a checkpoint that does not verify and was renamed
    validated           rank 0                         the metrics of a validation
    evaluated           a command                      the metrics of an evaluation of a checkpoint
    nonfinite_gradient  rank 0                         a window whose gradient is not finite: module and rank
    failed              rank 0 (a save), every rank    a save (its name is in `checkpoint`), or the fit
    hang                the first rank that reports    no progress for too long: the rank that is missing
    ended               every rank                     a fit came to its end, or was stopped by a signal
    launched            the supervisor                 the ranks of an attempt were started
    crashed             the supervisor                 an attempt ended before the run did: its class and the rank
    preempted           the supervisor                 the ranks were asked to save and stop, and have ended: by what
    recovered           the supervisor                 the first new step after a crash: what the crash has cost
    stopped             the supervisor                 the run is not restarted, or waits for its queue: the reason
    completed           the supervisor                 the run has reached its end

A start without an `ended` or a `failed` of its own was killed. Only the checkpoints on the disk are authoritative: a
kill, or a power failure, right after a commit may lose the last events.

Each rank appends to a file of its own, the supervisor to another one, and so do commands that work beside the training,
since appending from two machines to one file is not safe on every file system. `base.event_reader` merges
them. A line is appended by one write, so that a kill tears at most the last line; an append after a torn line begins a
new one. Nothing is forced to the disk. No torch is imported here, and nothing communicates.
"""

import json
import math
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack, get_args

from .errors import printable
from .json_text import MAX_ENTRIES, load_json, read_count, read_entries, read_number
from .run_directory import EventWriter, RunDirectory

__all__ = ["Event", "EventKind", "EventLog", "EventWarning", "decode_event", "encode_event"]

_FitKind = Literal[
    "started",
    "restored",
    "saved",
    "verified",
    "quarantined",
    "validated",
    "evaluated",
    "nonfinite_gradient",
    "failed",
    "hang",
    "ended",
]
_SupervisorKind = Literal["launched", "crashed", "preempted", "recovered", "stopped", "completed"]
EventKind = Literal[_FitKind, _SupervisorKind]
MAX_LINE_BYTES: Final = 1 << 16
"""More than any line that is written."""

_KINDS: dict[str, EventKind] = {kind: kind for kind in get_args(EventKind)}
_MAX_TEXT: Final = 500
_MAX_NAME: Final = 64


class EventWarning(UserWarning):
    """An event could not be written; training continues."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a run.

    Attributes:
        kind: What happened.
        time_seconds: Unix time, by the clock of the machine that wrote it.
        monotonic_seconds: That machine's monotonic clock, for differences between two events of one boot.
        rank: The rank that wrote it; None for the supervisor, and for a command beside the training.
        step: Windows attempted; None if the step is not known yet.
        clocks: Exact counts at that step, such as `tokens_seen` and `updates`.
        checkpoint: The checkpoint that it is about, relative to the run's directory of checkpoints.
        error_class: The class of the error, if the event is about one.
        metrics: By name; a value that is not finite is NaN.
        text: For people, in one line.
    """

    kind: EventKind
    time_seconds: float
    monotonic_seconds: float
    rank: int | None
    step: int | None = None
    clocks: Mapping[str, int] = field(default_factory=dict)
    checkpoint: str | None = None
    error_class: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


def encode_event(event: Event) -> bytes:
    """Returns the line of an event, with its end; texts and names are cut to a bounded length."""
    moment = datetime.fromtimestamp(event.time_seconds, UTC)
    content: dict[str, Any] = {
        "time": moment.isoformat(timespec="microseconds"),
        "monotonic_seconds": round(event.monotonic_seconds, 6),
        "kind": event.kind,
        "rank": event.rank,
        "step": event.step,
        "clocks": {_cut(name, _MAX_NAME): value for name, value in list(event.clocks.items())[:MAX_ENTRIES]},
        "checkpoint": None if event.checkpoint is None else _cut(event.checkpoint, _MAX_TEXT),
        "error_class": None if event.error_class is None else _cut(event.error_class, _MAX_NAME),
        "metrics": {
            _cut(name, _MAX_NAME): value if math.isfinite(value) else None
            for name, value in list(event.metrics.items())[:MAX_ENTRIES]
        },
        "text": _cut(event.text, _MAX_TEXT),
    }
    kept = {key: value for key, value in content.items() if value not in (None, {}, "")}
    return json.dumps(kept, allow_nan=False).encode("ascii") + b"\n"


def _cut(text: str, limit: int) -> str:
    """Returns the beginning of a text in one line without control characters."""
    shown = printable(text[:limit])
    return shown if len(text) <= limit and len(shown) <= limit else f"{shown[: limit - 3]}..."


def decode_event(line: bytes) -> Event | None:
    """Returns the event of a line; None for a torn line, and for a line that no version of this module writes.

    Whatever the line holds, memory and time are bounded by its length, which is limited to `MAX_LINE_BYTES`.
    """
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        content = load_json(line)
        return _decode(content) if isinstance(content, dict) else None
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):  # anything may stand in a file
        return None


def _decode(content: dict[str, Any]) -> Event:
    moment = datetime.fromisoformat(_text(content["time"]))
    if moment.tzinfo is None:
        raise ValueError("a time without a time zone")
    checkpoint, error_class = content.get("checkpoint"), content.get("error_class")
    rank, step = content.get("rank"), content.get("step")
    return Event(
        kind=_KINDS[content["kind"]],
        time_seconds=moment.timestamp(),
        monotonic_seconds=read_number(content["monotonic_seconds"]),
        rank=None if rank is None else read_count(rank),
        step=None if step is None else read_count(step),
        clocks={_text(name): read_count(value) for name, value in read_entries(content.get("clocks", {}))},
        checkpoint=None if checkpoint is None else _text(checkpoint),
        error_class=None if error_class is None else _text(error_class),
        metrics={
            _text(name): math.nan if value is None else read_number(value)
            for name, value in read_entries(content.get("metrics", {}))
        },
        text=_text(content.get("text", "")),
    )


def _text(value: Any) -> str:
    """Returns a text that is safe to print, whoever wrote the file."""
    if not isinstance(value, str):
        raise TypeError("not a text")
    return printable(value[:_MAX_TEXT])


class EventFields(TypedDict, total=False):
    """What a writer gives of an event: each may be left out."""

    step: int | None
    """Windows attempted."""
    clocks: Mapping[str, int]
    """Exact counts at that step."""
    checkpoint: Path
    """The checkpoint that it is about."""
    error: BaseException | None
    """Gives class and, where there is no other, text."""
    metrics: Mapping[str, float]
    """By name."""
    text: str
    """For people."""


class EventLog:
    """Writes the events of one rank, the supervisor, or a command. It keeps no file open, and may be pickled.

    An event that cannot be written never raises: `write` warns of the first one, `append` returns the reason.

    Args:
        run_dir: The run's directory.
        writer: The rank that writes, "supervisor", or None for a command beside the training.

    Attributes:
        run_dir: The run's directory.
    """

    def __init__(self, run_dir: Path, writer: EventWriter) -> None:
        run = RunDirectory(run_dir)
        self.run_dir = run_dir
        self._path = run.event_file(writer)
        self._checkpoints = run.checkpoints
        self._rank = writer if isinstance(writer, int) else None
        self._has_warned = False

    def name_checkpoint(self, path: Path) -> str:
        """Returns how an event names a checkpoint: relative to this run's, so that both may move together."""
        return os.path.relpath(path, self._checkpoints)

    def write(self, kind: EventKind, **about: Unpack[EventFields]) -> None:
        """Appends an event that happens now; the first that cannot be written is an `EventWarning`."""
        problem = self.append(kind, **about)
        if problem is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{problem}; further lost events are not reported", EventWarning, stacklevel=2)

    def append(self, kind: EventKind, **about: Unpack[EventFields]) -> str | None:
        """Appends an event as `write` does, and returns why that is not possible, or None."""
        checkpoint, error = about.get("checkpoint"), about.get("error")
        event = Event(
            kind,
            time.time(),
            time.monotonic(),
            self._rank,
            about.get("step"),
            {name: count for name, count in (about.get("clocks") or {}).items() if name != "step"},
            None if checkpoint is None else self.name_checkpoint(checkpoint),
            None if error is None else type(error).__name__,
            about.get("metrics", {}),
            about.get("text") or ("" if error is None else str(error)),
        )
        try:
            _append_line(self._path, encode_event(event))
        except OSError as problem:
            return f"the event {kind!r} is not written to {self._path}: {problem.strerror or problem}"
        return None


def _append_line(path: Path, line: bytes) -> None:
    """Appends a line by one write, and does not continue a line that was torn before."""
    try:
        descriptor = _open(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open(path)
    try:
        # One writer per file makes this safe: no process appends between check and write. A kill within the write
        # leaves a part of one line, which the next start ends here.
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes > 0 and os.pread(descriptor, 1, num_bytes - 1) != b"\n":
            line = b"\n" + line
        num_written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if num_written < len(line):
        raise OSError(f"only {num_written} of {len(line)} bytes were written")


def _open(path: Path) -> int:
    # A FIFO or a device may lie at the path, and must not block training, or a link to a file that is not ours.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o644)
