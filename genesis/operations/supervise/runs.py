"""Lists the runs under a directory, from the small files that a run leaves. Imports no torch, and opens no checkpoint.

A list of hundreds of runs must appear at once, so that of each run only the end of its files is read, and of its
checkpoints only names, sizes and the newest manifest.
"""

import csv
import fcntl
import io
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from genesis.base.errors import UserError, printable
from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.mirror_manifest import MAX_MANIFEST_BYTES
from genesis.operations.supervise.status import SupervisorStatus, read_status
from genesis.recipe.yaml import FastRecipeLoader
from genesis_callbacks.base.events import decode_event
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.locks import lock_file
from genesis_callbacks.base.run_directory import COMMITTED_NAME, LOCK_NAME, MANIFEST_NAME, is_checkpoint_name
from genesis_callbacks.base.run_directory import RunDirectory as CallbacksDirectory
from genesis_callbacks.base.untrusted import open_descriptor, open_file, read_file
from genesis_callbacks.heartbeats import HeartbeatRecord, read_heartbeats

RunState = Literal["training", "waiting", "ended", "crashed", "stopped", "new"]

_MAX_DEPTH: Final = 5
_MAX_RECIPE_BYTES: Final = 1 << 20
_MAX_RECIPE_DEPTH: Final = 100
_TAIL_BYTES: Final = 1 << 16
_MAX_LABEL: Final = 60
_MAX_TIME_SECONDS: Final = 2.5e11  # the year 9892
_FRESH_SECONDS: Final = 30.0
"""A heartbeat or a supervisor's snapshot of this age is of a process that lives, on whatever machine."""


@dataclass(frozen=True)
class RunSummary:
    """What a list shows of a run; None where nothing is known.

    Attributes:
        name: The path below the listed directory.
        path: The run's directory.
        recipe: Shape of the model and the data, such as "6 x 288 on python".
        state: "training"; "waiting" while a supervisor waits, recovers or starts ranks; "ended" by itself or by a
            signal; "crashed"; "stopped" by its supervisor, which gave up; "new" before the first start.
        step: Windows attempted.
        tokens: Tokens in them.
        loss: The last logged training loss.
        num_crashes: Crashes that a supervisor recorded.
        num_checkpoints: Committed checkpoints.
        num_bytes: Size of the run's files.
        changed_seconds: Unix time of the last sign of life.
    """

    name: str
    path: Path
    recipe: str
    state: RunState
    step: int | None
    tokens: int | None
    loss: float | None
    num_crashes: int
    num_checkpoints: int
    num_bytes: int
    changed_seconds: float | None


def find_runs(directory: Path) -> list[Path]:
    """Returns the runs under a directory, or the directory itself if it is a run; mirrors are left out.

    Raises:
        UserError: There is no such directory.
    """
    if not directory.is_dir():
        raise UserError(f"no such directory: {directory}; give a directory of runs, such as runs/")
    return sorted(_find(directory, 0))


def _find(directory: Path, depth: int) -> Iterator[Path]:
    try:
        entries = [entry for entry in os.scandir(directory) if not entry.name.startswith(".")]
    except OSError:  # another user's directory
        return
    names = {entry.name for entry in entries}
    run = RunDirectory(directory)
    marks = (run.checkpoints, run.recipe, run.metrics, run.supervisor, CallbacksDirectory(directory).heartbeats)
    if any(mark.name in names for mark in marks):
        if "mirror.json" not in names:
            yield directory
        return
    if depth < _MAX_DEPTH:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _find(directory / entry.name, depth + 1)


def summarise_run(path: Path, root: Path | None = None, now_seconds: float | None = None) -> RunSummary:
    """Returns the summary of a run. It takes no lock and may be called while the run trains.

    Args:
        path: The run's directory.
        root: The listed directory, for the name.
        now_seconds: Unix time; None for now.
    """
    now = time.time() if now_seconds is None else now_seconds
    heartbeat = max(read_heartbeats(path).values(), key=lambda record: record.time_seconds, default=None)
    names = _list_checkpoints(path)
    manifest = {} if heartbeat is not None and heartbeat.clocks else _read_newest(path, names)
    counters = manifest.get("counters", {}) if heartbeat is None else heartbeat.clocks
    changed = _time(heartbeat.time_seconds if heartbeat is not None else manifest.get("created_seconds"))
    name = path.name if root is None or path == root else str(path.relative_to(root))
    loss = heartbeat.loss if heartbeat is not None else None
    return RunSummary(
        name=printable(name),
        path=path,
        recipe=_describe_recipe(path),
        state=_find_state(path, heartbeat, bool(names), now),
        step=heartbeat.step if heartbeat is not None else _count(manifest.get("step")),
        tokens=_count(counters.get("tokens_seen") if isinstance(counters, Mapping) else None),
        loss=loss if loss is not None else _read_last_loss(path),
        num_crashes=_count_crashes(path),
        num_checkpoints=len(names),
        num_bytes=_measure(path),
        changed_seconds=changed,
    )


def _find_state(path: Path, heartbeat: HeartbeatRecord | None, has_checkpoints: bool, now: float) -> RunState:
    status = read_status(path)
    live = _find_live_state(path, heartbeat, status, now)
    if live is not None:
        return live
    if heartbeat is None and status is None:
        return _find_last_event(path) or ("ended" if has_checkpoints else "new")
    is_at_end = status is not None and status.state in ("completed", "requeued")
    if is_at_end or (heartbeat is not None and heartbeat.phase == "ended"):
        return "ended"
    return "stopped" if status is not None and status.state == "stopped" else "crashed"


def _find_live_state(
    path: Path, heartbeat: HeartbeatRecord | None, status: SupervisorStatus | None, now: float
) -> RunState | None:
    """Returns the state of a run whose processes live; None for any other run."""
    if status is not None and now - status.updated_seconds < _FRESH_SECONDS:
        if status.state in ("launching", "recovering", "waiting"):
            return "waiting"
        if status.state == "training":
            return "training"
    if _is_held(path):
        return "training"
    # On another machine, whose locks this one may not see.
    is_fresh = heartbeat is not None and now - heartbeat.time_seconds < _FRESH_SECONDS and not _is_here(heartbeat)
    return "training" if heartbeat is not None and is_fresh and heartbeat.phase in ("train", "validate") else None


def _is_here(heartbeat: HeartbeatRecord) -> bool:
    return heartbeat.host == os.uname().nodename


def _is_held(path: Path) -> bool:
    """Returns whether a process on this machine holds the run's checkpoints."""
    try:
        descriptor = open_descriptor(RunDirectory(path).checkpoints / LOCK_NAME)
    except OSError:
        return False
    try:
        # A shared lock, for no longer than this line: a run that starts waits longer than that.
        lock_file(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a lock that this process may not have
        return False
    finally:
        os.close(descriptor)
    return False


def _find_last_event(path: Path) -> RunState | None:
    """Returns how a run of a version without heartbeats ended: a start without an end was killed."""
    lines = _read_tail(CallbacksDirectory(path).event_file(0)).split(b"\n")
    for line in reversed(lines):
        event = decode_event(line)
        if event is not None and event.kind == "ended":
            return "ended"
        if event is not None and (event.kind == "started" or (event.kind == "failed" and event.checkpoint is None)):
            return "crashed"
    return None


def _list_checkpoints(path: Path) -> list[str]:
    directory = RunDirectory(path).checkpoints
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if is_checkpoint_name(entry.name))
    except OSError:
        return []
    return [name for name in names if (directory / name / COMMITTED_NAME).is_file()]


def _read_newest(path: Path, names: list[str]) -> Mapping[str, Any]:
    """Returns the manifest of the newest checkpoint by its time; an empty one if it cannot be read."""
    directory = RunDirectory(path).checkpoints
    try:
        newest = max(names, key=lambda name: (directory / name / COMMITTED_NAME).stat().st_mtime)
        content = load_json(read_file(directory / newest / MANIFEST_NAME, MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):  # removed in between, forged, or there is none
        return {}
    return content if isinstance(content, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _time(value: Any) -> float | None:
    is_time = type(value) in (int, float) and 0 <= value < _MAX_TIME_SECONDS
    return float(value) if is_time else None


def _count_crashes(path: Path) -> int:
    try:
        return sum(1 for entry in os.scandir(RunDirectory(path).crashes) if entry.is_dir())
    except OSError:
        return 0


def _measure(path: Path) -> int:
    """Returns the size of all files, without following links."""
    total, waiting = 0, [path]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:  # removed in between, or another user's
            continue
    return total


def _read_tail(path: Path) -> bytes:
    """Returns the last lines of a file that are whole."""
    try:
        file = open_file(path)
    except OSError:
        return b""
    with file:
        start = max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES)
        file.seek(start)
        data = file.read(_TAIL_BYTES)
    return data[data.find(b"\n") + 1 :] if start else data


def _read_last_loss(path: Path) -> float | None:
    metrics = RunDirectory(path).metrics
    try:
        with open_file(metrics) as file:
            head = file.readline(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    columns = next(csv.reader(head.splitlines()), [])
    if "train/loss" not in columns:
        return None
    place = columns.index("train/loss")
    for line in reversed(_read_tail(metrics).decode("utf-8", errors="replace").splitlines()):
        row = next(csv.reader(io.StringIO(line)), [])
        try:
            loss = float(row[place])
        except (IndexError, ValueError):  # a row of a validation, or the names of the columns
            continue
        return loss if math.isfinite(loss) else None
    return None


def _describe_recipe(path: Path) -> str:
    """Returns shape and data of the newest recipe of a run, such as "6 x 288 on python"; empty if there is none."""
    recipes = [RunDirectory(path).recipe, *path.glob("config.resume-*.yaml")]
    try:
        newest = max((recipe for recipe in recipes if recipe.is_file()), key=lambda recipe: recipe.stat().st_mtime)
        content = parse_recipe(read_file(newest, _MAX_RECIPE_BYTES))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # `max` of none is a ValueError
        return ""
    decoder, data_section = _section(content, "model", "decoder"), _section(content, "data")
    layers, dim, corpus = decoder.get("num_layers"), decoder.get("dim"), data_section.get("corpus")
    parts = [f"{layers} x {dim}"] if _count(layers) is not None and _count(dim) is not None else []
    if isinstance(corpus, str) and corpus:
        parts.append(f"on {Path(corpus).name}")
    elif data_section.get("stream"):
        parts.append("on a stream")
    if _section(content, "model").get("adapter"):
        parts.append("(adapter)")
    return printable(" ".join(parts)[:_MAX_LABEL])


def parse_recipe(data: bytes) -> Any:
    """Returns the content of a recipe; None if it is nested too deeply.

    Raises:
        ValueError: It is not YAML; a `yaml.YAMLError` for most faults.
    """
    return yaml.load(data, FastRecipeLoader) if _is_flat(data) else None


def _is_flat(data: bytes) -> bool:
    """Returns whether a recipe is nested moderately: libyaml's loader recurses without a limit, until it crashes."""
    depth = 0
    for event in yaml.parse(data, FastRecipeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_RECIPE_DEPTH:
            return False
    return True


def _section(content: Any, *names: str) -> Mapping[str, Any]:
    for name in names:
        content = content.get(name) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}
