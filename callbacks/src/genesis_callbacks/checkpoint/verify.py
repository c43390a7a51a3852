"""Verifies a committed checkpoint against its manifest: sizes, hashes, digests."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from .errors import CorruptCheckpointError
from .hashing import hash_file
from .manifest import FileRecord, Manifest, read_manifest
from .plan import check_tiling
from .restore import read_recorded_tensors

VerifyLevel = Literal["quick", "full", "deep"]
_MAX_THREADS = 8


def _check_size(path: Path, record: FileRecord) -> str | None:
    try:
        num_bytes = (path / record.name).stat().st_size
    except FileNotFoundError:
        return f"{record.name} is missing"
    except OSError as error:
        return f"{record.name} cannot be read: {error}"
    if num_bytes != record.num_bytes:
        return f"{record.name} has {num_bytes} bytes where {record.num_bytes} were saved"
    return None


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


def _check_hash(path: Path, record: FileRecord, manifest: Manifest) -> str | None:
    try:
        found = hash_file(path / record.name, manifest.hash_algorithm)
    except OSError as error:
        return f"{record.name} cannot be read: {error}"
    if found != record.hash:
        return f"{record.name} does not have the hash that was saved: its bytes have changed"
    return None


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
    """
    path = Path(path)
    manifest = read_manifest(path)
    problems = [problem for record in manifest.files if (problem := _check_size(path, record)) is not None]
    if problems:
        raise CorruptCheckpointError(f"{path}: " + "; ".join(problems))
    _check_chunks(manifest)
    if level in ("full", "deep"):
        with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            outcomes = pool.map(lambda record: _check_hash(path, record, manifest), manifest.files)
            problems = [problem for problem in outcomes if problem is not None]
        if problems:
            raise CorruptCheckpointError(f"{path}: " + "; ".join(problems))
    if level == "deep":
        for name in manifest.tensors:
            read_recorded_tensors(path, manifest, [name])
    return manifest
