"""Where each rank of a run stands: a small file for each, rewritten at most once a second. Imports no torch.

    read_heartbeats(Path("runs/a"))      the last heartbeat of each rank, by rank

`genesis_callbacks.Heartbeat` writes them; supervisors, lists of runs and metrics read them. A heartbeat is replaced as
a whole, so that a reader never sees a part of one, and is not forced to the disk: it is about a process that lives.
Files may come from any source: what is no heartbeat is skipped.
"""

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from .base.errors import printable
from .base.json_text import load_json, read_count, read_entries, read_number
from .base.run_directory import RunDirectory
from .base.untrusted import read_file
from .phases import PHASES, Phase

__all__ = ["HeartbeatRecord", "Phase", "read_heartbeats", "write_heartbeat"]

_PHASES: dict[str, Phase] = {phase: phase for phase in PHASES}
_FILE_NAME: Final = re.compile(r"rank-(\d{1,7})\.json")
_MAX_BYTES: Final = 1 << 14
_MAX_FILES: Final = 1 << 14
_MAX_TEXT: Final = 200


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """Where one rank stood when it last wrote.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        pid: Its process.
        host: The name of its machine.
        phase: "train" from the restore on, or another one of `genesis_callbacks.phases`.
        step: Windows attempted, Lightning's global step.
        clocks: The other exact counts, such as `tokens_seen`. Those that only the device knows so far are older.
            `data_position` is the position after the last trained batch, if the data module has one.
        loss: The training loss that was last logged; None before.
        units_per_second: Over all ranks, since the heartbeat before; None if nothing is counted.
        time_seconds: Unix time, by the clock of that machine.
        monotonic_seconds: That machine's monotonic clock.
        milestones: When the callback was "created", and when this fit came to "setup", "train" and "first_step", by the
            same monotonic clock.
        unit: What `TokenCounters` count, "tokens" by default.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    phase: Phase
    step: int
    time_seconds: float
    monotonic_seconds: float
    clocks: Mapping[str, int] = field(default_factory=dict)
    loss: float | None = None
    units_per_second: float | None = None
    milestones: Mapping[str, float] = field(default_factory=dict)
    unit: str = "tokens"


def write_heartbeat(run_dir: Path, record: HeartbeatRecord) -> None:
    """Replaces the heartbeat of a rank, atomically; it does not wait for the disk.

    Raises:
        OSError: The file cannot be written.
    """
    path = RunDirectory(run_dir).heartbeat_file(record.rank)
    content = asdict(record)
    if record.loss is not None and not math.isfinite(record.loss):
        content["loss"] = str(record.loss)  # JSON has no NaN
    staging = path.with_name(f".{path.name}.staging")
    try:
        _write(staging, content)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(staging, content)
    staging.replace(path)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    data = json.dumps(content, allow_nan=False).encode("ascii")
    descriptor = os.open(
        path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
    )
    try:
        num_written = os.write(descriptor, data)
    finally:
        os.close(descriptor)
    if num_written < len(data):
        raise OSError(f"only {num_written} of {len(data)} bytes were written to {path}")


def read_heartbeats(run_dir: Path | str, ranks: Collection[int] | None = None) -> dict[int, HeartbeatRecord]:
    """Returns the last heartbeat of each rank, by rank; ranks of earlier attempts are among them.

    Args:
        run_dir: The run's directory.
        ranks: Read those of these ranks alone; None reads all.
    """
    if ranks is not None:
        named = {rank: _read(RunDirectory(Path(run_dir)).heartbeat_file(rank)) for rank in ranks}
        return {rank: record for rank, record in named.items() if record is not None}
    directory = RunDirectory(Path(run_dir)).heartbeats
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if _FILE_NAME.fullmatch(entry.name))
    except OSError:
        return {}
    found = (_read(directory / name) for name in names[:_MAX_FILES])
    return {record.rank: record for record in found if record is not None}


def _read(path: Path) -> HeartbeatRecord | None:
    try:
        return _decode(load_json(read_file(path, _MAX_BYTES)))
    # The file may be replaced, forged or unreadable: it is then no heartbeat, which the reader notices by its age.
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


def _decode(content: dict[str, Any]) -> HeartbeatRecord:
    if "unit" not in content:  # of an earlier release, which counted tokens alone
        content = {"unit": "tokens", "units_per_second": content["tokens_per_second"], **content}
    loss, speed = content["loss"], content["units_per_second"]
    return HeartbeatRecord(
        rank=read_count(content["rank"]),
        world_size=read_count(content["world_size"]),
        pid=read_count(content["pid"]),
        host=printable(str(content["host"])[:_MAX_TEXT]),
        phase=_PHASES[content["phase"]],
        step=read_count(content["step"]),
        time_seconds=read_number(content["time_seconds"]),
        monotonic_seconds=read_number(content["monotonic_seconds"]),
        clocks={_name(name): read_count(value) for name, value in read_entries(content["clocks"])},
        loss=None if loss is None else float(loss),
        unit=_name(content["unit"]),
        units_per_second=None if speed is None else read_number(speed),
        milestones={_name(name): read_number(value) for name, value in read_entries(content["milestones"])},
    )


def _name(value: Any) -> str:
    return printable(str(value)[:_MAX_TEXT])
