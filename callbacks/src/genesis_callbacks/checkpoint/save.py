"""One save, act by act: report, plan, stage, write, commit, retain. All ranks learn of a failure on any."""

import contextlib
import json
import os
import platform
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .assemble import Heading, assemble, collect_records, retain
from .commit import discard
from .errors import CheckpointError, SaveFailedError
from .hashing import HashAlgorithm
from .manifest import Ancestor, Manifest, checkpoint_name
from .plan import LocalPart, Part, SavePlan, merge_digests, plan_save
from .ranks import Ranks
from .restore import digest_parts
from .retain import Retention
from .stage import stage_blocking
from .write import Receipt, write_shard

_PACKAGES = ("torch", "lightning", "genesis-callbacks", "genesis-lm", "numpy", "blake3")


class RetentionWarning(UserWarning):
    """A checkpoint was saved, but what retention would remove could not be removed."""


@dataclass(frozen=True)
class Snapshot:
    """What one rank gives to a save.

    Attributes:
        step: Windows attempted.
        counters: Exact clocks for the manifest; rank 0's count.
        parts: What this rank holds of every tensor, live.
        section: This rank's other state, already plain JSON.
        has_optimizer: Whether the optimizers' state is in it.
    """

    step: int
    counters: Mapping[str, int]
    parts: list[LocalPart]
    section: Any
    has_optimizer: bool = True


@dataclass(frozen=True)
class Origin:
    """What a run says about itself in each of its manifests; see `Manifest`.

    Raises:
        CheckpointError: Something in it is not plain JSON.
    """

    identity: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("identity", "recipe"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"the {name} for the manifest must be plain JSON: {error}") from error


@dataclass(frozen=True)
class Saved:
    """A save that became a checkpoint."""

    path: Path
    manifest: Manifest
    manifest_hash: str
    removed: list[str]


@dataclass(frozen=True)
class _Report:
    staging: Path | None
    digests: dict[Part, int]
    section: Any


def read_versions() -> dict[str, str]:
    """Returns package to version of what takes part in a save, and Python's."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


class Saver:
    """Saves one run into one directory.

    Every rank makes it and calls `save` together. It talks over `ranks` alone, never over the group that trains. Not
    thread-safe.

    Args:
        directory: Holds the `step-*` directories; the same for all ranks, on a disk that they share.
        ranks: The run's ranks.
        origin: What the manifest says about the run.
        retention: What is kept after a commit.
        hash_algorithm: Of every file.
    """

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        *,
        origin: Origin | None = None,
        retention: Retention | None = None,
        hash_algorithm: HashAlgorithm = "blake3",
    ) -> None:
        self.directory = directory
        self.ranks = ranks
        self._origin = origin or Origin()
        self.retention = retention or Retention()
        self.hash_algorithm: HashAlgorithm = hash_algorithm
        self._versions = read_versions()
        self._planned: tuple[list[list[Part]], SavePlan] | None = None
        self._staging: Path | None = None
        self._snapshot: Snapshot | None = None
        self.previous: Ancestor | None = None
        self.sequence = 0

    def continue_from(self, previous: Ancestor | None, sequence: int) -> None:
        """Says which checkpoint the next save descends from; None and 0 for none."""
        self.previous, self.sequence = previous, sequence

    def save(self, take_snapshot: Callable[[], Snapshot]) -> Saved:
        """Saves and returns what became of it. Every rank calls it; it communicates over the engine's own group.

        Args:
            take_snapshot: Gives this rank's snapshot; what it raises fails the save on all ranks.

        Raises:
            SaveFailedError: On every rank alike. The staging directory is gone; every checkpoint from before is as
                it was.
        """
        try:
            reports = self.ranks.attempt_and_gather("reporting what to save", lambda: self._report(take_snapshot))
            staging = reports[0].staging
            assert staging is not None
            # From the same reports every rank comes to the same digests, the same plan, or the same refusal.
            digests = merge_digests([report.digests for report in reports])
            plan = self._plan([list(report.digests) for report in reports])
            receipts = self.ranks.attempt_and_gather("writing the shards", lambda: self._write(staging, plan))
            saved = self.ranks.attempt_and_gather(
                "committing", lambda: self._commit(staging, reports, receipts, digests)
            )[0]
        except BaseException:
            self._move_aside()
            raise
        finally:
            self._snapshot = None
        assert saved is not None
        self.continue_from(Ancestor(saved.path.name, saved.manifest_hash), saved.manifest.sequence)
        return saved

    def _report(self, take_snapshot: Callable[[], Snapshot]) -> _Report:
        snapshot = self._snapshot = take_snapshot()
        if self.ranks.is_first:
            name = checkpoint_name(snapshot.step)
            if (self.directory / name).exists():
                raise SaveFailedError(f"{self.directory / name} is there already: a checkpoint is never written over")
            staging = self.directory / f"{name}.staging-{uuid.uuid4().hex[:8]}"
            os.mkdir(staging)  # noqa: PTH102 - the syscall by its name: fault tests wrap it
            self._staging = staging
        return _Report(self._staging, digest_parts(snapshot.parts), snapshot.section)

    def _plan(self, parts_by_rank: list[list[Part]]) -> SavePlan:
        if self._planned is None or self._planned[0] != parts_by_rank:
            self._planned = (parts_by_rank, plan_save(parts_by_rank))
        return self._planned[1]

    def _write(self, staging: Path, plan: SavePlan) -> Receipt:
        assert self._snapshot is not None
        ours = plan.parts_by_writer[self.ranks.rank]
        if not ours:
            return Receipt((), ())
        live = {local.part: local for local in self._snapshot.parts}
        staged = stage_blocking(live[part] for part in ours)
        return write_shard(staging, self.ranks.rank, staged, algorithm=self.hash_algorithm)

    def heading(self, snapshot: Snapshot) -> Heading:
        """Returns what the manifest of the next save says beside its files and tensors."""
        return Heading(
            step=snapshot.step,
            sequence=self.sequence + 1,
            counters=snapshot.counters,
            world_size=self.ranks.world_size,
            mesh=self._origin.mesh,
            identity=self._origin.identity,
            recipe=self._origin.recipe,
            versions=self._versions,
            previous=self.previous,
            has_optimizer=snapshot.has_optimizer,
            hash_algorithm=self.hash_algorithm,
        )

    def _commit(
        self,
        staging: Path,
        reports: list[_Report],
        receipts: list[Receipt],
        digests: dict[str, int],
    ) -> Saved | None:
        snapshot = self._snapshot
        if not self.ranks.is_first or snapshot is None:
            return None
        tensors = collect_records(
            {part.name: part for report in reports for part in report.digests}.values(), receipts, digests
        )
        sections = [report.section for report in reports]
        final, manifest, manifest_hash = assemble(staging, self.heading(snapshot), tensors, receipts, sections)
        self._staging = None
        removed, problem = retain(final, self.retention)
        if problem is not None:
            warnings.warn(problem, RetentionWarning, stacklevel=2)
        return Saved(final, manifest, manifest_hash, removed)

    def _move_aside(self) -> None:
        """Takes what a failed save has left out of the way; where even that fails, the next start does it."""
        if self._staging is not None and self._staging.exists():
            with contextlib.suppress(OSError):
                discard(self._staging)
        self._staging = None
