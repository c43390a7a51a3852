"""Makes one checkpoint from the files of all ranks: manifest, other state, DCP's metadata, commit, retention.

One process, rank 0's trainer or its writer, does this for all ranks, without communication.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._compat import build_dcp_metadata
from ..base.checkpoint_errors import CheckpointError, CorruptCheckpointError, SaveFailedError
from ..base.chunk_table import ChunkTable
from ..base.local_shards import TensorShard
from ..base.manifest import (
    DCP_METADATA_NAME,
    STATE_NAME,
    FileRecord,
    Manifest,
    TensorRecord,
    dtype_name,
    encode_manifest,
    schema_for,
)
from ..base.run_directory import MANIFEST_NAME, checkpoint_name
from ..base.safe_read import check_json_size, parse_json
from .commit import commit
from .durable_file import write_file
from .retain import Retention, apply_retention
from .verify import verify


def describe_tensor(part: TensorShard, digest: int, chunks: ChunkTable) -> TensorRecord:
    """Returns the manifest's record of the tensor that a part belongs to."""
    return TensorRecord(part.shape, dtype_name(part.dtype), digest, chunks)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Refuses JSON that a restore would refuse: a failed save is better than a checkpoint that cannot be read.

    Raises:
        SaveFailedError: The JSON is nested too deeply, or too large.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        raise SaveFailedError(f"{error}; keep less in the state of callbacks, data and recipe") from error


def assemble(
    staging: Path,
    header: Manifest,
    tensors: Mapping[str, TensorRecord],
    shards: Sequence[FileRecord],
    sections: Sequence[Any],
) -> tuple[Path, Manifest, str]:
    """Completes the staging directory, commits it, and returns (path, manifest, hash of the manifest).

    Args:
        staging: The staging directory with the shards of all ranks.
        header: The manifest, without files, tensors and the time of the commit.
        tensors: The records of all tensors, including those in the base.
        shards: The files that the ranks wrote.
        sections: Each rank's other state, already plain JSON, in rank order.

    Raises:
        SaveFailedError: A checkpoint of that step exists.
        OSError: The disk is full, or cannot be written.
    """
    final = staging.parent / checkpoint_name(header.step)
    algorithm = header.hash_algorithm
    state = json.dumps({"sections": list(sections)}, allow_nan=False).encode()
    with _refusing():
        parse_json(state, STATE_NAME)
    in_base = frozenset() if header.base is None else header.base.names
    own = {name: record for name, record in tensors.items() if name not in in_base}
    files = [
        *shards,
        write_file(staging / STATE_NAME, state, algorithm=algorithm),
        write_file(staging / DCP_METADATA_NAME, build_dcp_metadata(own, final.name), algorithm=algorithm),
    ]
    manifest = replace(
        header,
        created_seconds=time.time(),
        files=tuple(sorted(files, key=lambda record: record.name)),
        tensors=dict(tensors),
        schema_version=schema_for(header.base, sum(len(record.chunks) for record in own.values())),
    )
    data = encode_manifest(manifest)
    with _refusing():
        check_json_size(data, MANIFEST_NAME)
        # What the run gave may be nested too deeply; the tensors' records are not, and take seconds to parse.
        parse_json(encode_manifest(replace(manifest, tensors={}, base=None)), MANIFEST_NAME)
    return final, manifest, commit(staging, final, data, algorithm)


def retain(newest: Path, retention: Retention) -> tuple[list[str], str | None]:
    """Applies retention after the commit of `newest`; returns the names of removed checkpoints, and a warning or None.

    A failure costs disk space, but never the save.
    """
    try:
        verify(newest, "quick")
        return apply_retention(newest.parent, newest.name, retention), None
    except (CheckpointError, OSError) as error:
        return [], f"{newest.name} is saved, but older checkpoints were not removed: {error}"
