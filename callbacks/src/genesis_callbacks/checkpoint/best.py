"""The mark of the best checkpoints: a small file next to the checkpoints, which themselves never change.

The file refers to a checkpoint by the hash of its manifest, so that a later checkpoint of the same name is never taken
for the marked one. Retention keeps the marked checkpoints. A file that marks a single checkpoint has the format of
earlier versions, which could mark only one.
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

from ..base.checkpoint_errors import CorruptCheckpointError
from ..base.files import replace_file
from ..base.manifest import read_committed_hash
from ..base.run_directory import BEST_NAME, checkpoint_name, is_checkpoint_name
from ..base.safe_read import MAX_NOTE_BYTES, parse_json, read_file
from .lineage import checkpoints_in

MonitorMode = Literal["min", "max"]
_MODES: dict[str, MonitorMode] = {"min": "min", "max": "max"}
_OTHERS, _MEASURE = "others", "measure"


@dataclass(frozen=True)
class Measured:
    """A step and the value of the monitored metric at that step."""

    step: int
    value: float


def rank(measured: Iterable[Measured], mode: MonitorMode) -> tuple[Measured, ...]:
    """Returns the steps with finite values, the best first: each step once, and on a tie the earlier step first.

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
    """A marked checkpoint.

    Attributes:
        name: Name of the checkpoint.
        manifest_hash: Hash of its manifest.
        value: Value of the metric.
    """

    name: str
    manifest_hash: str
    value: float


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run so far, and the next best ones.

    Attributes:
        name: Name of the best checkpoint.
        manifest_hash: Hash of its manifest.
        monitor: Key of the monitored metric.
        mode: Whether smaller (`min`) or larger (`max`) values are better.
        value: Value of the metric.
        others: The next best checkpoints, in this order.
        measure: What the values were measured on, as the run names it; None if it does not.
    """

    name: str
    manifest_hash: str
    monitor: str
    mode: MonitorMode
    value: float
    others: tuple[Marked, ...] = ()
    measure: str | None = None

    @property
    def ranked(self) -> tuple[Marked, ...]:
        """All marked checkpoints, the best first."""
        return (Marked(self.name, self.manifest_hash, self.value), *self.others)


def read_best(directory: Path | str) -> Best | None:
    """Returns the marks of a run's best checkpoints that still exist; None if there are none.

    Any process may call this function; it does not communicate.

    Args:
        directory: A run's directory, or its directory of `step-*`.

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
        raise CorruptCheckpointError(f"{path} is not a mark of a best checkpoint: {error}; delete it") from error
    there = [marked for marked in best.ranked if _find_hash(directory / marked.name) == marked.manifest_hash]
    return _combine(there, best.monitor, best.mode, best.measure)


def _find_hash(path: Path) -> str | None:
    try:
        return read_committed_hash(path)
    except CorruptCheckpointError:  # the checkpoint is gone
        return None


def _combine(ranked: Sequence[Marked], monitor: str, mode: MonitorMode, measure: str | None) -> Best | None:
    if not ranked:
        return None
    first, *others = ranked
    return Best(first.name, first.manifest_hash, monitor, mode, first.value, tuple(others), measure)


def _decode(content: Any) -> Best:
    """Returns the marks in JSON, after checking the type of each value.

    Raises:
        CorruptCheckpointError: The JSON holds no valid marks.
    """
    optional = {_OTHERS, _MEASURE}
    if not isinstance(content, dict) or content.keys() | optional != _names_of(Best):
        raise CorruptCheckpointError("it has other fields")
    if not _names_of(Best) - optional <= content.keys():
        raise CorruptCheckpointError("a field is missing")
    monitor, others, measure = content["monitor"], content.get(_OTHERS, []), content.get(_MEASURE)
    if not isinstance(monitor, str) or not isinstance(others, list) or not isinstance(measure, str | None):
        raise CorruptCheckpointError("a field has another type")
    mode = _MODES.get(content["mode"]) if isinstance(content["mode"], str) else None
    if mode is None:
        raise CorruptCheckpointError("a field has no meaning")
    first = _decode_marked({name: content[name] for name in _names_of(Marked)})
    marked = tuple(map(_decode_marked, others))
    return Best(first.name, first.manifest_hash, monitor, mode, first.value, marked, measure)


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
    """Returns the path of a run's best checkpoint, or None; the checkpoint is not verified.

    Raises:
        CorruptCheckpointError: The mark exists but is invalid.
    """
    best = read_best(directory)
    return None if best is None else checkpoints_in(directory) / best.name


def read_marked_names(directory: Path | str) -> list[str]:
    """Returns the names of the marked checkpoints, the best first; the checkpoints are not verified.

    Raises:
        CorruptCheckpointError: The mark exists but is invalid.
        UnreadableCheckpointError: The mark, or a checkpoint that it names, cannot be read.
    """
    best = read_best(directory)
    return [] if best is None else [marked.name for marked in best.ranked]


def mark_best(
    directory: Path,
    ranked: Collection[Measured],
    monitor: str,
    mode: MonitorMode,
    *,
    count: int,
    measure: str | None = None,
) -> list[Measured]:
    """Marks the first `count` of `ranked` that are committed checkpoints, and returns these.

    If there are none, the mark is removed. Rank 0 of the run that holds the directory calls this function; it does not
    communicate. All marks change in one atomic write.

    Raises:
        UnreadableCheckpointError: A checkpoint cannot be read; the marks are unchanged.
    """
    hashes = ((one, _find_hash(directory / checkpoint_name(one.step))) for one in ranked)
    there = [(one, found) for one, found in hashes if found is not None][:count]
    marks = [Marked(checkpoint_name(one.step), found, one.value) for one, found in there]
    best = _combine(marks, monitor, mode, measure)
    if best is None:
        (directory / BEST_NAME).unlink(missing_ok=True)
        return []
    content = dataclasses.asdict(best)
    # Without these, the file has the format of earlier versions, which they can read.
    content = {name: value for name, value in content.items() if value or name not in (_OTHERS, _MEASURE)}
    replace_file(directory / BEST_NAME, (json.dumps(content) + "\n").encode())
    return [one for one, _ in there]
