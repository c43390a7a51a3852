"""Decides which committed checkpoints are kept. Pure; `apply_retention` carries it out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from .best import read_marked_names
from .commit import discard
from .lineage import list_committed
from .tensor_places import name_bases


@dataclass(frozen=True)
class Retention:
    """What is kept, beside the newest verified checkpoint, those that are marked as the best, and the bases of others.

    Args:
        keep_last: How many of the newest; None keeps all.
        keep_every_n_steps: Those whose step is a multiple of it are kept for good; None for none.
    """

    keep_last: int | None = None
    keep_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every_n_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None, not {value}")


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint as retention sees it; `sequence` is its place in the lineage."""

    name: str
    step: int
    sequence: int


def plan_removals(
    committed: Sequence[CommittedCheckpoint],
    newest_verified: str | None,
    retention: Retention,
    *,
    marked: Collection[str] = (),
    bases: Collection[str] = (),
) -> list[str]:
    """Returns the names to remove, oldest first: never the newest verified, never anything where none is verified.

    Args:
        committed: All committed checkpoints of the directory; others are nobody's business here.
        newest_verified: The newest that is known to be whole.
        retention: What is kept.
        marked: The names of those that are marked as the best, which stay too.
        bases: The names of those that hold tensors of others, which stay too.
    """
    if retention.keep_last is None or newest_verified not in {kept.name for kept in committed}:
        return []
    in_order = sorted(committed, key=lambda kept: (kept.sequence, kept.step, kept.name))
    older = in_order[: -retention.keep_last]
    every = retention.keep_every_n_steps
    staying = {newest_verified, *marked, *bases}
    return [
        kept.name for kept in older if kept.name not in staying and not (every is not None and kept.step % every == 0)
    ]


def apply_retention(directory: Path, newest_verified: str, retention: Retention) -> list[str]:
    """Removes what `plan_removals` says and returns its names. Rank 0 calls it after a commit; no communication.

    Raises:
        CorruptCheckpointError: It is not known which are the best.
        OSError: A directory cannot be moved to the trash.
    """
    marked = read_marked_names(directory)
    found = list_committed(directory)
    committed = [CommittedCheckpoint(path.name, manifest.step, manifest.sequence) for path, manifest in found]
    removals = plan_removals(committed, newest_verified, retention, marked=marked, bases=name_bases(found))
    for name in removals:
        discard(directory / name)
    return removals
