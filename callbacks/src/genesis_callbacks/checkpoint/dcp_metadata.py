"""Reads the `.metadata` of torch's distributed checkpoint (DCP) without executing it.

The file is a pickle, which other tools unpickle. This module loads DCP's own records as inert objects and refuses any
other name. The `.metadata` of our own checkpoints is compared with the manifest, so that a tool that reads by
`.metadata` gets exactly the tensors in the manifest.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from genesis_callbacks.base.errors import numbered

from ..base.checkpoint_errors import CheckpointError, CorruptCheckpointError, UnreadableCheckpointError
from ..base.manifest import DCP_METADATA_NAME, MAX_DIMS, Manifest, TensorRecord, dtype_from_name
from ..base.safe_read import MAX_PICKLE_BYTES, MAX_PICKLE_MEMORY_BYTES, check_pickle_size, read_file

# Size limits of our own files: bytes of the pickle per tensor or chunk, with long names, and for the rest.
_MAX_BYTES_EACH = 4096
_MAX_BYTES_BESIDE = 64 << 10
_MAX_MEMORY_BYTES_EACH = 16 << 10
_RECORD_BYTES = 200
_MAX_ARGUMENTS = 256  # maximum number of parts of a path


class InertRecord:
    """Replaces an instance of one of DCP's dataclasses: stores the state and runs no code."""

    def __init__(self, *arguments: Any) -> None:
        if len(arguments) > _MAX_ARGUMENTS:
            raise TypeError(f"a record has {numbered(len(arguments), 'arguments')}")
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # No copy: a pickle of a few bytes could give the same large state to each of many records.
        if isinstance(state, dict):
            self.__dict__ = state
        elif isinstance(state, tuple):
            self.arguments = state
        else:
            raise TypeError(f"a record's state is a {type(state).__name__}")


class InertTensorRecord(InertRecord):
    """Replaces a `TensorStorageMetadata`."""

    properties: InertRecord
    size: tuple[int, ...]
    chunks: list[Any]


def _make_size(*arguments: Any) -> torch.Size:
    if len(arguments) > 1 or any(len(sizes) > MAX_DIMS for sizes in arguments):
        raise TypeError("a size has more dimensions than torch allows")
    return torch.Size(*arguments)


def _make_dict() -> dict[Any, Any]:
    """Replaces an `OrderedDict`, which a pickle creates empty and then fills."""
    return {}


_DCP = "torch.distributed.checkpoint"
_PLAIN_GLOBALS: Final[Mapping[tuple[str, str], Any]] = {
    **{
        (f"{_DCP}.metadata", name): InertRecord
        for name in (
            *("Metadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta"),
            *("_MEM_FORMAT_ENCODING", "BytesStorageMetadata"),
        )
    },
    (f"{_DCP}.metadata", "TensorStorageMetadata"): InertTensorRecord,
    (f"{_DCP}.filesystem", "_StorageInfo"): InertRecord,
    ("torch", "Size"): _make_size,
    ("torch.serialization", "_get_layout"): InertRecord,
    ("collections", "OrderedDict"): _make_dict,
    **{
        (module, name): InertRecord for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")
    },
}


# Not the unpickler in C: it allocates gigabytes for one opcode with a large memo index. The one in Python has a dict.
class _MetadataUnpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _PLAIN_GLOBALS.get((module, name))
        if found is None and module == "torch":
            dtype = vars(torch).get(name)
            found = dtype if isinstance(dtype, torch.dtype) else None
        if found is None:
            raise CheckpointError(
                f"{DCP_METADATA_NAME} holds a {module}.{name}, which is not one of DCP's own records, and was not "
                "loaded: none of its code has run"
            )
        return found


def read_dcp_metadata(
    path: Path, max_bytes: int = MAX_PICKLE_BYTES, max_memory_bytes: int = MAX_PICKLE_MEMORY_BYTES
) -> InertRecord:
    """Returns what the `.metadata` in the directory `path` holds.

    Args:
        path: The directory.
        max_bytes: Limit of the file's size.
        max_memory_bytes: Limit of the memory for the unpickled objects.

    Raises:
        CheckpointError: The file holds other objects than DCP's own records.
        CorruptCheckpointError: The file is missing, too large, or not a pickle of such records.
        UnreadableCheckpointError: The file cannot be read.
    """
    file = path / DCP_METADATA_NAME
    if not file.exists():
        raise CorruptCheckpointError(f"{DCP_METADATA_NAME} is missing, so that the content of the shards is unknown")
    data = read_file(file, max_bytes)
    check_pickle_size(data, str(file), object_bytes=_RECORD_BYTES, max_memory_bytes=max_memory_bytes)
    stream = io.BytesIO(data)
    try:
        metadata = _MetadataUnpickler(stream).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise almost any error
        raise CorruptCheckpointError(f"{DCP_METADATA_NAME} cannot be read: {type(error).__name__}") from error
    if not isinstance(metadata, InertRecord) or stream.read(1):
        raise CorruptCheckpointError(f"{DCP_METADATA_NAME} does not hold one record of DCP's metadata")
    return metadata


def check_dcp_metadata(path: Path, manifest: Manifest) -> None:
    """Compares the `.metadata` of one of our checkpoints with its manifest. No code in the file runs.

    Raises:
        CorruptCheckpointError: The two differ, or the file holds other objects than DCP's own records.
        UnreadableCheckpointError: The file cannot be read.
    """
    own = manifest.own_tensors  # DCP has no reference to another checkpoint
    num_chunks = sum(len(record.chunks) for record in own.values())
    num_records = num_chunks + len(own)
    max_bytes = _MAX_BYTES_BESIDE + _MAX_BYTES_EACH * num_records
    # The limits grow with the manifest, so that our own checkpoints are readable with any number of tensors.
    max_memory_bytes = 64 * _MAX_BYTES_BESIDE + _MAX_MEMORY_BYTES_EACH * num_records
    try:
        metadata = read_dcp_metadata(path, max_bytes, max_memory_bytes)
        found = vars(metadata)
        tensors = {name: _describe(record) for name, record in found["state_dict_metadata"].items()}
        # `transform_descriptors` name a compression or encryption, which we never write: such an entry is left out, so
        # that the comparison fails.
        places = {
            (index.fqn, tuple(index.offset), index.index): (info.relative_path, info.offset, info.length)
            for index, info in found["storage_data"].items()
            if not getattr(info, "transform_descriptors", None)
        }
        planned = {name: ".".join(parts) for name, parts in (found.get("planner_data") or {}).items()}
    except UnreadableCheckpointError:
        raise
    except CheckpointError as error:
        raise CorruptCheckpointError(f"{path}: {error}") from error
    except (KeyError, AttributeError, TypeError, IndexError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: {DCP_METADATA_NAME} is damaged: it lacks {error}") from error
    expected = {name: _expect(record) for name, record in own.items()}
    expected_places = {
        (name, chunk.offsets, number): (chunk.file, chunk.byte_offset, chunk.num_bytes)
        for name, record in own.items()
        for number, chunk in enumerate(record.chunks)
    }
    for what, ours, theirs in (
        ("tensors", expected, tensors),
        ("places of tensors", expected_places, places),
        ("names", {name: name for name in planned}, planned),
    ):
        if ours != theirs:
            raise CorruptCheckpointError(f"{path}: {DCP_METADATA_NAME} has other {what} than the manifest")


def _describe(record: Any) -> tuple[Any, ...]:
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in record.chunks]
    return record.properties.arguments[0], tuple(record.size), chunks


def _expect(record: TensorRecord) -> tuple[Any, ...]:
    return (
        dtype_from_name(record.dtype),
        record.shape,
        [(chunk.offsets, chunk.sizes) for chunk in record.chunks],
    )
