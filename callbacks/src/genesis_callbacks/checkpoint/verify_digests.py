"""The deepest level of a verification: the digests of tensors, the state, and the metadata for other tools."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..base.checkpoint_errors import CheckpointError, CorruptCheckpointError
from ..base.manifest import ChunkRecord, Manifest, TensorRecord
from .dcp_metadata import check_dcp_metadata
from .digest import DIGEST_MODULUS, digest_chunk
from .restore import RecordedFiles, check_state

_BLOCK_BYTES = 16 << 20
_MAX_NAMED = 5


def _first_of_run(shape: Sequence[int], chunk: ChunkRecord) -> int | None:
    """Returns the number of the chunk's first element if it is one run of the tensor's row-major order, else None."""
    longest = next((dim for dim, size in enumerate(chunk.sizes) if size > 1), len(shape))
    if tuple(chunk.sizes[longest + 1 :]) != tuple(shape[longest + 1 :]):
        return None
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(chunk.offsets))


def _digest_recorded(files: RecordedFiles, record: TensorRecord, chunk: ChunkRecord) -> int:
    """Returns the digest of a chunk's bytes, some megabytes at a time."""
    dtype, num_elements = record.torch_dtype, math.prod(chunk.sizes)
    start = _first_of_run(record.shape, chunk)
    total = 0
    if start is not None:
        step, whole = _BLOCK_BYTES // dtype.itemsize, (math.prod(record.shape),)
        for first in range(0, num_elements, step):
            block = files.read_elements(chunk, dtype, first, min(step, num_elements - first))
            total += digest_chunk(block, whole, (start + first,))
        return total
    step = max(1, _BLOCK_BYTES // (math.prod(chunk.sizes[1:]) * dtype.itemsize)) if num_elements else chunk.sizes[0]
    for first in range(0, chunk.sizes[0] if num_elements else 0, step):
        block = files.read_rows(chunk, dtype, first, min(step, chunk.sizes[0] - first))
        total += digest_chunk(block, record.shape, (chunk.offsets[0] + first, *chunk.offsets[1:]))
    return total


def _check_digest(path: Path, name: str, record: TensorRecord) -> None:
    with RecordedFiles(path) as files:
        digest = sum(_digest_recorded(files, record, chunk) for chunk in record.chunks) % DIGEST_MODULUS
    if digest != record.digest:
        raise CorruptCheckpointError(
            f"{path}: {name} has digest {digest:016x}, but {record.digest:016x} was saved: its bytes have changed"
        )


def describe_changed(path: Path, manifest: Manifest, names: Iterable[str]) -> str:
    """Returns which tensors of a damaged checkpoint differ from the saved ones, in words."""
    changed = []
    for name in names:
        try:
            _check_digest(path, name, manifest.tensors[name])
        except CheckpointError:
            changed.append(name)
    if not changed:
        return "every tensor is as it was saved"
    others = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
    return f"changed: {', '.join(changed[:_MAX_NAMED])}{others}"


def check_digests(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compares the digest of each tensor.

    Raises:
        CorruptCheckpointError: A tensor differs from the saved one.
    """
    # In this thread: torch's own threads do not work in new threads of a forked process.
    for name in names:
        _check_digest(path, name, manifest.tensors[name])


def check_rest(path: Path, manifest: Manifest) -> None:
    """Checks the metadata for other tools, and the state.

    Raises:
        CorruptCheckpointError: One of them cannot be read, or differs from the manifest.
    """
    check_dcp_metadata(path, manifest)
    check_state(path, manifest)
