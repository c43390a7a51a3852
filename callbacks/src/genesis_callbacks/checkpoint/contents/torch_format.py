"""Reads a file of `torch.save` (Lightning's .ckpt) with torch's weights-only reader, without its tensors' bytes."""

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._compat import offset_in_file
from ...base.checkpoint_errors import CheckpointError, CorruptCheckpointError
from ...base.safe_read import (
    MAX_PICKLE_BYTES,
    MAX_PICKLE_MEMORY_BYTES,
    check_pickle_size,
    open_regular,
    reading,
)
from .stored import Contents, StateByKey, StoredBlock, StoredTensor, measure

TORCH_SUFFIXES = (".ckpt", ".pt", ".pth")
_TENSOR_BYTES = 1024  # memory of a tensor object without its elements
_REFUSED_GLOBAL = re.compile(r"(?:GLOBAL|class|function|type)[: ]+`?([\w.]+\.[\w.]+)")


def _check_archive(path: Path) -> None:
    """Refuses an archive that would need more memory than it has bytes on the disk.

    Raises:
        CorruptCheckpointError: The archive has compressed entries, or pickles that are too large.
    """
    descriptor = open_regular(path)
    with reading(path), os.fdopen(descriptor, "rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            is_part = file.read(4) == b"PK\x03\x04"
            what = "is truncated: its table of contents is missing" if is_part else "is not a file of torch.save"
            raise CorruptCheckpointError(f"{path.name} {what}")
        try:
            with zipfile.ZipFile(file) as archive:
                _check_entries(path, archive)
        except CheckpointError:
            raise
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise CorruptCheckpointError(f"{path.name} is not a file of torch.save: {error}") from error


def _check_entries(path: Path, archive: zipfile.ZipFile) -> None:
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CorruptCheckpointError(f"{path.name} has a compressed entry {entry.filename}: torch.save writes none")
        if not entry.filename.lower().endswith(".pkl"):
            continue
        name = f"{path.name}: {entry.filename}"
        if entry.file_size > MAX_PICKLE_BYTES:
            raise CorruptCheckpointError(f"{name} has {entry.file_size} bytes, more than {MAX_PICKLE_BYTES}")
        data = archive.read(entry)
        check_pickle_size(data, name, object_bytes=_TENSOR_BYTES, max_memory_bytes=MAX_PICKLE_MEMORY_BYTES)


def load_plain(path: Path) -> Any:
    """Returns the object in a file of `torch.save`, with tensors without their bytes.

    Raises:
        CheckpointError: The file holds an object that is not plain data.
        CorruptCheckpointError: The file is not a file of `torch.save`, or is truncated.
    """
    _check_archive(path)
    try:
        return torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        found = _REFUSED_GLOBAL.search(str(error))
        what = f"a {found[1]}" if found else "something"
        raise CheckpointError(
            f"{path.name} holds {what}, which is not plain data, and was not loaded: none of its code has run. Keep "
            "hyperparameters and callbacks' states to plain values, or allow a type that you trust by "
            "torch.serialization.add_safe_globals"
        ) from error
    except Exception as error:  # a damaged file can raise almost any error
        reason = (str(error).splitlines() or [""])[0]
        raise CorruptCheckpointError(f"{path.name} cannot be read: {type(error).__name__}: {reason}") from error


def _locate_tensor(tensor: Tensor, file: str) -> StoredTensor:
    shape = tuple(tensor.shape)
    if tensor.layout != torch.strided or not tensor.numel():
        return StoredTensor(shape, tensor.dtype, ())
    itemsize = tensor.dtype.itemsize
    start = offset_in_file(tensor)
    # The range of a view with gaps extends from its first to its last element.
    num_elements = 1 + sum((size - 1) * int(stride) for size, stride in zip(shape, tensor.stride(), strict=True))
    block = StoredBlock(file, start + int(tensor.storage_offset()) * itemsize, num_elements * itemsize)
    return StoredTensor(shape, tensor.dtype, (block,))


def _locate_tensors(values: Any, file: str) -> dict[Any, StoredTensor]:
    items = values.items() if isinstance(values, Mapping) else ()
    return {key: _locate_tensor(value, file) for key, value in items if isinstance(value, Tensor)}


def read_torch(path: Path) -> Contents:
    """Returns the content of a file of `torch.save`.

    Raises:
        CheckpointError: The file holds an object that is not plain data.
        CorruptCheckpointError: The file is not a file of `torch.save`, or is truncated.
    """
    loaded = load_plain(path)
    if not isinstance(loaded, Mapping):
        raise CorruptCheckpointError(f"{path.name} holds a {type(loaded).__name__} where a dict of tensors is expected")
    model = _locate_tensors(loaded.get("state_dict", loaded), path.name)
    optimizers: dict[int, dict[str | int, StateByKey]] = {}
    for index, state in enumerate(loaded.get("optimizer_states") or ()):
        states = state.get("state", {}) if isinstance(state, Mapping) else {}
        optimizers[index] = {parameter: _locate_tensors(values, path.name) for parameter, values in states.items()}
    step = loaded.get("global_step")
    num_bytes = measure(path)
    blocks = [block for tensor in model.values() for block in tensor.blocks]
    beyond = any(block.offset + block.num_bytes > num_bytes for block in blocks)
    problems = (f"{path.name} ends before its last tensor does",) if beyond else ()
    return Contents(path, "torch", model, optimizers, num_bytes, step if isinstance(step, int) else None, problems)
