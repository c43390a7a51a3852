"""Where the saves of a run go, and what their manifests say of it; and what one rank gives to a save."""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from genesis_callbacks.events import EventLog

from .assemble import ManifestHeader
from .errors import CheckpointError
from .hashing import HashAlgorithm
from .manifest import Ancestor
from .plan import LocalShard
from .ranks import Ranks
from .retain import Retention
from .scope import BoundScope

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
    parts: list[LocalShard]
    section: Any
    has_optimizer: bool = True


@dataclass(frozen=True)
class RunMetadata:
    """What a run says about itself in each of its manifests; see `Manifest`.

    Raises:
        CheckpointError: Something in it is not plain JSON.
    """

    identity: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """What its device was found to do (`DeviceReport`), beside the versions of packages."""

    def __post_init__(self) -> None:
        for name in ("identity", "recipe"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"the {name} for the manifest must be plain JSON: {error}") from error


def read_versions() -> dict[str, str]:
    """Returns package to version of what takes part in a save, and Python's."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


class SaveTarget:
    """Where one run is saved, for whom, and what its next manifest says.

    Every rank has one, and it learns of each commit. It does not communicate. Not thread-safe.

    Args:
        directory: Holds the `step-*` directories; the same for all ranks, on a disk that they share.
        ranks: The run's ranks.
        origin: What the manifest says about the run.
        retention: What is kept after a commit.
        hash_algorithm: Of every file.
        events: Takes the event of each commit; None for none.
        scope: Which tensors a save holds; None for all.

    Attributes:
        previous: The checkpoint that the next save descends from; None for none.
        sequence: Its place in the lineage.
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
        """Says which checkpoint the next save descends from; None and 0 for none."""
        self.previous, self.sequence = previous, sequence

    def heading(self, snapshot: Snapshot) -> ManifestHeader:
        """Returns what the manifest of the next save says beside its files and tensors."""
        return ManifestHeader(
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
            base=None if self.scope is None else self.scope.refer_from(self.directory),
        )

    def holds(self, name: str) -> bool:
        """Says whether a save holds the tensor of that name itself."""
        return self.scope is None or self.scope.holds(name)
