"""Reads what a mirror needs of a checkpoint's manifest: files, hashes, lineage and base. Imports no torch.

A mirror works beside the training for days, so that it must not hold the memory of torch. What a mirror holds may come
from anywhere: names are checked before they become paths, and a restore verifies the checkpoint with the engine.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import blake3

from genesis.base.errors import UserError
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.run_directory import COMMITTED_NAME, MANIFEST_NAME, checkpoint_name
from genesis_callbacks.base.untrusted import RefusedFileError, read_file

MAX_MANIFEST_BYTES: Final = 256 << 20
MAX_MARKER_BYTES: Final = 200
_MARKER: Final = re.compile(r"(blake3|sha256):[0-9a-f]{64}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_FILE_NAME: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.-]{1,200}")
_MAX_COUNT: Final = 1 << 62


class DamagedCheckpointError(UserError):
    """A checkpoint whose bytes are not those that its commit marker vouches for."""

    exit_status = 1


class Hasher(Protocol):
    """Hashes bytes piece by piece."""

    def update(self, data: bytes, /) -> object:
        """Adds the next bytes."""

    def hexdigest(self) -> str:
        """Returns the hash of all bytes so far."""


@dataclass(frozen=True)
class ListedFile:
    """A file of a checkpoint: its name, size and hash."""

    name: str
    num_bytes: int
    hash: str


@dataclass(frozen=True)
class ListedBase:
    """The checkpoint that holds some of the tensors: its manifest's hash, and its paths at the time of the save."""

    manifest_hash: str
    path: str
    relative_path: str


@dataclass(frozen=True)
class CheckpointListing:
    """What a manifest lists.

    Attributes:
        marker: The content of the commit marker: the hash of the manifest, which identifies the checkpoint.
        step: Windows attempted.
        sequence: Number of the save in its lineage.
        created_seconds: Unix time of the commit.
        previous_hash: The marker of the checkpoint before it; None for the first.
        base: The checkpoint that holds some of its tensors; None without one.
        files: The files beside manifest and marker.
        manifest: The bytes of `manifest.json`.
    """

    marker: str
    step: int
    sequence: int
    created_seconds: float
    previous_hash: str | None
    base: ListedBase | None
    files: tuple[ListedFile, ...]
    manifest: bytes

    @property
    def name(self) -> str:
        """The name of its directory in a run."""
        return checkpoint_name(self.step)

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.num_bytes for file in self.files) + len(self.manifest) + len(self.marker)

    def build_hasher(self) -> Hasher:
        """Returns a new hasher of the algorithm of the manifest's hashes."""
        return _build_hasher(self.marker.partition(":")[0])


def _build_hasher(algorithm: str) -> Hasher:
    return hashlib.sha256() if algorithm == "sha256" else blake3.blake3()


def decode_marker(data: bytes | None) -> str | None:
    """Returns the hash in a commit marker; None if the data are not a marker."""
    if data is None or len(data) > MAX_MARKER_BYTES:
        return None
    text = data.decode("ascii", errors="replace")
    return text if _MARKER.fullmatch(text) else None


def decode_listing(marker: str, manifest: bytes, where: str) -> CheckpointListing:
    """Returns what a manifest lists, after comparing its hash with the marker.

    Args:
        marker: The content of the commit marker.
        manifest: The content of `manifest.json`.
        where: The checkpoint, for messages.

    Raises:
        DamagedCheckpointError: The manifest is not the one that was committed, or not one of this format.
    """
    algorithm, _, expected = marker.partition(":")
    hasher = _build_hasher(algorithm)
    hasher.update(manifest)
    if hasher.hexdigest() != expected:
        raise DamagedCheckpointError(f"{where}: {MANIFEST_NAME} does not have the hash in {COMMITTED_NAME}")
    try:
        return _decode(marker, manifest, load_json(manifest))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where}: {MANIFEST_NAME} cannot be read ({error}); upgrade genesis") from error


def _decode(marker: str, manifest: bytes, content: Mapping[str, Any]) -> CheckpointListing:
    previous, base = content["previous"], content.get("base")
    files = tuple(
        ListedFile(_match(_FILE_NAME, file["name"]), _count(file["num_bytes"]), _match(_HASH, file["hash"]))
        for file in content["files"]
    )
    if len({file.name for file in files} | {MANIFEST_NAME, COMMITTED_NAME}) != len(files) + 2:
        raise ValueError("a file is listed twice")
    created_seconds = content["created_seconds"]
    if type(created_seconds) not in (int, float) or not math.isfinite(created_seconds):
        raise ValueError("created_seconds is not a time")
    return CheckpointListing(
        marker=marker,
        step=_count(content["step"]),
        sequence=_count(content["sequence"]),
        created_seconds=float(created_seconds),
        previous_hash=None if previous is None else _match(_MARKER, previous["manifest_hash"]),
        base=None
        if base is None
        else ListedBase(_match(_MARKER, base["manifest_hash"]), str(base["path"]), str(base["relative_path"])),
        files=files,
        manifest=manifest,
    )


def _match(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise ValueError(f"{str(value)[:80]!r} is not like {pattern.pattern}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise ValueError(f"{str(value)[:80]} is not a count")
    return value


def read_local_marker(path: Path) -> str | None:
    """Returns the hash in the commit marker of the checkpoint at `path`; None if it is not committed, or gone."""
    try:
        return decode_marker(read_file(path / COMMITTED_NAME, MAX_MARKER_BYTES))
    except (FileNotFoundError, RefusedFileError):
        return None


def read_local_listing(path: Path) -> CheckpointListing | None:
    """Returns the listing of the checkpoint at `path`; None if there is no committed one, or none any more.

    Raises:
        DamagedCheckpointError: The manifest is not the one that was committed.
        OSError: A file cannot be read.
    """
    marker = read_local_marker(path)
    if marker is None:
        return None
    try:
        manifest = read_file(path / MANIFEST_NAME, MAX_MANIFEST_BYTES)
    except RefusedFileError as error:
        raise DamagedCheckpointError(f"{path}: {MANIFEST_NAME} {error.strerror}") from None
    except FileNotFoundError:
        if read_local_marker(path) != marker:  # removed in between
            return None
        raise DamagedCheckpointError(f"{path}: {MANIFEST_NAME} is missing") from None
    return decode_listing(marker, manifest, str(path))
