"""Lists the content of a run's checkpoint directory, and plans repairs of broken or left-over entries.

Reading takes no lock, because a training may save and remove checkpoints at the same time; entries that disappear
meanwhile are left out. Only the holder of the directory's lock may call `apply_repair`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from genesis_callbacks.base.errors import numbered

from ..base.checkpoint_errors import CheckpointError, CorruptCheckpointError
from ..base.manifest import Ancestor, Manifest, read_committed_hash, read_manifest
from ..base.run_directory import TRASH_NAME, is_checkpoint_name, is_staging_name
from .commit import QUARANTINE_PREFIX, SUPERSEDED_PREFIX, discard, empty_trash, quarantine
from .lineage import checkpoints_in
from .verify import VerifyLevel, verify

EntryState = Literal["committed", "staging", "quarantined", "superseded", "trash"]
AncestorState = Literal["there", "gone", "replaced"]
RepairAction = Literal["quarantine", "discard", "empty_trash", "none"]


@dataclass(frozen=True)
class InventoryEntry:
    """A directory that the engine created.

    Attributes:
        path: Path of the directory.
        state: The state according to location and name; the content of a `committed` entry is not verified yet.
        manifest: The manifest; None if it is missing or unreadable.
        num_bytes: Size of the files on the disk.
        modified_seconds: Unix time of the newest file.
    """

    path: Path
    state: EntryState
    manifest: Manifest | None
    num_bytes: int
    modified_seconds: float


@dataclass(frozen=True)
class Repair:
    """An entry of a checkpoint directory that needs attention.

    Attributes:
        path: The entry.
        action: The action of `apply_repair`.
        is_bad: Whether a checkpoint is damaged or lost; leftovers are harmless.
        reason: What is wrong with the entry.
        advice: What the user should do.
    """

    path: Path
    action: RepairAction
    is_bad: bool
    reason: str
    advice: str


def _measure(path: Path) -> tuple[int, float]:
    stats = [file.stat() for file in path.iterdir() if file.is_file()]  # the engine creates no subdirectories in these
    return sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=path.stat().st_mtime)


def _read_entry(path: Path, state: EntryState) -> InventoryEntry | None:
    """Returns the entry, or None if it was just removed."""
    try:
        num_bytes, modified_seconds = _measure(path)
    except FileNotFoundError:
        return None
    except OSError:  # the directory cannot be listed; `find_problem` reports that
        num_bytes, modified_seconds = 0, path.lstat().st_mtime
    try:
        manifest = read_manifest(path)
    except (CheckpointError, OSError):
        manifest = None
    return InventoryEntry(path, state, manifest, num_bytes, modified_seconds) if path.is_dir() else None


def _find_directories(directory: Path) -> Iterable[tuple[Path, EntryState]]:
    for path in sorted(directory.iterdir()):
        if not path.is_dir():
            continue
        if is_checkpoint_name(path.name):
            yield path, "committed"
        elif is_staging_name(path.name):
            yield path, "staging"
        elif path.name.startswith(QUARANTINE_PREFIX):
            yield path, "quarantined"
        elif path.name.startswith(SUPERSEDED_PREFIX):
            yield from ((inner, "superseded") for inner in sorted(path.iterdir()) if is_checkpoint_name(inner.name))
        elif path.name == TRASH_NAME:
            yield from ((inner, "trash") for inner in sorted(path.iterdir()) if inner.is_dir())


def read_inventory(directory: Path | str) -> list[InventoryEntry]:
    """Returns the engine's entries in a run's checkpoint directory, by state, oldest first in the lineage.

    Foreign names are left out. Any process may call this function; it does not communicate and takes no lock.

    Args:
        directory: A run's directory, or its directory of `step-*`.

    Raises:
        CheckpointError: There is no such directory.
    """
    directory = checkpoints_in(directory)
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}; give a run's directory")
    found = [_read_entry(path, state) for path, state in _find_directories(directory)]
    return sorted((entry for entry in found if entry is not None), key=_order)


def _order(entry: InventoryEntry) -> tuple[int, float, str]:
    """An entry without a readable manifest comes last of its state, as the newest, so that reports include it."""
    sequence = math.inf if entry.manifest is None else entry.manifest.sequence
    return get_args(EntryState).index(entry.state), sequence, str(entry.path)


def find_problem(
    path: Path, level: VerifyLevel, report: Callable[[int], None] = lambda num_bytes: None
) -> CheckpointError | None:
    """Returns why the checkpoint at `path` does not verify, or None if it does.

    A checkpoint that cannot be read for an external reason (permissions, a failing disk, a newer schema) is not a
    `CorruptCheckpointError`. `report` is that of `verify`.
    """
    try:
        verify(path, level, report=report)
    except CheckpointError as error:
        return error
    except OSError as error:
        return CheckpointError(f"{error.filename or path}: {error.strerror}: it could not be read")
    return None


def find_problems(
    entries: Iterable[InventoryEntry], level: VerifyLevel, report: Callable[[int], None] = lambda num_bytes: None
) -> dict[Path, CheckpointError | None]:
    """Returns the result of `find_problem` for each committed checkpoint that still exists."""
    problems: dict[Path, CheckpointError | None] = {}
    for entry in entries:
        if entry.state == "committed":
            problem = find_problem(entry.path, level, report)
            if problem is None or entry.path.exists():
                problems[entry.path] = problem
    return problems


def newest_whole(
    entries: Sequence[InventoryEntry], level: VerifyLevel = "deep"
) -> tuple[InventoryEntry | None, list[InventoryEntry]]:
    """Returns the newest committed checkpoint that verifies, and the damaged ones that are newer.

    Raises:
        CheckpointError: A newer checkpoint cannot be judged now: its base is missing, a file cannot be read, or its
            schema is newer.
    """
    bad: list[InventoryEntry] = []
    for entry in reversed([entry for entry in entries if entry.state == "committed"]):
        problem = find_problem(entry.path, level)
        if problem is None:
            return entry, bad
        if isinstance(problem, CorruptCheckpointError):
            bad.append(entry)
        elif entry.path.exists():  # a running training may have removed it
            raise problem
    return None, bad


def plan_repairs(entries: Sequence[InventoryEntry], problems: Mapping[Path, CheckpointError | None]) -> list[Repair]:
    """Returns a repair for each entry that is broken or left over. Pure.

    Args:
        entries: The entries of one directory.
        problems: The problems that verification found in committed checkpoints.
    """
    repairs: list[Repair] = []
    for entry in entries:
        problem = problems.get(entry.path)
        if entry.state == "committed" and problem is not None:
            repairs.append(_plan_for_bad(entry.path, problem))
        elif entry.state == "staging":
            advice = "leave it while the run trains; else delete it, as the run's next start does"
            repairs.append(Repair(entry.path, "discard", False, "a save in progress, or an interrupted one", advice))
        elif entry.state == "quarantined":
            advice = "find the cause (disk, copy, memory); delete the directory by hand when it is not needed"
            repairs.append(Repair(entry.path, "none", False, "quarantined before, because it did not verify", advice))
    trash = [entry.path for entry in entries if entry.state == "trash"]
    if trash:
        reason = f"{numbered(len(trash), 'directories')} whose deletion was interrupted"
        repairs.append(Repair(trash[0].parent, "empty_trash", False, reason, "delete them, as the next deletion does"))
    return repairs


def _plan_for_bad(path: Path, problem: CheckpointError) -> Repair:
    if isinstance(problem, CorruptCheckpointError):
        advice = "copy it from a backup, or quarantine it, so that the run continues from the one before it"
        return Repair(path, "quarantine", True, str(problem), advice)
    return Repair(path, "none", True, str(problem), "leave it where it is until it can be read")


def apply_repair(repair: Repair) -> Path | None:
    """Carries out a repair and returns the new path of the entry; None if the entry was deleted.

    A quarantine is recorded in the run's events. The caller must hold the directory's lock. No communication.
    """
    if repair.action == "quarantine":
        return quarantine(repair.path, repair.reason, rank=None)
    if repair.action == "discard":
        discard(repair.path)
        return None
    if repair.action == "empty_trash":
        empty_trash(repair.path.parent)
        return None
    return repair.path


def trace_ancestors(path: Path, manifest: Manifest) -> list[tuple[Ancestor, AncestorState]]:
    """Returns the ancestors of a checkpoint, the nearest first, as far as they exist.

    The ancestors of a fork lead into the run that it was forked from. The last item is the first ancestor that is
    missing, or whose name now belongs to another checkpoint.
    """
    chain: list[tuple[Ancestor, AncestorState]] = []
    ancestor, place, seen = manifest.previous, path.resolve(), {path.resolve()}
    while ancestor is not None:
        try:
            place = ancestor.locate(place.parent).resolve()
            if place in seen:
                break
            seen.add(place)
            is_same = read_committed_hash(place) == ancestor.manifest_hash
            parent = read_manifest(place)
        except (CheckpointError, OSError, RuntimeError):  # pathlib raises RuntimeError for a loop of links
            return [*chain, (ancestor, "gone")]
        if not is_same:
            return [*chain, (ancestor, "replaced")]
        chain.append((ancestor, "there"))
        ancestor = parent.previous
    return chain


@dataclass(frozen=True)
class PartSummary:
    """The tensors of one part of a checkpoint, such as `model.decoder.blocks` or `optimizer.0 exp_avg`."""

    part: str
    num_tensors: int
    num_elements: int
    num_bytes: int
    dtypes: tuple[str, ...]


def _part_of(name: str) -> str:
    head, *rest = name.split(".")
    if head == "optimizer" and len(rest) > 1:
        return f"{head}.{rest[0]} {rest[-1]}"
    return ".".join([head, *rest[:1]] if head == "state" else [head, *rest[:-1]][:3])


def summarise_parts(manifest: Manifest) -> list[PartSummary]:
    """Returns the tensors of a checkpoint by part."""
    names_by_part: dict[str, list[str]] = defaultdict(list)
    for name in manifest.tensors:
        names_by_part[_part_of(name)].append(name)
    summaries = []
    for part, names in sorted(names_by_part.items()):
        records = [manifest.tensors[name] for name in names]
        elements = [math.prod(record.shape) for record in records]
        num_bytes = sum(count * record.item_bytes for count, record in zip(elements, records, strict=True))
        dtypes = tuple(sorted({record.dtype for record in records}))
        summaries.append(PartSummary(part, len(names), sum(elements), num_bytes, dtypes))
    return summaries
