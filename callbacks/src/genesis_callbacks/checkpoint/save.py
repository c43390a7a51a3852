"""One save, act by act: report, plan, stage, write, commit, retain. All ranks learn of a failure on any."""

import contextlib
import json
import os
import platform
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .._compat import build_dcp_metadata
from .commit import commit, discard
from .errors import CheckpointError, SaveFailedError
from .hashing import HashAlgorithm
from .manifest import (
    DCP_METADATA_NAME,
    STATE_NAME,
    Ancestor,
    ChunkRecord,
    Manifest,
    TensorRecord,
    checkpoint_name,
    dtype_name,
)
from .plan import LocalPart, Part, SavePlan, merge_digests, plan_save
from .ranks import Ranks
from .restore import digest_parts
from .retain import Retention, apply_retention
from .stage import stage_blocking
from .verify import verify
from .write import Receipt, write_file, write_shard

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
    """

    step: int
    counters: Mapping[str, int]
    parts: list[LocalPart]
    section: Any


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


def _encode_dcp_metadata(tensors: Mapping[str, TensorRecord], name: str) -> bytes:
    return build_dcp_metadata(
        {
            tensor_name: (
                record.torch_dtype,
                record.shape,
                [
                    (chunk.offsets, chunk.sizes, chunk.file, chunk.byte_offset, chunk.num_bytes)
                    for chunk in record.chunks
                ],
            )
            for tensor_name, record in tensors.items()
        },
        name,
    )


def _collect_records(
    parts: Iterable[Part], receipts: list[Receipt], digests: dict[str, int]
) -> dict[str, TensorRecord]:
    """The manifest's tensors, from what the ranks wrote and what the live tensors said."""
    chunks: dict[str, list[ChunkRecord]] = defaultdict(list)
    for receipt in receipts:
        for name, chunk in receipt.chunks:
            chunks[name].append(chunk)
    missing = digests.keys() - chunks.keys()
    if missing:
        raise SaveFailedError(f"{len(missing)} tensors were not written, such as {min(missing)}")
    return {
        part.name: TensorRecord(part.shape, dtype_name(part.dtype), digests[part.name], tuple(chunks[part.name]))
        for part in parts
    }


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
        self._ranks = ranks
        self._origin = origin or Origin()
        self._retention = retention or Retention()
        self._hash_algorithm: HashAlgorithm = hash_algorithm
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
            reports = self._ranks.attempt_and_gather("reporting what to save", lambda: self._report(take_snapshot))
            staging = reports[0].staging
            assert staging is not None
            # From the same reports every rank comes to the same digests, the same plan, or the same refusal.
            digests = merge_digests([report.digests for report in reports])
            plan = self._plan([list(report.digests) for report in reports])
            receipts = self._ranks.attempt_and_gather("writing the shards", lambda: self._write(staging, plan))
            saved = self._ranks.attempt_and_gather(
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
        if self._ranks.is_first:
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
        ours = plan.parts_by_writer[self._ranks.rank]
        if not ours:
            return Receipt((), ())
        live = {local.part: local for local in self._snapshot.parts}
        staged = stage_blocking(live[part] for part in ours)
        return write_shard(staging, self._ranks.rank, staged, algorithm=self._hash_algorithm)

    def _commit(
        self,
        staging: Path,
        reports: list[_Report],
        receipts: list[Receipt],
        digests: dict[str, int],
    ) -> Saved | None:
        snapshot = self._snapshot
        if not self._ranks.is_first or snapshot is None:
            return None
        final = self.directory / checkpoint_name(snapshot.step)
        tensors = _collect_records(
            {part.name: part for report in reports for part in report.digests}.values(), receipts, digests
        )
        state = json.dumps({"sections": [report.section for report in reports]}, allow_nan=False).encode()
        files = [
            *(record for receipt in receipts for record in receipt.files),
            write_file(staging / STATE_NAME, state, algorithm=self._hash_algorithm),
            write_file(
                staging / DCP_METADATA_NAME, _encode_dcp_metadata(tensors, final.name), algorithm=self._hash_algorithm
            ),
        ]
        manifest = Manifest(
            step=snapshot.step,
            sequence=self.sequence + 1,
            counters=dict(snapshot.counters),
            world_size=self._ranks.world_size,
            mesh=dict(self._origin.mesh),
            identity=dict(self._origin.identity),
            recipe=dict(self._origin.recipe),
            versions=self._versions,
            created_seconds=time.time(),
            previous=self.previous,
            files=tuple(sorted(files, key=lambda record: record.name)),
            tensors=tensors,
            hash_algorithm=self._hash_algorithm,
        )
        manifest_hash = commit(staging, final, manifest)
        self._staging = None
        return Saved(final, manifest, manifest_hash, self._retain(final))

    def _retain(self, newest: Path) -> list[str]:
        """Retention after the commit: what goes wrong here costs disk space, never the save."""
        try:
            verify(newest, "quick")
            return apply_retention(self.directory, newest.name, self._retention)
        except (CheckpointError, OSError) as error:
            warnings.warn(
                f"{newest.name} is saved, but older checkpoints stay: {error}", RetentionWarning, stacklevel=2
            )
            return []

    def _move_aside(self) -> None:
        """Takes what a failed save has left out of the way; where even that fails, the next start does it."""
        if self._staging is not None and self._staging.exists():
            with contextlib.suppress(OSError):
                discard(self._staging)
        self._staging = None
