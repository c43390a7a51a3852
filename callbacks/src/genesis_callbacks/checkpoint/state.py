"""The state of a checkpoint beside its tensors, as the sections that ranks saved. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.checkpoint_errors import CorruptCheckpointError
from ..base.hashing import hash_bytes
from ..base.manifest import STATE_NAME, Manifest
from ..base.safe_read import MAX_DOCUMENT_BYTES, parse_json, read_file


def read_state(path: Path, manifest: Manifest) -> list[Any]:
    """Returns the encoded state sections, one per saving rank, after comparing the file's hash. No communication.

    Raises:
        CorruptCheckpointError: The file differs from the saved one, or an optimizer's state is missing.
        UnreadableCheckpointError: The file cannot be read.
    """
    record = next((file for file in manifest.files if file.name == STATE_NAME), None)
    if record is None:
        raise CorruptCheckpointError(f"{path}: the manifest lists no {STATE_NAME}")
    # Read once, hashed, then parsed from the same bytes: a second read could return others.
    data = read_file(path / STATE_NAME, MAX_DOCUMENT_BYTES)
    if hash_bytes(data, manifest.hash_algorithm) != record.hash:
        raise CorruptCheckpointError(
            f"{path / STATE_NAME} does not have the hash that was saved: its bytes have changed"
        )
    content = parse_json(data, f"{path / STATE_NAME}")
    sections = content.get("sections") if isinstance(content, dict) else None
    if not isinstance(sections, list) or not sections:
        raise CorruptCheckpointError(f"{path / STATE_NAME} has no list of sections")
    _check_optimizers(path, manifest, sections)
    return sections


def _check_optimizers(path: Path, manifest: Manifest, sections: Sequence[Any]) -> None:
    """Refuses an emptied optimizer: its record has state, but the checkpoint has neither tensors nor values of it."""
    filled = {name.split(".", 2)[1] for name in manifest.tensors if name.startswith("optimizer.")}
    for section in sections:
        optimizers = section.get("optimizers", []) if isinstance(section, dict) else []
        if not isinstance(optimizers, list) or not all(isinstance(each, dict) for each in optimizers):
            raise CorruptCheckpointError(f"{path / STATE_NAME} has no list of optimizers")
        for index, optimizer in enumerate(optimizers):
            if optimizer.get("has_state") and not optimizer.get("values") and str(index) not in filled:
                raise CorruptCheckpointError(f"{path}: optimizer {index} had state, but the checkpoint has none of it")
