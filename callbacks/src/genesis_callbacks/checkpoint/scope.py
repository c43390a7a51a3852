"""Decides which tensors a save holds, and which it leaves to a base checkpoint.

The user gives a `SaveScope`. When a fit starts, `bind_scope` compares it with the live model and the base, and returns
a `BoundScope`. The plan of a save reads from the `BoundScope` which tensors to write. The commit checks that the other
tensors still equal the base's. The manifest records the scope, and readers of a checkpoint use only the manifest
(`TensorPlaces`).
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from genesis_callbacks.base.errors import numbered

from ..base.checkpoint_errors import CheckpointError, SaveFailedError
from ..base.errors import name_some
from ..base.local_shards import LocalShard, TensorShard
from ..base.manifest import (
    BaseReference,
    Manifest,
    TensorRecord,
    dtype_name,
    read_committed_hash,
    read_manifest,
)
from .collect import MODEL_PREFIX
from .ranks import Ranks
from .restore import digest_shards, find_misplaced
from .verify import VerifyLevel, verify_some

_HASH = re.compile(r"(?:blake3|sha256):[0-9a-f]{64}")


@dataclass(frozen=True)
class SaveScope:
    """The tensors of the model that a save leaves to a base checkpoint. By default a save holds everything.

    A pattern matches whole names of `read_tensors` (`model.<name>`), with `*` and `?` as in a shell; a plain name is
    also a pattern. A save always holds optimizer state and all other state.

        SaveScope(base="runs/base/checkpoints/step-00010000", in_base=["model.*"], not_in_base=["*.adapter.*"])

    Args:
        base: A committed checkpoint of this engine that holds the tensors and has no base itself.
        in_base: Patterns of the names of tensors that saves leave to the base.
        not_in_base: Patterns of exceptions, which each save holds.
        base_hash: The hash in the base's COMMITTED; a base with another hash is refused. None accepts any hash.

    Raises:
        ValueError: The arguments are invalid or contradict each other.
    """

    base: str | Path | None = None
    in_base: Sequence[str] = ()
    not_in_base: Sequence[str] = ()
    base_hash: str | None = None

    def __post_init__(self) -> None:
        if self.base is not None and not isinstance(self.base, str | Path):
            raise ValueError(f"base must be the path of a checkpoint, not {self.base!r}")
        for name in ("in_base", "not_in_base"):
            patterns = getattr(self, name)
            if isinstance(patterns, str):
                raise ValueError(f"{name} must be a list of patterns, not the text {patterns!r}")
            if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ValueError(f"{name} must be a list of patterns, which are texts, not {patterns!r}")
        if self.base is None and (self.in_base or self.not_in_base or self.base_hash):
            raise ValueError("in_base, not_in_base and base_hash have no meaning without base: give the base's path")
        if self.base is not None and not self.in_base:
            raise ValueError(f"base is {self.base} without in_base: name the tensors that lie there, such as 'model.*'")
        if self.base_hash is not None and not (isinstance(self.base_hash, str) and _HASH.fullmatch(self.base_hash)):
            raise ValueError(f"base_hash must be as COMMITTED has it (blake3:...), not {self.base_hash!r}")

    @classmethod
    def everything(cls) -> "SaveScope":
        """Returns the scope of a save that holds all tensors."""
        return cls()

    @property
    def places(self) -> tuple[Path, ...]:
        """The paths, in addition to those in the checkpoint, at which a restore searches for the base."""
        return () if self.base is None else (Path(self.base),)

    def resolve(self) -> "SaveScope":
        """Returns the scope with the base's absolute path, which is independent of the working directory."""
        return self if self.base is None else replace(self, base=Path(os.path.abspath(self.base)))  # noqa: PTH100

    def leaves(self, name: str) -> bool:
        """Returns whether saves leave the tensor of that name to the base.

        Example:
            >>> scope = SaveScope("base/step-00000001", in_base=["model.*"], not_in_base=["*.adapter.*"])
            >>> scope.leaves("model.head.weight"), scope.leaves("model.head.adapter.down")
            (True, False)
        """
        return (
            name.startswith(MODEL_PREFIX)
            and any(fnmatchcase(name, pattern) for pattern in self.in_base)
            and not any(fnmatchcase(name, pattern) for pattern in self.not_in_base)
        )


@dataclass(frozen=True)
class BoundScope:
    """A scope after its comparison with the model and the base of one fit. Immutable.

    Attributes:
        base: Absolute path of the base checkpoint.
        manifest_hash: The hash of the base's manifest.
        tensors: Shape, dtype and digest of each tensor that is left to the base.
    """

    base: Path
    manifest_hash: str
    tensors: Mapping[str, TensorRecord]

    def holds(self, name: str) -> bool:
        """Says whether a save holds the tensor of that name itself."""
        return name not in self.tensors

    def refer_from(self, directory: Path) -> BaseReference:
        """Returns the reference to the base for manifests of checkpoints in `directory`."""
        real_base, real_directory = os.path.realpath(self.base), os.path.realpath(directory)
        relative = os.path.relpath(real_base, real_directory)
        return BaseReference(str(self.base), relative, self.manifest_hash, frozenset(self.tensors))

    def check_there(self) -> None:
        """Checks, by the commit marker alone, that the base is still the same checkpoint as at the fit's start.

        Raises:
            SaveFailedError: The base is gone, or another checkpoint has its path.
        """
        try:
            found = read_committed_hash(self.base)
        except CheckpointError as error:
            raise SaveFailedError(
                f"the base {self.base}, which has {numbered(len(self.tensors), 'tensors')} of the model, is missing: "
                f"{error}; bring it back, or start again without the scope"
            ) from error
        if found != self.manifest_hash:
            raise SaveFailedError(
                f"the base {self.base}, which has {numbered(len(self.tensors), 'tensors')} of the model, has changed: "
                f"its manifest is {found[:80]} and was {self.manifest_hash}; bring it back, or start again without the "
                "scope"
            )

    def check_untouched(self, digests: Mapping[str, int], sections: Sequence[Any]) -> None:
        """Checks that the tensors that a save leaves to the base still equal the base's. No communication.

        Args:
            digests: Digests of all live tensors, by name.
            sections: The other state of each rank.

        Raises:
            SaveFailedError: A tensor has changed, or is gone, or an optimizer has state for it; the message has its
                name.
        """
        missing = sorted(self.tensors.keys() - digests.keys())
        if missing:
            raise SaveFailedError(f"{name_some(missing)} is left to the base {self.base}, but the model lacks it now")
        changed = sorted(name for name, record in self.tensors.items() if digests[name] != record.digest)
        if changed:
            raise SaveFailedError(
                f"{name_some(changed)} is left to the base {self.base}, but differs from the base now: freeze "
                "it (requires_grad_(False)), or add it to not_in_base, so that saves hold it"
            )
        optimizers = [
            optimizer
            for section in sections
            if isinstance(section, Mapping)
            for optimizer in section.get("optimizers", ())
        ]
        values = {MODEL_PREFIX + name for optimizer in optimizers for name in optimizer["values"]}
        with_state = sorted((_find_trained(digests) | values) & self.tensors.keys())
        if with_state:
            raise SaveFailedError(_describe_state(with_state, self.base))


def _find_trained(names: Iterable[str]) -> set[str]:
    """Returns the full names of the parameters whose optimizer state is among `names`."""
    states = (name.split(".", 2)[2] for name in names if name.startswith("optimizer."))
    return {MODEL_PREFIX + state.rpartition(".")[0] for state in states}


def _describe_state(names: Sequence[str], base: Path) -> str:
    return (
        f"{name_some(names)} is left to the base {base}, but an optimizer has state for it: freeze it before the "
        "optimizer's first step (a run that begins from weights alone has none), or add it to not_in_base"
    )


# ---- at a fit's start


@dataclass(frozen=True)
class _Live:
    """The data about the model that one rank contributes.

    Attributes:
        names: Names of all its tensors.
        digests: Digests of the tensors that the scope leaves to the base.
        updated: Names of the parameters that an optimizer would train.
        with_state: Names of the parameters that an optimizer has state for.
    """

    names: frozenset[str]
    digests: Mapping[TensorShard, int]
    updated: frozenset[str]
    with_state: frozenset[str]


def bind_scope(
    scope: SaveScope,
    parts: Sequence[LocalShard],
    updated: Collection[str],
    ranks: Ranks,
    *,
    level: VerifyLevel = "deep",
    verified: Collection[str] = (),
) -> BoundScope | None:
    """Returns the scope of a fit's saves, or None if they hold everything. Every rank calls it; communicates twice.

    Args:
        scope: The scope, the same on every rank.
        parts: The live parts of all tensors that this rank holds.
        updated: Names of the parameters on this rank that require a gradient and that an optimizer updates.
        ranks: The run's ranks.
        level: How much of the base is verified.
        verified: Hashes of the manifests of checkpoints that were just verified; their bytes are not read again.

    Raises:
        CheckpointError: The base is not usable as a base, or differs from the live model; raised on every rank.
    """
    if scope.base is None:
        return None
    left = [local for local in parts if scope.leaves(local.part.name)]
    live = ranks.attempt_and_gather(
        "comparing the model with its base",
        lambda: _Live(
            frozenset(local.part.name for local in parts if local.part.name.startswith(MODEL_PREFIX)),
            digest_shards(left),
            frozenset(filter(scope.leaves, updated)),
            frozenset(filter(scope.leaves, _find_trained(local.part.name for local in parts))),
        ),
        error_type=CheckpointError,
    )
    return ranks.attempt_and_gather(
        "comparing the model with its base",
        lambda: _bind(scope, live, level, verified) if ranks.is_first else None,
        error_type=CheckpointError,
    )[0]


def _bind(scope: SaveScope, live_by_rank: Sequence[_Live], level: VerifyLevel, verified: Collection[str]) -> BoundScope:
    assert scope.base is not None
    base, manifest_hash, manifest = _open_base(Path(scope.base), scope.base_hash)
    names = frozenset[str]().union(*(live.names for live in live_by_rank))
    left = sorted(filter(scope.leaves, names))
    _check_patterns(scope, names)
    _check_fits(base, manifest, live_by_rank, left)
    updated = sorted(frozenset[str]().union(*(live.updated for live in live_by_rank)))
    if updated:
        raise CheckpointError(
            f"{name_some(updated)} is left to the base {base}, but an optimizer would train it: freeze it "
            "(requires_grad_(False)), or add it to not_in_base"
        )
    with_state = sorted(frozenset[str]().union(*(live.with_state for live in live_by_rank)))
    if with_state:
        raise CheckpointError(_describe_state(with_state, base))
    verify_some(base, manifest, left, "quick" if manifest_hash in verified else level)
    return BoundScope(base, manifest_hash, {name: replace(manifest.tensors[name], chunks=()) for name in left})


def _open_base(base: Path, due_hash: str | None) -> tuple[Path, str, Manifest]:
    """Returns (path, hash of the manifest, manifest) of a checkpoint that can be a base."""
    if base.is_file() or (base.is_dir() and any(base.glob("*.safetensors"))):
        raise CheckpointError(
            f"{base} cannot be a base: safetensors have no digests to compare with; give a checkpoint of this package "
            "(a directory step-...), such as the one that an export was made of"
        )
    try:
        manifest = read_manifest(base)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; the base of a scope must be a committed checkpoint (step-...)") from error
    manifest_hash = read_committed_hash(base)
    if due_hash is not None and manifest_hash != due_hash:
        raise CheckpointError(
            f"the base {base} has manifest {manifest_hash}, but base_hash is {due_hash}: give the base with that hash"
        )
    if manifest.base is not None:
        raise CheckpointError(
            f"{base} cannot be a base: it has a base itself ({manifest.base.path}), and chains are not supported; give "
            "that one, or a checkpoint that holds all of its tensors"
        )
    return base, manifest_hash, manifest


def _check_patterns(scope: SaveScope, names: Collection[str]) -> None:
    for pattern in (*scope.in_base, *scope.not_in_base):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CheckpointError(
                f"the scope's pattern {pattern!r} matches no tensor of the model; names are such as {min(names)}"
            )
    if not any(map(scope.leaves, names)):
        raise CheckpointError("the scope leaves no tensor to its base: leave the base out, or change not_in_base")


def _check_fits(base: Path, manifest: Manifest, live_by_rank: Sequence[_Live], left: Sequence[str]) -> None:
    missing = [name for name in left if name not in manifest.tensors]
    if missing:
        raise CheckpointError(
            f"{name_some(missing)} is not in the base {base}: add it to not_in_base, or train it there"
        )
    for part in (part for live in live_by_rank for part in live.digests):
        record = manifest.tensors[part.name]
        if (record.shape, record.dtype) != (part.shape, dtype_name(part.dtype)):
            raise CheckpointError(
                f"{part.name} is {record.dtype} {list(record.shape)} in the base {base} and {dtype_name(part.dtype)} "
                f"{list(part.shape)} in the model: give the base of this model, or add it to not_in_base"
            )
    different = sorted(find_misplaced(manifest, [live.digests for live in live_by_rank]))
    if different:
        raise CheckpointError(
            f"{name_some(different)} differs between the model and the base {base}: load the base's weights first "
            "(restore='weights' with ckpt_path), give the base that they come from, or add it to not_in_base"
        )
