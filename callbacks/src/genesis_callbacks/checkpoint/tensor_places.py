"""Locates the bytes of a checkpoint's tensors, in its own files or in those of its base.

A manifest refers to its base by path and by the hash of the base's manifest. The search tries the paths that the user
gives (a fit's scope, the environment variable `GENESIS_BASE_CHECKPOINTS`), then the recorded path relative to the
checkpoint's directory (for a superseded checkpoint also relative to the run's directory, where it was saved), then
`bases` in the run, where a restore puts a base, then the recorded absolute path. Nothing is ever written to a recorded
path. At every path, only a committed checkpoint with the recorded hash is accepted. If verification
finds such a checkpoint damaged, it tries the next path. A base cannot have a base, so that there are neither chains nor
cycles.

A problem of a base is a `BaseCheckpointError`, because the checkpoint that refers to the base is not damaged.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from genesis_callbacks.base.errors import numbered

from ..base.checkpoint_errors import BaseCheckpointError, CheckpointError, CorruptCheckpointError
from ..base.manifest import BaseReference, Manifest, TensorRecord, read_committed_hash, read_manifest
from ..base.run_directory import PLACES_VARIABLE, RunDirectory, base_name
from ..base.safe_read import reading
from .commit import SUPERSEDED_PREFIX

_HASH_SHOWN = 23
_NUM_READ = 4  # size of the cache of bases' manifests: a restore requests one tensor at a time


@dataclass(frozen=True)
class TensorPlace:
    """The location of a tensor's bytes.

    Attributes:
        path: The checkpoint whose files hold the bytes.
        record: The tensor's record, with the chunks in those files.
        named_by: The checkpoint that the tensor belongs to, if `path` is its base; else None.
    """

    path: Path
    record: TensorRecord
    named_by: Path | None


@contextlib.contextmanager
def blaming_base(base: Path, named_by: Path | None) -> Iterator[None]:
    """Turns an error of the block about damage of the base at `base` into a `BaseCheckpointError`.

    The error stays unchanged if `named_by` is None: then `base` is the checkpoint itself.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        if named_by is None:
            raise
        raise BaseCheckpointError(
            f"{named_by} has its base at {base}, which is damaged: {error}; restore the base from a copy"
        ) from error


def list_places(path: Path, base: BaseReference, places: Sequence[Path] = ()) -> list[Path]:
    """Returns the paths at which the base of the checkpoint at `path` is searched for, in this order, each once."""
    # The user's paths come first: a reader without verification must not use a damaged base if the user gives a copy.
    # The relative path before the absolute one: when a run and its base are moved or copied together, the absolute path
    # may lead to the old place, or to nothing.
    directory = os.path.dirname(os.path.realpath(path))  # noqa: PTH120 - realpath has no error for a loop of links
    given = [text for text in os.environ.get(PLACES_VARIABLE, "").split(os.pathsep) if text]
    homes = [directory]
    if os.path.basename(directory).startswith(SUPERSEDED_PREFIX):  # noqa: PTH119 - as above
        homes.append(os.path.dirname(directory))  # noqa: PTH120 - the relative path was recorded there
    near = [os.path.join(home, base.relative_path) for home in homes]  # noqa: PTH118 - as above
    runs = [RunDirectory(Path(os.path.dirname(home))) for home in homes]  # noqa: PTH120 - as above
    restored = [str(run.bases / base_name(base.manifest_hash)) for run in runs]
    candidates = [*map(str, places), *given, *near, *restored, base.path]
    return [Path(place) for place in dict.fromkeys(map(os.path.abspath, candidates))]


# Safe to cache: the hash is in the key, and a manifest with another content has another hash.
@lru_cache(maxsize=_NUM_READ)
def _read_base(place: Path, manifest_hash: str) -> Manifest:
    """Returns the manifest of the base at `place`, whose commit marker had `manifest_hash` a moment ago."""
    manifest = read_manifest(place)
    # The caller read the marker before; the same marker after the manifest shows that both are of one checkpoint.
    if read_committed_hash(place) != manifest_hash:
        raise BaseCheckpointError(f"{place} was replaced while it was read: start again")
    return manifest


def _look_at(place: Path, base: BaseReference) -> str | None:
    """Returns why the checkpoint at `place` is not the base, or None if it is."""
    try:
        with reading(place):
            if not place.is_dir():
                return "there is no such directory"
        found = read_committed_hash(place)
        if found != base.manifest_hash:
            return f"it has changed, or is another checkpoint: its manifest is {found[:_HASH_SHOWN]}"
        _read_base(place, found)
    except CheckpointError as error:
        return str(error)
    return None


def find_bases(path: Path, base: BaseReference, places: Sequence[Path] = ()) -> Iterator[tuple[Path, Manifest]]:
    """Yields each path at which the base of the checkpoint at `path` exists, with its manifest. No communication.

    There may be several paths, because a base may have been copied. Only the manifests are read.

    Args:
        path: The checkpoint that names the base.
        base: The reference to the base.
        places: Paths to search in addition to the recorded ones.

    Raises:
        BaseCheckpointError: The base is at none of the paths; the message has the reason for each path.
    """
    reasons = {}
    is_found = False
    for place in list_places(path, base, places):
        reason = _look_at(place, base)
        if reason is None:
            manifest = _read_base(place, base.manifest_hash)
            if manifest.base is not None:
                raise BaseCheckpointError(
                    f"{path} has its base at {place}, which has a base itself: chains of bases are not supported; give "
                    "a checkpoint that holds all of its tensors as the base"
                )
            is_found = True
            yield place, manifest
        else:
            reasons[place] = reason
    if is_found:
        return
    looked = "; ".join(
        f"{place}: {reason.replace(f'{place}/', '').removeprefix(f'{place} ')}" for place, reason in reasons.items()
    )
    raise BaseCheckpointError(
        f"{path} leaves {numbered(len(base.names), 'tensors')} to the base with manifest "
        f"{base.manifest_hash[:_HASH_SHOWN]}, which was not found ({looked}): restore it, or give its new path by "
        f"{PLACES_VARIABLE}, or as the base of the fit's scope"
    )


def find_base(path: Path, base: BaseReference, places: Sequence[Path] = ()) -> tuple[Path, Manifest]:
    """Returns the first path of `find_bases`, and the manifest of the base."""
    return next(find_bases(path, base, places))


def locate_bases(path: Path, manifest: Manifest, places: Sequence[Path] = ()) -> Iterator[Manifest]:
    """Yields, for each path of the base, the manifest with that path, which readers with this manifest try first.

    Raises:
        BaseCheckpointError: The base is not found.
    """
    assert manifest.base is not None
    directory = os.path.dirname(os.path.realpath(path))  # noqa: PTH120 - as in `list_places`
    for found, _ in find_bases(path, manifest.base, places):
        # Both paths: the recorded relative one may lead to a damaged base.
        relative = os.path.relpath(os.path.realpath(found), directory)
        yield replace(manifest, base=replace(manifest.base, path=str(found), relative_path=relative))


class TensorPlaces:
    """Locates the tensors of one checkpoint. The base is searched for when a tensor in it is first requested.

    Any process may use this class; it does not communicate.

    Args:
        path: The checkpoint.
        manifest: Its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest
        self._found: tuple[Path, Manifest] | None = None

    def locate(self, name: str) -> TensorPlace:
        """Returns the location of the tensor.

        Raises:
            BaseCheckpointError: The tensor is in the base, which was not found.
            CheckpointError: The checkpoint has no such tensor.
            CorruptCheckpointError: The records of the tensor in the checkpoint and in its base differ.
        """
        record, base = self._manifest.tensors.get(name), self._manifest.base
        if record is None:
            raise CheckpointError(f"{name} is not in {self._path}")
        if base is None or name not in base.names:
            return TensorPlace(self._path, record, None)
        if self._found is None:
            self._found = find_base(self._path, base)
        place, manifest = self._found
        held = manifest.tensors.get(name)
        # The hash protects the base's manifest; this comparison protects the record here, which was equal at the save.
        if held is None or (held.shape, held.dtype, held.digest) != (record.shape, record.dtype, record.digest):
            raise CorruptCheckpointError(
                f"{self._path}: its record of {name} differs from that of its base at {place}: it was changed by hand"
            )
        return TensorPlace(place, held, self._path)
