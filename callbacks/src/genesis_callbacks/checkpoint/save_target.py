"""The destination of a run's saves, the header of their manifests, and the snapshot that one rank contributes."""

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..base.checkpoint_errors import CheckpointError
from ..base.events import EventLog
from ..base.hashing import HashAlgorithm
from ..base.local_shards import LocalShard
from ..base.manifest import Ancestor, Manifest
from .plan import SharedParts
from .ranks import Ranks
from .retain import Retention
from .scope import BoundScope

_PACKAGES = ("torch", "lightning", "genesis-callbacks", "genesis-lm", "numpy", "blake3")


class RetentionWarning(UserWarning):
    """A checkpoint was saved, but retention could not remove older ones."""


@dataclass(frozen=True)
class Snapshot:
    """The state that one rank contributes to a save.

    Attributes:
        step: Windows attempted.
        counters: Exact clocks for the manifest, which records those of rank 0.
        parts: The live parts of all tensors that this rank holds.
        section: This rank's other state, already plain JSON.
        has_optimizer: Whether the snapshot includes the optimizers' state.
        shared: The parts that ranks plan together, if they are known from an earlier save: the first of `parts`.
        finish: Returns the whole snapshot, if a part of the work is left to the thread that stages.
    """

    step: int
    counters: Mapping[str, int]
    parts: list[LocalShard]
    section: Any
    has_optimizer: bool = True
    shared: SharedParts | None = None
    finish: Callable[[], "Snapshot"] | None = None

    def whole(self) -> "Snapshot":
        """Returns the snapshot with its whole section, and with the parts that belong to the section.

        Training does not wait for this call.

        Raises:
            ChangedPartsError: The quick reading has missed a change of the module: the save must be made again.
        """
        return self if self.finish is None else self.finish()

    def split(self) -> tuple[SharedParts, list[LocalShard]]:
        """Returns the parts that ranks plan together, and those of this rank's own state, which only it writes."""
        if self.shared is not None:
            return self.shared, self.parts[len(self.shared.parts) :]
        shared = SharedParts([local for local in self.parts if local.part.kind != "state"])
        return shared, [local for local in self.parts if local.part.kind == "state"]


@dataclass(frozen=True)
class RunMetadata:
    """The entries about a run in each of its manifests; see `Manifest`.

    Raises:
        CheckpointError: A value is not plain JSON.
    """

    identity: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """The results of the device's proofs (`DeviceReport`), stored with the versions of packages."""

    def __post_init__(self) -> None:
        for name in ("identity", "recipe"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"the {name} for the manifest must be plain JSON: {error}") from error


def read_versions() -> dict[str, str]:
    """Returns package to version, for Python and the packages that take part in a save."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


class SaveTarget:
    """The destination of one run's saves: directory, ranks, and the header of the next manifest.

    Every rank has a target, which is updated at each commit. It does not communicate. Not thread-safe.

    Args:
        directory: The directory of `step-*`; the same for all ranks, on a shared disk.
        ranks: The run's ranks.
        origin: The entries about the run in the manifest.
        retention: Which checkpoints stay after a commit.
        hash_algorithm: Hash algorithm for every file.
        events: The log for the event of each commit; None for no events.
        scope: Which tensors a save holds; None for all.

    Attributes:
        previous: The checkpoint that the next save descends from; None if there is none.
        sequence: Number of that checkpoint in the lineage.
    """

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        *,
        origin: RunMetadata | None = None,
        retention: Retention | None = None,
        hash_algorithm: HashAlgorithm = "blake3",
        events: EventLog | None = None,
        scope: BoundScope | None = None,
    ) -> None:
        self.directory = directory
        self.ranks = ranks
        self.retention = retention or Retention()
        self.hash_algorithm: HashAlgorithm = hash_algorithm
        self.events = events
        self.scope = scope
        self.previous: Ancestor | None = None
        self.sequence = 0
        self._origin = origin or RunMetadata()
        self._versions = {**read_versions(), **self._origin.environment}

    def continue_from(self, previous: Ancestor | None, sequence: int) -> None:
        """Sets the checkpoint that the next save descends from; None and 0 if there is none."""
        self.previous, self.sequence = previous, sequence

    def header(self, snapshot: Snapshot) -> Manifest:
        """Returns the next manifest, without files and tensors."""
        return Manifest(
            step=snapshot.step,
            sequence=self.sequence + 1,
            counters=dict(snapshot.counters),
            world_size=self.ranks.world_size,
            mesh=dict(self._origin.mesh),
            identity=dict(self._origin.identity),
            recipe=dict(self._origin.recipe),
            versions=self._versions,
            previous=self.previous,
            has_optimizer=snapshot.has_optimizer,
            hash_algorithm=self.hash_algorithm,
            base=None if self.scope is None else self.scope.refer_from(self.directory),
        )

    def holds(self, name: str) -> bool:
        """Returns whether a save holds the tensor of that name itself."""
        return self.scope is None or self.scope.holds(name)
