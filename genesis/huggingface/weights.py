"""The tensors of a directory of safetensors files, read strictly against a decoder's shape."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from genesis.errors import UserError
from genesis.huggingface.directory import INDEX_NAME, WEIGHTS_NAME
from genesis.huggingface.family import OUTPUT_WEIGHT, Family
from genesis.model.decoder import Decoder, DecoderConfig

_DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints of transformers have it beside the weights; it follows from rope_theta."""


def read_weights(directory: Path, config: DecoderConfig, family: Family | None) -> dict[str, Tensor]:
    """Returns the decoder's state, in the dtypes of the files.

    Args:
        directory: Holds safetensors files.
        config: The decoder's shape.
        family: Whose names the files have; None for the decoder's own.

    Raises:
        UserError: There are no safetensors files, or a tensor is missing, has no place, or another shape.
    """
    state = _read_state(directory, family)
    if config.has_tied_embeddings and OUTPUT_WEIGHT in state:
        if not torch.equal(state[OUTPUT_WEIGHT], state["embedding.weight"]):
            raise UserError(f"{directory}: tie_word_embeddings is true, and lm_head.weight is not the embedding")
        del state[OUTPUT_WEIGHT]
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    for name, shape in shapes.items():
        if name not in state:
            raise UserError(f"{directory}: {_name_in_files(name, family)} is missing")
        if state[name].shape != shape:
            found, file_name = list(state[name].shape), _name_in_files(name, family)
            raise UserError(f"{directory}: {file_name} is {found}; by config.json it is {list(shape)}")
    unknown = sorted(state.keys() - shapes.keys())
    if unknown:
        file_name = _name_in_files(unknown[0], family)
        raise UserError(f"{directory}: by config.json {file_name} has no place in the model")
    return state


def _name_in_files(name: str, family: Family | None) -> str:
    return name if family is None else family.their_name(name)


def _read_state(directory: Path, family: Family | None) -> dict[str, Tensor]:
    if not (directory / WEIGHTS_NAME).exists() and not (directory / INDEX_NAME).exists():
        raise UserError(f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; other formats are not read")
    try:
        tensors = iterate_tensors(directory, read_file_names(directory))
        return {name if family is None else family.our_name(name): tensor for name, tensor in tensors}
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{directory} cannot be read: {' '.join(str(error).split())}") from None


def read_file_names(directory: Path) -> dict[str, str]:
    """Returns each tensor's file, as transformers finds it."""
    index = directory / INDEX_NAME
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        return weight_map
    with safe_open(directory / WEIGHTS_NAME, framework="pt") as file:
        return dict.fromkeys(file.keys(), WEIGHTS_NAME)


def iterate_tensors(directory: Path, names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a directory of safetensors files, file by file, but for what follows from the shape."""
    for file_name in sorted(set(names.values())):
        with safe_open(directory / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if not name.endswith(_DERIVED_SUFFIX):
                    yield name, file.get_tensor(name)
