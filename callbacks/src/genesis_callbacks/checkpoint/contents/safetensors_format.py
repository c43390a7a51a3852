"""Reads a file or a directory of safetensors by its headers."""

import os
from collections import defaultdict
from pathlib import Path
from typing import Final

import torch

from genesis_callbacks.base.errors import numbered

from ...base.checkpoint_errors import CorruptCheckpointError
from ...base.errors import UserError
from ...base.safe_read import MAX_DOCUMENT_BYTES, open_regular, parse_json, read_file
from ...base.untrusted import path_below
from .stored import Contents, StoredBlock, StoredTensor, measure

_INDEX_PATTERN = "*.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def _read_file(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file.

    Raises:
        CorruptCheckpointError: The file is truncated, or its header is invalid.
    """
    num_bytes = file.stat().st_size
    with os.fdopen(open_regular(file), "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if num_bytes < 8 or length > min(_MAX_HEADER_BYTES, num_bytes - 8):
            raise CorruptCheckpointError(f"{file.name} is truncated, or is not a safetensors file: it has no header")
        header = stream.read(length)
    tensors: dict[str, StoredTensor] = {}
    try:
        for name, entry in parse_json(header, f"the header of {file.name}").items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            block = StoredBlock(file.name, 8 + length + start, end - start)
            tensors[name] = StoredTensor(tuple(entry["shape"]), _DTYPES[entry["dtype"]], (block,))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(f"{file.name} has a header that cannot be read: {error!r}") from error
    for name, tensor in tensors.items():
        (block,) = tensor.blocks
        if block.num_bytes != tensor.num_bytes:
            raise CorruptCheckpointError(
                f"{file.name}: {name} has {block.num_bytes} bytes where its shape needs {tensor.num_bytes}"
            )
        if block.offset + block.num_bytes > num_bytes:
            raise CorruptCheckpointError(
                f"{file.name} is truncated: it has {num_bytes:,} bytes and {name} ends at byte "
                f"{block.offset + block.num_bytes:,}"
            )
    return tensors


def _read_index(path: Path) -> dict[str, list[str]]:
    """Returns file name to the tensors that the directory's index lists in that file; empty without an index."""
    promised: dict[str, list[str]] = defaultdict(list)
    for index in path.glob(_INDEX_PATTERN):
        try:
            for name, file in parse_json(read_file(index, MAX_DOCUMENT_BYTES), index.name)["weight_map"].items():
                promised[str(path_below(path, file, index).relative_to(path))].append(name)
        except UserError as error:
            raise CorruptCheckpointError(str(error)) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"{index.name} is not an index of safetensors files: {error!r}") from error
    return promised


def read_safetensors(path: Path) -> Contents:
    """Returns the content of a file or a directory of safetensors; missing parts are listed in `problems`.

    Raises:
        CorruptCheckpointError: The index of the directory cannot be read.
    """
    is_file = path.is_file()
    directory = path.parent if is_file else path
    promised = {} if is_file else _read_index(path)
    files = {path.name} if is_file else promised.keys() | {file.name for file in path.glob("*.safetensors")}
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for name in sorted(files):
        if not (directory / name).is_file():
            problems.append(
                f"{name} is missing, with {numbered(len(promised[name]), 'tensors')}, such as {min(promised[name])}"
            )
            continue
        try:
            found = _read_file(directory / name)
        except CorruptCheckpointError as error:
            problems.append(str(error))
            continue
        tensors |= found
        lacking = set(promised.get(name, ())) - found.keys()
        if lacking:
            problems.append(
                f"{name} lacks {numbered(len(lacking), 'tensors')} that the index lists, such as {min(lacking)}"
            )
    return Contents(path, "safetensors", tensors, {}, measure(path), None, tuple(problems))
