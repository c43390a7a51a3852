"""Verifies a committed checkpoint against its manifest: sizes, hashes, digests."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from .errors import CheckpointError, CorruptCheckpointError
from .hashing import hash_descriptor
from .manifest import FileRecord, Manifest, read_manifest
from .plan import check_tiling
from .restore import read_recorded_tensors
from .safe_read import open_regular, reading

VerifyLevel = Literal["quick", "full", "deep"]
_MAX_THREADS = 8


def _check_size(path: Path, record: FileRecord) -> None:
    file = path / record.name
    with reading(file):
        num_bytes = file.stat().st_size
    if num_bytes != record.num_bytes:
        raise CorruptCheckpointError(f"{file} has {num_bytes} bytes where {record.num_bytes} were saved")


def _check_chunks(manifest: Manifest) -> None:
    sizes = {record.name: record.num_bytes for record in manifest.files}
    for name, record in manifest.tensors.items():
        check_tiling(name, record.shape, [(chunk.offsets, chunk.sizes) for chunk in record.chunks])
        itemsize = record.torch_dtype.itemsize
        for chunk in record.chunks:
            data_end = chunk.data_offset + math.prod(chunk.sizes) * itemsize
            if not 0 <= chunk.byte_offset <= chunk.data_offset <= data_end <= chunk.byte_offset + chunk.num_bytes:
                raise CorruptCheckpointError(f"{name}: a chunk's elements lie outside of its bytes")
            if chunk.byte_offset + chunk.num_bytes > sizes[chunk.file]:
                raise CorruptCheckpointError(f"{name}: a chunk lies beyond the end of {chunk.file}")


def _check_hash(path: Path, record: FileRecord, manifest: Manifest) -> None:
    file = path / record.name
    descriptor = open_regular(file)
    try:
        with reading(file):
            found = hash_descriptor(descriptor, manifest.hash_algorithm)
    finally:
        os.close(descriptor)
    if found != record.hash:
        raise CorruptCheckpointError(f"{file} does not have the hash that was saved: its bytes have changed")


def _check_files(path: Path, manifest: Manifest, check: Callable[[FileRecord], None]) -> None:
    """Checks all files, some at a time, and raises what was found: damage rather than a file that cannot be read."""

    def attempt(record: FileRecord) -> CheckpointError | None:
        try:
            check(record)
        except CheckpointError as error:
            return error
        return None

    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        errors = [error for error in pool.map(attempt, manifest.files) if error is not None]
    problems = [str(error).removeprefix(f"{path}/") for error in errors if isinstance(error, CorruptCheckpointError)]
    if problems:
        raise CorruptCheckpointError(f"{path}: " + "; ".join(problems))
    if errors:
        raise errors[0]


def verify(path: Path | str, level: VerifyLevel = "full") -> Manifest:
    """Returns the manifest of the checkpoint at `path` if it verifies.

    Any process may call it; it does not communicate and unpickles nothing.

    Args:
        path: A checkpoint directory.
        level: `quick` compares counts, names and sizes; `full` also every file's hash; `deep` also every tensor's
            digest.

    Raises:
        CheckpointError: There is no such checkpoint, or this version cannot read it.
        CorruptCheckpointError: It is not whole; the message names every file, or the tensor, that is not as it was
            saved.
        UnreadableCheckpointError: A file cannot be read, and what can be read is as it was saved.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _check_files(path, manifest, lambda record: _check_size(path, record))
    _check_chunks(manifest)
    if level in ("full", "deep"):
        _check_files(path, manifest, lambda record: _check_hash(path, record, manifest))
    if level == "deep":
        for name in manifest.tensors:
            read_recorded_tensors(path, manifest, [name])
    return manifest
