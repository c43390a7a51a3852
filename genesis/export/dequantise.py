"""Weights in FP8 with a scale for each block, as DeepSeek publishes them: a copy of their directory in bfloat16.

Each file is written piece by piece, so that the memory does not grow with the model.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.base.progress import Stage, stage
from genesis.export.staging import check_space
from genesis.huggingface.directory import (
    CONFIG_NAME,
    DATA_SUFFIXES,
    INDEX_NAME,
    MAX_JSON_BYTES,
    WEIGHTS_NAME,
    read_json,
    reads_directory,
)
from genesis.huggingface.shape import FP8_BLOCK, is_in_fp8_blocks
from genesis.huggingface.weights import FP8_SCALE, iterate_pieces, open_tensors, read_file_names
from genesis_callbacks.base.files import create_file
from genesis_callbacks.base.untrusted import read_file

_KEY: Final = "quantization_config"
_FP8: Final = torch.float8_e4m3fn
_PIECE_ROWS: Final = 8 * FP8_BLOCK
_MAX_FILE_BYTES: Final = 1 << 30
"""Of a tokenizer's files and others without weights."""


@contextmanager
def without_blocks(directory: Path, near: Path) -> Iterator[Path]:
    """Yields the directory, or a copy with weights in bfloat16 if they are in FP8 with scales; it is removed then.

    The product of a value and its scale is rounded once, as in DeepSeek's own conversion.

    Args:
        directory: A directory in Hugging Face's layout.
        near: A path on the disk where the copy may lie: in the directory of this path.

    Raises:
        UserError: A weight in FP8 has no scales, or there is too little space.
    """
    if not is_in_fp8_blocks(_read_config(directory).get(_KEY)):
        yield directory
        return
    near.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{near.name}.bfloat16-", dir=near.parent) as name:
        _copy(directory, Path(name), near)
        yield Path(name)


@reads_directory
def _read_config(directory: Path) -> dict[str, Any]:
    return read_json(directory / CONFIG_NAME)


@reads_directory
def _copy(directory: Path, out: Path, near: Path) -> None:
    names = read_file_names(directory)
    scales: dict[str, Tensor] = {}
    num_bytes = 0
    for file_name in sorted(set(names.values())):
        with open_tensors(directory / file_name) as file:
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                tensor = file.get_tensor(name)
                if name.endswith(FP8_SCALE):
                    scales[name] = tensor.float()
                else:
                    num_bytes += tensor.numel() * _type_of(tensor).itemsize
    check_space(near, num_bytes)
    with stage("dequantising the weights", num_bytes, "bytes") as shown:
        for file_name in sorted(set(names.values())):
            _copy_file(directory / file_name, out / file_name, scales, shown)
    if set(names.values()) != {WEIGHTS_NAME}:
        held = {name: file_name for name, file_name in names.items() if not name.endswith(FP8_SCALE)}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": held}
        (out / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
    content = {key: value for key, value in read_json(directory / CONFIG_NAME).items() if key != _KEY}
    (out / CONFIG_NAME).write_text(json.dumps(content), encoding="utf-8")
    for path in sorted(directory.iterdir()):
        is_other = path.suffix in DATA_SUFFIXES and path.suffix != ".safetensors"
        if is_other and path.name not in (CONFIG_NAME, INDEX_NAME):
            limit = MAX_JSON_BYTES if path.suffix == ".json" else _MAX_FILE_BYTES
            (out / path.name).write_bytes(read_file(path, limit))


def _type_of(tensor: Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.dtype == _FP8 else tensor.dtype


def _copy_file(path: Path, out: Path, scales: Mapping[str, Tensor], shown: Stage) -> None:
    with open_tensors(path) as file, create_file(out) as written:
        kept = [name for name in file.keys() if not name.endswith(FP8_SCALE)]  # noqa: SIM118 - as above
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name in kept:
            held, tensor = file.get_slice(name), file.get_tensor(name)
            end = start + tensor.numel() * _type_of(tensor).itemsize
            code = "BF16" if tensor.dtype == _FP8 else held.get_dtype()
            header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
            start = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        written.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in kept:
            tensor = file.get_tensor(name)
            pieces = iterate_pieces(tensor)
            if tensor.dtype == _FP8:
                pieces = _dequantise(name, tensor, scales.get(name + FP8_SCALE))
            for piece in pieces:
                written.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                shown.advance(piece.nbytes)


def _dequantise(name: str, weight: Tensor, scales: Tensor | None) -> Iterator[Tensor]:
    """Yields the rows of a weight in bfloat16, some blocks at a time."""
    if scales is None:
        raise UserError(f"{name} is in FP8, and {name}{FP8_SCALE} is missing")
    wanted = [-(-size // FP8_BLOCK) for size in weight.shape]
    if weight.ndim != 2 or list(scales.shape) != wanted:
        raise UserError(f"{name}{FP8_SCALE} is {list(scales.shape)}, but {name} has {wanted} blocks")
    for first in range(0, len(weight), _PIECE_ROWS):
        rows = weight[first : first + _PIECE_ROWS].float()
        factors = scales[first // FP8_BLOCK : (first + _PIECE_ROWS) // FP8_BLOCK]
        for block, factor in zip(torch.split(rows, FP8_BLOCK), factors, strict=True):
            block *= factor.repeat_interleave(FP8_BLOCK)[: block.shape[1]]
        yield rows.to(torch.bfloat16)
