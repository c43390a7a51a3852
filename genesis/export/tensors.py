"""Streams tensors of checkpoints into safetensors files, some rows at a time, in little memory.

Each block is read from the shards, added to its tensor's digest, averaged over the checkpoints, cast, and written. The
file's header is written first, because it follows from shapes and dtypes alone.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.base.progress import stage
from genesis.huggingface.directory import INDEX_NAME, WEIGHTS_NAME
from genesis.huggingface.family import weave
from genesis.huggingface.stored import find_nf4_tensors, list_weights
from genesis.model.adapter import cut_adapter, merge_rows, name_adapter_tensors
from genesis.model.nf4 import dequantise_rows
from genesis_callbacks.base.files import create_file, sync_directory
from genesis_callbacks.base.local_shards import LocalShard, TensorShard
from genesis_callbacks.checkpoint import CorruptCheckpointError, Manifest
from genesis_callbacks.checkpoint.digest import DIGEST_MODULUS, digest_chunk
from genesis_callbacks.checkpoint.restore import read_recorded_tensors, restore_shards

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GGUF_KINDS: Final = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Types of the matrices of a GGUF file that the package `gguf` computes."""
_CODES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class Source:
    """A verified checkpoint to read from.

    Args:
        path: Its directory.
        manifest: Its manifest.
        scaling: The factor of its adapters, which are merged into the weights; None without adapters.
    """

    path: Path
    manifest: Manifest
    scaling: float | None = None

    def find_adapter(self, name: str) -> dict[str, str]:
        """Returns the names of the tensors of a weight's adapter by their role; empty without an adapter."""
        names = name_adapter_tensors(name)
        return {tensor: full for tensor, full in names.items() if full in self.manifest.tensors}


@dataclass(frozen=True)
class WeightsFile:
    """A planned file: its name, and its tensors in order, with their names in the file.

    A name with `{}` stands for one tensor for each row of a stack, in order: the bytes of the stack are theirs. Tensors
    with one name, which follow each other, are the rows of one in the file, or woven (`Family.woven`).
    """

    name: str
    tensors: tuple[tuple[str, str], ...]
    woven: frozenset[str] = frozenset()

    def list_groups(self) -> list[tuple[list[str], bool]]:
        """Returns the names in the checkpoint, those of a woven tensor together, and whether they are woven."""
        by_name = groupby(self.tensors, key=lambda pair: pair[1] if pair[1] in self.woven else pair)
        groups = [list(group) for _, group in by_name]
        return [([ours for ours, _ in group], group[0][1] in self.woven) for group in groups]

    def list_entries(self, manifest: Manifest) -> list[tuple[str, tuple[int, ...]]]:
        """Returns name and shape of everything in the file, in order."""
        entries: list[tuple[str, tuple[int, ...]]] = []
        shapes = list_weights(manifest)
        for ours, theirs in self.tensors:
            shape = shapes[ours]
            if theirs in self.woven:
                width = entries.pop()[1][-1] if entries and entries[-1][0] == theirs else 0
                experts, outputs, *inputs = shape
                entries.append((theirs, (experts, *inputs, width + outputs)))
            elif "{}" in theirs:
                entries += [(theirs.format(row), shape[1:]) for row in range(shape[0])]
            elif entries and entries[-1][0] == theirs:
                entries[-1] = (theirs, (entries[-1][1][0] + shape[0], *shape[1:]))
            else:
                entries.append((theirs, shape))
        return entries


def plan_files(
    names: Mapping[str, str],
    manifest: Manifest,
    dtype: torch.dtype,
    max_file_bytes: int,
    woven: frozenset[str] = frozenset(),
) -> list[WeightsFile]:
    """Returns the files for all tensors, in the order of `names`; a tensor is never split.

    Args:
        names: Canonical name in the checkpoint to name in the file.
        manifest: The manifest of a checkpoint with these tensors.
        dtype: The type of the elements in the file.
        max_file_bytes: Size limit of a file; a single larger tensor gets a file of its own.
        woven: The names in the file of tensors that are woven.
    """
    groups: list[list[tuple[str, str]]] = [[]]
    num_bytes = 0
    shapes = list_weights(manifest)
    for ours, theirs in names.items():
        size = math.prod(shapes[ours]) * dtype.itemsize
        is_part = bool(groups[-1]) and groups[-1][-1][1] == theirs
        if groups[-1] and num_bytes + size > max_file_bytes and not is_part:
            groups.append([])
            num_bytes = 0
        groups[-1].append((ours, theirs))
        num_bytes += size
    if len(groups) == 1:
        return [WeightsFile(WEIGHTS_NAME, tuple(groups[0]), woven)]
    total = f"{len(groups):05d}"
    return [
        WeightsFile(f"model-{number:05d}-of-{total}.safetensors", tuple(group), woven)
        for number, group in enumerate(groups, start=1)
    ]


def count_bytes(names: Mapping[str, str], manifest: Manifest, dtype: torch.dtype) -> int:
    """Returns the size of the elements in bytes."""
    shapes = list_weights(manifest)
    return sum(math.prod(shapes[name]) for name in names) * dtype.itemsize


def write_weights(directory: Path, files: Sequence[WeightsFile], sources: Sequence[Source], dtype: torch.dtype) -> None:
    """Writes all files and, if there are several, their index; every tensor is compared with its digest.

    Raises:
        CorruptCheckpointError: A tensor differs from its digest.
        UserError: An average or a cast makes finite values infinite.
        OSError: The disk is full.
    """
    manifest = sources[0].manifest
    num_bytes = sum(count_bytes(dict(file.tensors), manifest, dtype) for file in files)
    with stage("writing the weights", num_bytes, "bytes") as shown:
        for file in files:
            with create_file(directory / file.name) as out:
                out.write(_encode_header(file, manifest, dtype))
                for names, is_woven in file.list_groups():
                    for parts in zip(*(iterate_blocks(sources, ours, dtype) for ours in names), strict=True):
                        block = weave(parts) if is_woven else parts[0]
                        out.write(block.reshape(-1).view(torch.uint8).numpy().data)
                        shown.advance(block.nbytes)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": num_bytes},
            "weight_map": {name: file.name for file in files for name, _ in file.list_entries(manifest)},
        }
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync_directory(directory)


def iterate_blocks(sources: Sequence[Source], name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields a tensor's rows, averaged over the checkpoints in float64 and cast once, in order.

    Raises:
        CorruptCheckpointError: The tensor differs from its digest; raised after the last row.
        UserError: A finite value is beyond the range of `dtype`.
    """
    shape = list_weights(sources[0].manifest)[name]
    of_bytes = [_read_nf4(source, name) for source in sources]
    digests = [0] * len(sources)
    adapters = [
        read_recorded_tensors(source.path, source.manifest, source.find_adapter(name).values()) for source in sources
    ]
    for first, count in _row_ranges(shape):
        blocks = []
        for index, source in enumerate(sources):
            if held := of_bytes[index]:
                block = dequantise_rows(held, slice(first, first + count))
            else:
                block, digest = _read_block(source, name, first, count)
                digests[index] = (digests[index] + digest) % DIGEST_MODULUS
            if adapters[index]:
                block = _merge(source, name, block, adapters[index], slice(first, first + count))
            blocks.append(block)
        yield _cast(_average(blocks), dtype, name)
    for source, digest, held in zip(sources, digests, of_bytes, strict=True):
        if not held and digest != source.manifest.tensors[name].digest:
            raise CorruptCheckpointError(f"{source.path}: {name} is damaged: its bytes have changed since the save")


def _read_nf4(source: Source, name: str) -> dict[str, Tensor]:
    """Returns the tensors that hold a weight in NF4, whole and compared with their digests; empty for another one."""
    names = find_nf4_tensors(source.manifest, name)
    found = read_recorded_tensors(source.path, source.manifest, names.values())
    return {tensor: found[full] for tensor, full in names.items()}


def _merge(source: Source, name: str, block: Tensor, adapter: Mapping[str, Tensor], rows: slice) -> Tensor:
    """Returns rows of a weight plus its adapter, in float64."""
    assert source.scaling is not None
    held = {tensor: adapter[full] for tensor, full in source.find_adapter(name).items()}
    return merge_rows({"weight": block, **cut_adapter(name, held, rows)}, source.scaling)


def _average(blocks: Sequence[Tensor]) -> Tensor:
    if len(blocks) == 1:
        return blocks[0]
    total = blocks[0].double()
    for block in blocks[1:]:
        total += block.double()
    return total / len(blocks)


def _cast(block: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    cast = block.to(dtype)
    if bool((cast.isinf() & block.isfinite()).any()):
        raise UserError(f"{name} has values beyond {str(dtype).removeprefix('torch.')}: use --dtype bfloat16")
    return cast.contiguous()


def _row_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yields (first row, rows) of blocks of moderate size; a scalar is one row."""
    num_rows = shape[0] if shape else 1
    row_bytes = max(1, math.prod(shape[1:]) * 8)
    step = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(0, num_rows, step):
        yield first, min(step, num_rows - first)


def _read_block(source: Source, name: str, first: int, count: int) -> tuple[Tensor, int]:
    record = source.manifest.tensors[name]
    sizes = (count, *record.shape[1:]) if record.shape else ()
    offsets = (first, *(0 for _ in record.shape[1:])) if record.shape else ()
    block = torch.empty(sizes, dtype=record.torch_dtype)
    part = TensorShard(name, "parameter", record.shape, block.dtype, offsets, sizes)
    restore_shards(source.path, source.manifest, [LocalShard(part, block)])
    return block, digest_chunk(block, record.shape, offsets)


def _encode_header(file: WeightsFile, manifest: Manifest, dtype: torch.dtype) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in file.list_entries(manifest):
        end = start + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    header = json.dumps(content, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
