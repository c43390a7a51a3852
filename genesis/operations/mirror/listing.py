"""What a mirror needs of a checkpoint's manifest: files, hashes, lineage and base.

What a mirror holds may come from anywhere. The engine decodes the manifest with all of its checks, without torch, which
a mirror must not hold beside a training of days; the tensors, which are most of a manifest, are dropped.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from genesis_callbacks.base.hashing import Hasher, build_hasher
from genesis_callbacks.base.manifest import BaseReference, FileRecord, decode_committed
from genesis_callbacks.base.run_directory import COMMITTED_NAME, MANIFEST_NAME, checkpoint_name
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, RefusedFileError, read_file
from genesis_callbacks.checkpoint import CheckpointError, CorruptCheckpointError

MAX_MARKER_BYTES: Final = 200
_MARKER: Final = re.compile(r"(blake3|sha256):[0-9a-f]{64}")


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
    base: BaseReference | None
    files: tuple[FileRecord, ...]
    manifest: bytes

    @property
    def name(self) -> str:
        """The name of its directory in a run."""
        return checkpoint_name(self.step)

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.num_bytes for file in self.files) + len(self.manifest) + len(self.marker)

    @property
    def algorithm(self) -> Literal["blake3", "sha256"]:
        """The algorithm of the manifest's hashes."""
        return "sha256" if self.marker.startswith("sha256:") else "blake3"

    def build_hasher(self) -> Hasher:
        """Returns a new hasher of this algorithm."""
        return build_hasher(self.algorithm)


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
        CorruptCheckpointError: The manifest is not the one that was committed, or not one of this format.
    """
    try:
        content = decode_committed(marker, manifest, where)
    except CheckpointError as error:
        message = str(error)
        raise CorruptCheckpointError(message if message.startswith(where) else f"{where}: {message}") from error
    previous = None if content.previous is None else content.previous.manifest_hash
    lineage = (content.step, content.sequence, float(content.created_seconds), previous)
    return CheckpointListing(marker, *lineage, content.base, content.files, manifest)


def read_local_marker(path: Path) -> str | None:
    """Returns the hash in the commit marker of the checkpoint at `path`; None if it is not committed, or gone."""
    try:
        return decode_marker(read_file(path / COMMITTED_NAME, MAX_MARKER_BYTES))
    except (FileNotFoundError, RefusedFileError):
        return None


def read_local_listing(path: Path) -> CheckpointListing | None:
    """Returns the listing of the checkpoint at `path`; None if there is no committed one, or none any more.

    Raises:
        CorruptCheckpointError: The manifest is not the one that was committed.
        OSError: A file cannot be read.
    """
    marker = read_local_marker(path)
    if marker is None:
        return None
    try:
        manifest = read_file(path / MANIFEST_NAME, MAX_DOCUMENT_BYTES)
    except RefusedFileError as error:
        raise CorruptCheckpointError(f"{path}: {MANIFEST_NAME} {error.strerror}") from None
    except FileNotFoundError:
        if read_local_marker(path) != marker:  # removed in between
            return None
        raise CorruptCheckpointError(f"{path}: {MANIFEST_NAME} is missing") from None
    return decode_listing(marker, manifest, str(path))
