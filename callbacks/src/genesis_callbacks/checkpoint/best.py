"""The mark of the best checkpoints: a small file beside the checkpoints, which themselves never change.

It names a checkpoint by the hash of its manifest, so that it never speaks of another one of the same name. Retention
reads it: the best stay. A file that marks one checkpoint alone has the form of the versions that knew only one.
"""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from genesis_callbacks.files import replace_file
from genesis_callbacks.run_directory import BEST_NAME

from .errors import CorruptCheckpointError
from .lineage import checkpoints_in
from .manifest import checkpoint_name, is_checkpoint_name, read_committed_hash
from .safe_read import MAX_NOTE_BYTES, parse_json, read_file

MonitorMode = Literal["min", "max"]
_MODES: dict[str, MonitorMode] = {"min": "min", "max": "max"}
_OTHERS = "others"


@dataclass(frozen=True)
class Measured:
    """A step and what the monitored metric was there."""

    step: int
    value: float


def rank(measured: Iterable[Measured], mode: MonitorMode) -> tuple[Measured, ...]:
    """Returns the steps with the best first: each once, the earlier first on a tie, none that is not finite.

    Example:
        >>> [one.step for one in rank([Measured(1, 2.0), Measured(2, math.nan), Measured(3, 1.0)], "min")]
        [3, 1]
    """
    sign = 1.0 if mode == "min" else -1.0
    in_order = sorted(
        (one for one in measured if math.isfinite(one.value)), key=lambda one: (sign * one.value, one.step)
    )
    best_by_step: dict[int, Measured] = {}
    for one in in_order:
        best_by_step.setdefault(one.step, one)
    return tuple(best_by_step.values())


@dataclass(frozen=True)
class Marked:
    """A checkpoint that is marked.

    Attributes:
        name: Of the checkpoint.
        manifest_hash: Of its manifest.
        value: Of the metric.
    """

    name: str
    manifest_hash: str
    value: float


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run so far, and those that come next.

    Attributes:
        name: Of the best checkpoint.
        manifest_hash: Of its manifest.
        monitor: Key of the metric that decided.
        mode: Whether smaller (`min`) or larger (`max`) is better.
        value: Of the metric.
        others: The next best, in this order.
    """

    name: str
    manifest_hash: str
    monitor: str
    mode: MonitorMode
    value: float
    others: tuple[Marked, ...] = ()

    @property
    def ranked(self) -> tuple[Marked, ...]:
        """All that are marked, the best first."""
        return (Marked(self.name, self.manifest_hash, self.value), *self.others)


def read_best(directory: Path | str) -> Best | None:
    """Returns the marks of a run's best checkpoints that are still there; None where there is none.

    Any process may call it; it does not communicate.

    Args:
        directory: A run's directory, or the one in it that holds the `step-*`.

    Raises:
        CorruptCheckpointError: The mark exists but is invalid.
        UnreadableCheckpointError: The mark, or a checkpoint that it names, cannot be read.
    """
    directory = checkpoints_in(directory)
    path = directory / BEST_NAME
    if not os.path.lexists(path):
        return None
    try:
        best = _decode(parse_json(read_file(path, MAX_NOTE_BYTES), BEST_NAME))
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path} is no mark of a best checkpoint: {error}; delete it") from error
    there = [marked for marked in best.ranked if _find_hash(directory / marked.name) == marked.manifest_hash]
    return _combine(there, best.monitor, best.mode)


def _find_hash(path: Path) -> str | None:
    try:
        return read_committed_hash(path)
    except CorruptCheckpointError:  # it is gone
        return None


def _combine(ranked: Sequence[Marked], monitor: str, mode: MonitorMode) -> Best | None:
    if not ranked:
        return None
    first, *others = ranked
    return Best(first.name, first.manifest_hash, monitor, mode, first.value, tuple(others))


def _decode(content: Any) -> Best:
    """Returns the marks that JSON holds, each value of it of its type.

    Raises:
        CorruptCheckpointError: It holds none.
    """
    fields = _names_of(Best) - {_OTHERS}
    if not isinstance(content, dict) or content.keys() not in (fields, fields | {_OTHERS}):
        raise CorruptCheckpointError("it has other fields")
    monitor, others = content["monitor"], content.get(_OTHERS, [])
    if not isinstance(monitor, str) or not isinstance(others, list):
        raise CorruptCheckpointError("a field has another type")
    mode = _MODES.get(content["mode"]) if isinstance(content["mode"], str) else None
    if mode is None:
        raise CorruptCheckpointError("a field has no meaning")
    first = _decode_marked({name: content[name] for name in _names_of(Marked)})
    return Best(first.name, first.manifest_hash, monitor, mode, first.value, tuple(map(_decode_marked, others)))


def _decode_marked(content: Any) -> Marked:
    if not isinstance(content, dict) or content.keys() != _names_of(Marked):
        raise CorruptCheckpointError("it has other fields")
    name, manifest_hash, value = content["name"], content["manifest_hash"], content["value"]
    if not isinstance(name, str) or not isinstance(manifest_hash, str) or type(value) not in (int, float):
        raise CorruptCheckpointError("a field has another type")
    if not is_checkpoint_name(name) or not abs(value) <= sys.float_info.max:
        raise CorruptCheckpointError("a field has no meaning")
    return Marked(name, manifest_hash, float(value))


def _names_of(kind: type[Best | Marked]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def find_best(directory: Path | str) -> Path | None:
    """Returns where a run's best checkpoint lies, or None; it does not verify.

    Raises:
        CorruptCheckpointError: The mark is there and cannot be read.
    """
    best = read_best(directory)
    return None if best is None else checkpoints_in(directory) / best.name


def read_marked_names(directory: Path | str) -> list[str]:
    """Returns the names of the checkpoints that are marked, the best first; it does not verify.

    Raises:
        CorruptCheckpointError: The mark exists but is invalid.
        UnreadableCheckpointError: The mark, or a checkpoint that it names, cannot be read.
    """
    best = read_best(directory)
    return [] if best is None else [marked.name for marked in best.ranked]


def mark_best(
    directory: Path, ranked: Collection[Measured], monitor: str, mode: MonitorMode, *, count: int
) -> list[Measured]:
    """Marks the first `count` of `ranked` that are there as committed checkpoints, and returns these.

    Where there is none, nothing stays marked. Rank 0 of the run that holds the directory calls it; it does not
    communicate. All marks change at once.

    Raises:
        UnreadableCheckpointError: One of them cannot be read; the marks stay as they were.
    """
    hashes = ((one, _find_hash(directory / checkpoint_name(one.step))) for one in ranked)
    there = [(one, found) for one, found in hashes if found is not None][:count]
    marks = [Marked(checkpoint_name(one.step), found, one.value) for one, found in there]
    best = _combine(marks, monitor, mode)
    if best is None:
        (directory / BEST_NAME).unlink(missing_ok=True)
        return []
    content = dataclasses.asdict(best)
    if not best.others:
        del content[_OTHERS]  # as versions that mark only one write it, and can read it
    replace_file(directory / BEST_NAME, (json.dumps(content) + "\n").encode())
    return [one for one, _ in there]
