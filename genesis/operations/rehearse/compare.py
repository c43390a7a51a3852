"""Compares a killed run with an uninterrupted one: the final checkpoints bit for bit, and the loss of every step."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genesis.base.errors import RunEndedError
from genesis.base.run_directory import RunDirectory
from genesis_callbacks.checkpoint import (
    CorruptCheckpointError,
    Manifest,
    list_committed,
    verify,
)
from genesis_callbacks.checkpoint.compare import compare_tensors
from genesis_callbacks.checkpoint.state import read_state

LOSS_COLUMNS = ("train/loss", "validation/loss")

# The state beside the tensors that must be equal in both runs: the data position and the optimizer's settings.
# Lightning's own progress counts, clocks of other callbacks and unused generators may differ without harm.
_DECIDING_STATE = ("trainer.CorpusDataModule", "trainer.lr_schedulers", "optimizers")
_TRAINED_PREFIXES = ("model.", "optimizer.")

Losses = dict[int, dict[str, str]]
"""Step to losses, as the strings in the log, which keep all digits of a number."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in both checkpoints; `max_abs_difference` is None where shapes or names differ."""

    name: str
    verdict: str
    max_abs_difference: float | None


@dataclass(frozen=True)
class ValueDifference:
    """A value that is not the same in both runs."""

    key: str
    straight: Any
    killed: Any


@dataclass(frozen=True)
class LossDifference:
    """A loss that is not the same in both runs; `start` is the number, from 1, of the training that logged the loss."""

    step: int
    column: str
    straight: str
    killed: str
    start: int


@dataclass(frozen=True)
class CheckpointComparison:
    """Two runs' newest committed checkpoints, both verified to the last digest.

    Args:
        straight: The checkpoint of the run that was never killed.
        killed: The checkpoint of the killed run.
        num_tensors: Number of tensors of model and optimizer.
        tensors: The tensors that differ, the largest difference first.
        values: Step, counters, data position and optimizer settings that differ.
        others: Other state that differs, by its path; it does not affect the verdict.
    """

    straight: str
    killed: str
    num_tensors: int
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    others: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether weights, optimizer, counters and data position are the same."""
        return not self.tensors and not self.values


def compare_runs(straight: Path, killed: Path) -> CheckpointComparison:
    """Compares the newest committed checkpoints of two runs' directories.

    Raises:
        RunEndedError: A run has no committed checkpoint, or the newest checkpoint does not verify.
    """
    (path, manifest), (other, other_manifest) = _find_final(straight), _find_final(killed)
    comparisons = list(compare_tensors(path, manifest, other, other_manifest))
    changed = [each for each in comparisons if each.verdict != "same"]
    trained = [
        TensorDifference(each.name, each.verdict, each.max_abs_difference) for each in changed if _is_trained(each.name)
    ]
    counts = find_differences(_read_counts(manifest), _read_counts(other_manifest))
    states = list(
        find_differences(
            {"ranks": read_state(path, manifest)},
            {"ranks": read_state(other, other_manifest)},
        )
    )
    return CheckpointComparison(
        straight=path.name,
        killed=other.name,
        num_tensors=sum(_is_trained(each.name) for each in comparisons),
        tensors=tuple(sorted(trained, key=lambda each: -(each.max_abs_difference or 0.0))),
        values=(*counts, *(each for each in states if _decides(each.key))),
        others=(
            *(each.key for each in states if not _decides(each.key)),
            *(each.name for each in changed if not _is_trained(each.name)),
        ),
    )


def _is_trained(name: str) -> bool:
    return name.startswith(_TRAINED_PREFIXES)


def _read_counts(manifest: Manifest) -> dict[str, Any]:
    return {"step": manifest.step, "counters": manifest.counters, "ranks": manifest.world_size}


def _find_final(run_dir: Path) -> tuple[Path, Manifest]:
    committed = list_committed(run_dir)
    if not committed:
        raise RunEndedError(f"{run_dir} has no committed checkpoint although the run has ended")
    path = committed[-1][0]
    try:
        return path, verify(path, "deep")
    except CorruptCheckpointError as error:
        raise RunEndedError(f"the final checkpoint does not verify: {error}") from error


def _decides(key: str) -> bool:
    """Returns whether the state at a path of some rank, such as `ranks.0.trainer...`, must be equal in both runs."""
    return key.split(".", 2)[-1].startswith(_DECIDING_STATE)


def find_differences(one: Any, other: Any, key: str = "") -> Iterator[ValueDifference]:
    """Yields the leaves of two nests of plain values that are not the same, by dotted path.

    Example:
        >>> list(find_differences({"a": [1, 2]}, {"a": [1, 3]}))
        [ValueDifference(key='a.1', straight=2, killed=3)]
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in sorted(one.keys() | other.keys()):
            yield from find_differences(one.get(name), other.get(name), f"{key}.{name}" if key else str(name))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (before, now) in enumerate(zip(one, other, strict=True)):
            yield from find_differences(before, now, f"{key}.{index}")
    elif one != other:
        yield ValueDifference(key, one, other)


def read_losses(run_dir: Path) -> Losses:
    """Returns the losses in a run's log, without a last row that a kill has truncated."""
    path = RunDirectory(run_dir).metrics
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if line.endswith("\n")))
    losses: Losses = {}
    for row in rows:
        found = {column: row[column] for column in LOSS_COLUMNS if row.get(column)}
        if found:
            losses.setdefault(int(row["step"]), {}).update(found)
    return losses


def compare_losses(straight: Losses, killed: Losses, start: int) -> list[LossDifference]:
    """Returns the losses that both runs have logged and that are not the same, in the order of their steps."""
    return [
        LossDifference(step, column, straight[step][column], loss, start)
        for step, losses in sorted(killed.items())
        for column, loss in losses.items()
        if straight.get(step, {}).get(column, loss) != loss
    ]


def find_unlogged(straight: Losses, killed: Losses) -> list[int]:
    """Returns the steps whose training loss only one of two finished runs has in its log."""
    column = LOSS_COLUMNS[0]
    one, other = ({step for step, row in losses.items() if column in row} for losses in (straight, killed))
    return sorted(one ^ other)
