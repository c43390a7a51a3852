"""The record of a crash: a folder in `RUN/crashes`, written when an attempt has ended before the run did.

    RUN/crashes/0003-lost_rank/crash.json     the record
                               rank-0.log     the end of the rank's output
                               rank-0.stacks  the stacks of its threads, if it still ran when the end was noticed

The record is written again when the run has recovered, with what the crash has cost. Any process may read the records
while the supervisor writes them. Whatever the files hold, reading them raises no error.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.plain import count, entries, number, read_object, text
from genesis_callbacks.base.files import replace_file

RECORD_NAME: Final = "crash.json"
_FOLDER: Final = re.compile(r"(\d{4,9})-([a-z_]{1,40})")
_MAX_RECORDS: Final = 100_000
_MAX_TIME_SECONDS: Final = 2.5e11  # the year 9892


@dataclass(frozen=True)
class CrashRecord:
    """One end of an attempt that was not the end of the run.

    Args:
        number: Number of the crash in this run, from 1.
        attempt: Number of the attempt that ended, from 1.
        end_class: The name of its class (`genesis.operations.supervise.ends`).
        rank: The rank that failed first; None if no rank is to blame.
        step: The last step that a rank reported; None before the first.
        clocks: Exact counts at that step.
        time_seconds: Unix time at which the end was noticed.
        reason: The evidence in one line: an exit status, a message.
        statuses: Exit status by rank, negative for a signal.
        action: What the supervisor did about it.
        environment: Versions, the machine, and the options of the attempt.
        saved_step: Step of the newest checkpoint at that time; 0 for none.
        resumed_from: Step of the checkpoint from which the next attempt continued, 0 for none; None until it has.
        repeated_steps: Steps that were trained again; None until the run has recovered.
        lost_seconds: From the end to the first new step, with the repeated ones; None until the run has recovered.
        cost: That time in the currency of `--cost_per_hour`; None without the option.
    """

    number: int
    attempt: int
    end_class: str
    rank: int | None
    step: int | None
    time_seconds: float
    reason: str
    action: str
    clocks: Mapping[str, int] = field(default_factory=dict)
    statuses: Mapping[int, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    saved_step: int = 0
    resumed_from: int | None = None
    repeated_steps: int | None = None
    lost_seconds: float | None = None
    cost: float | None = None

    @property
    def folder_name(self) -> str:
        """The name of its folder in `RUN/crashes`."""
        return f"{self.number:04d}-{self.end_class}"


def write_crash(run_dir: Path, record: CrashRecord, files: Mapping[str, bytes] | None = None) -> Path:
    """Writes a record, and `files` by name beside it; returns its folder. A second call replaces the record.

    Raises:
        OSError: It cannot be written.
    """
    folder = RunDirectory(run_dir).crashes / record.folder_name
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (files or {}).items():
        replace_file(folder / name, data)
    replace_file(folder / RECORD_NAME, json.dumps(asdict(record), indent=2).encode() + b"\n")
    return folder


def read_crashes(run_dir: Path) -> list[CrashRecord]:
    """Returns the crashes of a run in their order; folders without a valid record are left out."""
    directory = RunDirectory(run_dir).crashes
    try:
        with os.scandir(directory) as found:
            names = sorted(entry.name for entry in found if _FOLDER.fullmatch(entry.name))
    except OSError:
        return []
    records = (_read(directory / name / RECORD_NAME) for name in names[:_MAX_RECORDS])
    return sorted((record for record in records if record is not None), key=lambda record: record.number)


def _read(path: Path) -> CrashRecord | None:
    content = read_object(path)
    try:
        record = None if content is None else _decode(content)
    except (ValueError, LookupError, OverflowError):  # a forged record, or one of another version
        return None
    # A record that names another folder would be written there again, and would spoil the numbers of those to come.
    return record if record is not None and record.folder_name == path.parent.name else None


def _decode(content: Mapping[str, Any]) -> CrashRecord:
    return CrashRecord(
        number=count(content["number"]),
        attempt=count(content["attempt"]),
        end_class=text(content["end_class"]),
        rank=_maybe_count(content["rank"]),
        step=_maybe_count(content["step"]),
        time_seconds=_time(content["time_seconds"]),
        reason=text(content["reason"]),
        action=text(content["action"]),
        clocks={name: count(value) for name, value in entries(content["clocks"]).items()},
        statuses={int(name): count(value) for name, value in entries(content["statuses"]).items()},
        environment={name: text(value) for name, value in entries(content["environment"]).items()},
        saved_step=count(content["saved_step"]),
        resumed_from=_maybe_count(content["resumed_from"]),
        repeated_steps=_maybe_count(content["repeated_steps"]),
        lost_seconds=_maybe_number(content["lost_seconds"]),
        cost=_maybe_number(content["cost"]),
    )


def _time(value: Any) -> float:
    seconds = number(value)
    if not 0 <= seconds < _MAX_TIME_SECONDS:
        raise ValueError("not a time that a calendar has")
    return seconds


def _maybe_count(value: Any) -> int | None:
    return None if value is None else count(value)


def _maybe_number(value: Any) -> float | None:
    return None if value is None else number(value)
