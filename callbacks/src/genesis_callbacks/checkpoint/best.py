"""The mark of the best checkpoint: a small file beside the checkpoints, which themselves never change.

It names a checkpoint by the hash of its manifest, so that it never speaks of another one of the same name. Retention
reads it: the best stays.
"""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .commit import replace_file
from .errors import CheckpointError, CorruptCheckpointError
from .lineage import checkpoints_in
from .manifest import checkpoint_name, is_checkpoint_name, read_committed_hash
from .safe_read import MAX_NOTE_BYTES, parse_json, read_file

BEST_NAME = "best.json"
MonitorMode = Literal["min", "max"]
_MAX = math.inf


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run so far.

    Attributes:
        name: Of the checkpoint.
        manifest_hash: Of its manifest.
        monitor: Key of the metric that decided.
        mode: Whether smaller (`min`) or larger (`max`) is better.
        value: Of the metric.
    """

    name: str
    manifest_hash: str
    monitor: str
    mode: MonitorMode
    value: float


def is_better(value: float, than: float | None, mode: MonitorMode) -> bool:
    """Says whether a metric's value is better than the best so far; one that is not finite never is.

    Example:
        >>> is_better(1.0, None, "min"), is_better(1.0, 1.0, "min"), is_better(math.nan, None, "max")
        (True, False, False)
    """
    if not math.isfinite(value):
        return False
    return than is None or (value < than if mode == "min" else value > than)


def read_best(directory: Path | str) -> Best | None:
    """Returns the mark of a run's best checkpoint; None where there is none, or the checkpoint is no longer there.

    Any process may call it; it does not communicate.

    Args:
        directory: A run's directory, or the one in it that holds the `step-*`.

    Raises:
        CorruptCheckpointError: The mark is there and is none.
        UnreadableCheckpointError: The mark, or what it names, cannot be read.
    """
    directory = checkpoints_in(directory)
    path = directory / BEST_NAME
    if not os.path.lexists(path):
        return None
    try:
        best = _decode(parse_json(read_file(path, MAX_NOTE_BYTES), BEST_NAME))
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path} is no mark of a best checkpoint: {error}; delete it") from error
    try:
        return best if read_committed_hash(directory / best.name) == best.manifest_hash else None
    except CorruptCheckpointError:  # it is gone
        return None


def _decode(content: Any) -> Best:
    """Returns the mark that JSON holds, each value of it of its type.

    Raises:
        CorruptCheckpointError: It holds none.
    """
    if not isinstance(content, dict) or content.keys() != {field.name for field in dataclasses.fields(Best)}:
        raise CorruptCheckpointError("it has other fields")
    texts = [content[name] for name in ("name", "manifest_hash", "monitor", "mode")]
    value = content["value"]
    if not all(isinstance(text, str) for text in texts) or type(value) not in (int, float):
        raise CorruptCheckpointError("a field has another type")
    if not is_checkpoint_name(content["name"]) or content["mode"] not in ("min", "max") or not -_MAX < value < _MAX:
        raise CorruptCheckpointError("a field has no meaning")
    return Best(**content)


def find_best(directory: Path | str) -> Path | None:
    """Returns where a run's best checkpoint lies, or None; it does not verify.

    Raises:
        CorruptCheckpointError: The mark is there and cannot be read.
    """
    best = read_best(directory)
    return None if best is None else checkpoints_in(directory) / best.name


def mark_best(directory: Path, step: int, monitor: str, mode: MonitorMode, value: float) -> bool:
    """Marks the committed checkpoint of `step` and says whether it is there to be marked.

    Rank 0 of the run that holds the directory calls it; it does not communicate. The mark changes all at once.
    """
    name = checkpoint_name(step)
    try:
        best = Best(name, read_committed_hash(directory / name), monitor, mode, value)
    except CheckpointError:
        return False
    replace_file(directory / BEST_NAME, (json.dumps(dataclasses.asdict(best)) + "\n").encode())
    return True


def unmark_best(directory: Path) -> None:
    """Takes the mark away, if there is one. The run that holds the directory calls it."""
    (directory / BEST_NAME).unlink(missing_ok=True)
