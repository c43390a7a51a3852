"""The tensors of a directory of safetensors files, read strictly against a decoder's shape."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from genesis.base.errors import UserError, numbered
from genesis.huggingface.directory import (
    INDEX_NAME,
    MAX_JSON_BYTES,
    WEIGHTS_NAME,
    explain_other_formats,
    reads_directory,
)
from genesis.huggingface.family import OUTPUT_WEIGHT, Family, assemble
from genesis.huggingface.mxfp4 import join_mxfp4
from genesis.model.decoder import Decoder, DecoderConfig
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import check_no_hole, open_file, path_below, read_file

FP8_SCALE = "_scale_inv"
"""The end of the name of the scales of a weight in FP8."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ADAPTER_NAME = "adapter_config.json"
_PIECE_VALUES = 1 << 24
_MAX_HEADER_BYTES = 16 << 20
"""Of a file's header: that of 50,000 tensors has about 6 MB."""
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""A tensor that old checkpoints of transformers contain; it follows from rope_theta and is skipped."""


@reads_directory
def read_weights(
    directory: Path,
    config: DecoderConfig,
    family: Family | None,
    scratch: Path | None = None,
    check_size: Callable[[int], None] = lambda _: None,
) -> dict[str, Tensor]:
    """Returns the decoder's state, in the dtypes of the files.

    Names, shapes and types are compared before any value is read: a file of holes may claim any size. The tensors are
    views of the mapped files: they take memory only while they are read. Experts that files hold one by one are
    stacked, which takes memory, or space in `scratch`.

    Args:
        directory: Holds safetensors files.
        config: The decoder's shape.
        family: The family whose names the files have; None for the decoder's own names.
        scratch: A directory for mapped files with stacks, which have no name there; None to stack in memory.
        check_size: Gets the number of values before the first of them is read, and may raise.

    Raises:
        UserError: There are no safetensors files, or a tensor is missing, is unknown to the decoder, has a wrong shape
            or dtype, or has values that are not finite.
    """
    if (directory / _ADAPTER_NAME).exists():
        raise UserError(f"{directory} has an adapter ({_ADAPTER_NAME}); merge it into the weights first, or remove it")
    claimed = _read_state(directory, config, family, torch.stack, device="meta")
    _check_shapes(directory, claimed, config, family)
    check_size(sum(tensor.numel() for tensor in claimed.values()))
    stack = torch.stack if scratch is None else partial(_stack_in_file, scratch)
    state = _read_state(directory, config, family, stack, scratch=scratch)
    for name, tensor in state.items():
        if not all(bool(piece.isfinite().all()) for piece in iterate_pieces(tensor)):
            raise UserError(f"{directory}: {_name_in_files(name, family)} has values that are NaN or infinite")
    if config.has_tied_embeddings and OUTPUT_WEIGHT in state:
        if not torch.equal(state[OUTPUT_WEIGHT], state["embedding.weight"]):
            raise UserError(f"{directory}: tie_word_embeddings is true, and lm_head.weight is not the embedding")
        del state[OUTPUT_WEIGHT]
    return state


def _check_shapes(directory: Path, state: Mapping[str, Tensor], config: DecoderConfig, family: Family | None) -> None:
    for name, tensor in state.items():
        if tensor.dtype not in _DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{directory}: {_name_in_files(name, family)} is {dtype}, but weights must be float32, bfloat16 or "
                "float16; dequantise or convert the model with transformers, and save it again"
            )
    if len(state) < config.num_layers:  # before layers are built, which takes time for each
        raise UserError(
            f"{directory}: config.json requires {numbered(config.num_layers, 'layers')}, but the files have only "
            f"{numbered(len(state), 'tensors')} of them: one is missing, or num_hidden_layers is wrong"
        )
    try:
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    except (RuntimeError, OverflowError, TypeError):  # torch's, for more than 2^63 bytes
        raise UserError(
            f"{directory}: config.json requires a tensor of more than 2^63 bytes: correct its sizes, such as "
            f"vocab_size {config.vocab_size} and hidden_size {config.dim}"
        ) from None
    if config.has_tied_embeddings and OUTPUT_WEIGHT in state:
        shapes[OUTPUT_WEIGHT] = shapes["embedding.weight"]  # a copy, which some files have
    for name, shape in shapes.items():
        if name not in state:
            raise UserError(f"{directory}: {_name_in_files(name, family)} is missing")
        if state[name].shape != shape:
            found, file_name = list(state[name].shape), _name_in_files(name, family)
            raise UserError(f"{directory}: {file_name} is {found}, but config.json requires {list(shape)}")
    unknown = sorted(state.keys() - shapes.keys())
    if unknown:
        file_name = _name_in_files(unknown[0], family)
        raise UserError(f"{directory}: {file_name} is not a tensor of the model in config.json")


def iterate_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields parts of a tensor that are small enough to compute with, in their order; all are views."""
    if tensor.numel() <= _PIECE_VALUES:
        yield tensor
    elif len(tensor) == 1:
        yield from iterate_pieces(tensor[0])
    else:
        step = max(1, len(tensor) * _PIECE_VALUES // tensor.numel())
        for start in range(0, len(tensor), step):
            yield from iterate_pieces(tensor[start : start + step])


def _name_in_files(name: str, family: Family | None) -> str:
    return name if family is None else family.their_name(name)


def _read_state(
    directory: Path,
    config: DecoderConfig,
    family: Family | None,
    stack: Callable[[list[Tensor]], Tensor],
    device: str | None = None,
    scratch: Path | None = None,
) -> dict[str, Tensor]:
    if not (directory / WEIGHTS_NAME).exists() and not (directory / INDEX_NAME).exists():
        names = [path.name for path in directory.iterdir()]
        hint = explain_other_formats(names, str(directory))
        raise UserError(f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}{hint}")
    try:
        files = read_file_names(directory)
        if any(name.endswith(FP8_SCALE) for name in files):
            raise UserError("weights are in FP8 with scales; `genesis import` makes them bfloat16: use its result")
        stored = iterate_tensors(directory, files)
        found = ((name, tensor if device is None else tensor.to(device)) for name, tensor in stored)
        if family is None:
            return dict(found)
        tensors = join_mxfp4(found, scratch) if family.reads_mxfp4 else found
        placed = (placed for name, tensor in tensors for placed in family.place(name, tensor, config))
        return assemble(placed, family, stack)
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:  # the last one from mapping a file
        raise UserError(f"{directory} cannot be read: {' '.join(str(error).split())}") from None


@reads_directory
def count_dropped(directory: Path, family: Family) -> dict[str, int]:
    """Returns how many tensors of a directory's files are left out, by the beginning of their names."""
    names = read_file_names(directory)
    counts = {start: sum(name.startswith(start) for name in names) for start in family.dropped}
    return {start: number for start, number in counts.items() if number}


def _stack_in_file(directory: Path, parts: list[Tensor]) -> Tensor:
    """Returns the stack of `parts` in a mapped file, which has no name and ends with the tensor."""
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        size = len(parts) * parts[0].numel()
        stacked = torch.from_file(file.name, shared=True, size=size, dtype=parts[0].dtype)
    stacked = stacked.view(len(parts), *parts[0].shape)
    for place, part in zip(stacked.unbind(), parts, strict=True):
        place.copy_(part)
    return stacked


def read_file_names(directory: Path) -> dict[str, str]:
    """Returns each tensor's file, as transformers finds it: an index is ignored if there is a `model.safetensors`.

    Raises:
        UserError: The index has no map of tensors to names of files beside it.
    """
    if (directory / WEIGHTS_NAME).exists():
        with open_tensors(directory / WEIGHTS_NAME) as file:
            return dict.fromkeys(file.keys(), WEIGHTS_NAME)
    return read_index(directory)


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file, after comparing the size of its header with what a model needs.

    Raises:
        OSError: It is no regular file, cannot be opened, or is hardly more than a size: the rest is a hole.
        SafetensorError: It is damaged.
        UserError: The header is larger.
    """
    with open_file(path) as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        check_no_hole(path, file.fileno())
    if num_bytes > _MAX_HEADER_BYTES:
        raise UserError(f"{path} has a header of {num_bytes:,} bytes: at most {_MAX_HEADER_BYTES:,} are read")
    with safe_open(path, framework="pt") as opened:
        yield opened


def read_index(directory: Path) -> dict[str, str]:
    """Returns each tensor's file by the index.

    Raises:
        UserError: The index has no map of tensors to names of files beside it.
    """
    try:
        index = load_json(read_file(directory / INDEX_NAME, MAX_JSON_BYTES))
    except RecursionError:
        raise UserError(f"{INDEX_NAME} is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{INDEX_NAME} is not JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise UserError(f"{INDEX_NAME} has no weight_map of tensors to files")
    for name in {str(name): name for name in weight_map.values()}.values():
        path_below(directory, name, INDEX_NAME)
    return weight_map


def iterate_tensors(
    directory: Path, names: dict[str, str], family: Family | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a directory of safetensors files, file by file, except for derived rotary tensors.

    Args:
        directory: The directory.
        names: Each tensor's file.
        family: The family, whose weights in MXFP4 are dequantised if it has any; None for the tensors as they are.
    """
    tensors = _iterate_stored(directory, names)
    return join_mxfp4(tensors, None) if family is not None and family.reads_mxfp4 else tensors


def _iterate_stored(directory: Path, names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    for file_name in sorted(set(names.values())):
        with open_tensors(directory / file_name) as file:
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                if not name.endswith(_DERIVED_SUFFIX):
                    yield name, file.get_tensor(name)
