"""Decides which committed checkpoints are kept. Pure; `apply_retention` carries it out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.checkpoint_errors import CorruptCheckpointError
from ..base.manifest import read_committed_hash, read_manifest
from ..base.run_directory import is_checkpoint_name
from .best import read_marked_names
from .commit import SUPERSEDED_PREFIX, discard
from .lineage import list_committed


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay, beside the newest verified one, the checkpoints marked as best, and the bases of others.

    Args:
        keep_last: Number of the newest checkpoints that stay; None keeps all.
        keep_every_n_steps: Checkpoints whose step is a multiple of this stay for good; None for no such rule.
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
    """Returns the names to remove, oldest first: never the newest verified, and nothing if no checkpoint is verified.

    Args:
        committed: All committed checkpoints of the directory; directories of another kind are never removed.
        newest_verified: The newest checkpoint that is known to be whole.
        retention: Which checkpoints stay.
        marked: Names of the checkpoints that are marked as the best, which stay too.
        bases: Names of the checkpoints that hold tensors of others, which stay too.
    """
    if retention.keep_last is None or newest_verified not in {kept.name for kept in committed}:
        return []
    # By the lineage and not by the step: after a resume from an older step, a larger step may be the older save.
    in_order = sorted(committed, key=lambda kept: (kept.sequence, kept.step, kept.name))
    older = in_order[: -retention.keep_last]
    every = retention.keep_every_n_steps
    staying = {newest_verified, *marked, *bases}
    return [
        kept.name for kept in older if kept.name not in staying and not (every is not None and kept.step % every == 0)
    ]


def name_bases(directory: Path) -> frozenset[str]:
    """Returns the names of the checkpoints that are bases of other checkpoints of the run and must stay.

    The function reads all committed checkpoints of the run, including superseded ones, because a user may go back to
    these.

    Args:
        directory: The directory of one run's checkpoints.

    Raises:
        CheckpointError: A manifest cannot be read, so that its base is unknown.
    """
    # By the hash and not by the path: a run that was moved or copied also finds its bases by the hash.
    hashes = set()
    for path in (*directory.glob("step-*"), *directory.glob(f"{SUPERSEDED_PREFIX}*/step-*")):
        if not is_checkpoint_name(path.name) or not path.is_dir():
            continue
        try:
            manifest = read_manifest(path)
        except CorruptCheckpointError:
            continue  # a damaged checkpoint cannot be restored, with or without its base
        if manifest.base is not None:
            hashes.add(manifest.base.manifest_hash)
    if not hashes:
        return frozenset()
    return frozenset(path.name for path, _ in list_committed(directory) if read_committed_hash(path) in hashes)


def apply_retention(directory: Path, newest_verified: str, retention: Retention) -> list[str]:
    """Removes the checkpoints that `plan_removals` returns, and returns their names.

    Rank 0 calls it after a commit, without communication.

    Raises:
        CheckpointError: The marks of the best checkpoints, or a manifest that may name a base, cannot be read.
        OSError: A directory cannot be moved to the trash.
    """
    marked = read_marked_names(directory)  # an error must come before the first removal
    found = list_committed(directory)
    committed = [CommittedCheckpoint(path.name, manifest.step, manifest.sequence) for path, manifest in found]
    # The base of a checkpoint that is removed now stays until the next save: a kill between the two removals must not
    # leave a checkpoint without its base.
    removals = plan_removals(committed, newest_verified, retention, marked=marked, bases=name_bases(directory))
    for name in removals:
        discard(directory / name)
    return removals
