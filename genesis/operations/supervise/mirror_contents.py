"""Reads and verifies what a mirror holds."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from genesis.operations.supervise.mirror_manifest import (
    CheckpointListing,
    DamagedCheckpointError,
    ListedFile,
    decode_listing,
    decode_marker,
)
from genesis.operations.supervise.mirror_place import Folder, Place
from genesis.operations.supervise.mirror_source import Pace
from genesis_callbacks.base.run_directory import COMMITTED_NAME, MANIFEST_NAME, is_checkpoint_name

CHECKPOINTS: Final = "checkpoints"
BASES: Final = "bases"
_BASE_NAME: Final = re.compile(r"[0-9a-f]{16}")


@dataclass
class MirrorContents:
    """The folders of a mirror that are its own.

    Attributes:
        checkpoints: The committed checkpoints by folder, as "checkpoints/step-00000100".
        bases: The committed bases by folder.
        damaged: Why a committed folder cannot be read, by folder.
        leftovers: The uncommitted folders, with their files.
    """

    checkpoints: dict[str, CheckpointListing] = field(default_factory=dict)
    bases: dict[str, CheckpointListing] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    leftovers: dict[str, Folder] = field(default_factory=dict)

    def find(self, marker: str) -> str | None:
        """Returns the folder that holds the checkpoint with this marker; None if there is none."""
        both = {**self.checkpoints, **self.bases}
        return next((folder for folder, listing in both.items() if listing.marker == marker), None)


def read_contents(place: Place) -> MirrorContents:
    """Returns what a mirror holds; files are not read, and foreign folders are left out.

    Raises:
        StoreError: The store does not respond.
        UserError: The store refuses access.
        OSError: The directory cannot be read.
    """
    contents = MirrorContents()
    for parent in (CHECKPOINTS, BASES):
        for found in place.list_folders(parent):
            if not _is_ours(parent, found.name):
                continue
            folder = f"{parent}/{found.name}"
            if not found.is_committed:
                contents.leftovers[folder] = found
                continue
            try:
                listing = _read_listing(place, folder)
            except DamagedCheckpointError as error:
                contents.damaged[folder] = str(error)
            else:
                (contents.checkpoints if parent == CHECKPOINTS else contents.bases)[folder] = listing
    return contents


def _is_ours(parent: str, name: str) -> bool:
    if parent == CHECKPOINTS:
        return is_checkpoint_name(name)
    return _BASE_NAME.fullmatch(name) is not None


def _read_listing(place: Place, folder: str) -> CheckpointListing:
    where = f"{place.url}/{folder}"
    marker = decode_marker(place.read(place.file_path(folder, COMMITTED_NAME, is_committed=True)))
    manifest = place.read(place.file_path(folder, MANIFEST_NAME, is_committed=True))
    if marker is None or manifest is None:
        raise DamagedCheckpointError(f"{where} has no commit marker or no manifest")
    listing = decode_listing(marker, manifest, where)
    if folder.startswith(CHECKPOINTS) and folder != f"{CHECKPOINTS}/{listing.name}":
        raise DamagedCheckpointError(f"{where} holds the checkpoint of step {listing.step}: it was renamed")
    return listing


def has_hash(place: Place, path: str, file: ListedFile, listing: CheckpointListing, pace: Pace) -> bool:
    """Returns whether a file in the mirror has the size and the hash that the manifest lists; reads all of it."""
    hasher, num_bytes = listing.build_hasher(), 0
    for block in place.read_blocks(path, file.num_bytes):
        pace.spend(len(block))
        hasher.update(block)
        num_bytes += len(block)
    return num_bytes == file.num_bytes and hasher.hexdigest() == file.hash


def verify_contents(place: Place, contents: MirrorContents, pace: Pace) -> Iterator[tuple[str, str | None]]:
    """Reads every committed folder, and yields each with what is wrong with it, or None.

    Raises:
        StoreError: The store does not respond.
    """
    yield from contents.damaged.items()
    for folder, listing in {**contents.bases, **contents.checkpoints}.items():
        yield folder, _find_problem(place, folder, listing, contents, pace)


def _find_problem(
    place: Place, folder: str, listing: CheckpointListing, contents: MirrorContents, pace: Pace
) -> str | None:
    for file in listing.files:
        path = place.file_path(folder, file.name, is_committed=True)
        try:
            if not has_hash(place, path, file, listing, pace):
                return f"{file.name} does not have the size and the hash that were saved"
        except DamagedCheckpointError as error:
            return str(error)
    if listing.base is not None and contents.find(listing.base.manifest_hash) is None:
        return "its base is not in the mirror"
    return None
