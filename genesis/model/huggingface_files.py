"""A directory in Hugging Face's layout: the names of its files, its hashes, its shape and its tensors.

What `genesis export` wrote says in its `proof.json` which bytes were proved; `check_files` compares them.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from genesis.errors import UserError
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.huggingface import decoder_name, huggingface_name
from genesis.model.recipe import build_decoder_config
from genesis_callbacks.checkpoint.hashing import hash_file

DECODER_PREFIX: Final = "model.decoder."
"""Of the decoder's tensors in a checkpoint."""
CONFIG_NAME = "config.json"
DECODER_NAME = "decoder.json"
"""The shape beside tensors under our own names, where there is no config.json."""
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CARD_NAME = "README.md"
PROOF_NAME = "proof.json"
_NOT_HASHED = (CARD_NAME, PROOF_NAME)
"""The card is for people, who may write in it; the proof has the hashes."""
_READ_SUFFIXES = (".json", ".safetensors", ".model")
"""Of files that would be read, by us or by transformers, wherever they came from."""
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints of transformers have it beside the weights; it follows from rope_theta."""

_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # as many as query heads
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
}
"""What a key that is missing means in transformers, by `model_type`: its default is part of the model's meaning."""
_SHAPE = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
"""Field of DecoderConfig to key of config.json, where the value is the same."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "rope_scaling": (),
    "partial_rotary_factor": (1.0,),
    "attention_dropout": (0.0,),
    "quantization_config": (),
    "logit_scale": (),
    "pretraining_tp": (1,),
}
"""Key of config.json to the values that the decoder can represent, beside null and its absence."""


# ---- hashes


def hash_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns size and sha256, which the Hub shows too, of each file by its name, but for the card and the proof."""
    return {path.name: _describe_file(path) for path in sorted(directory.iterdir()) if path.name not in _NOT_HASHED}


def is_export(path: Path) -> bool:
    """Says whether there is a directory that looks like what `genesis export` writes, or like its kind."""
    return any((path / name).is_file() for name in (CONFIG_NAME, DECODER_NAME))


def check_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns size and hash of each file that was proved; all are as they were.

    Raises:
        UserError: There is no proof with hashes, or a file is missing, has changed or was added.
    """
    path = directory / PROOF_NAME
    if not path.exists():
        raise UserError(
            f"{directory} has no {PROOF_NAME}, so `genesis export` did not make it; `genesis import` takes a Llama "
            "of anybody's"
        )
    files = read_json(path).get("files")
    if not isinstance(files, dict):
        raise UserError(f"{path} has no hashes of files: it is older than they are; export the checkpoint again")
    for name, record in files.items():
        file = directory / name
        if Path(name).name != name or not file.is_file():
            raise UserError(f"{directory} has no file {name}, and {PROOF_NAME} lists it; export the checkpoint again")
        if record != _describe_file(file):
            raise UserError(f"{file} has changed since it was proved; export the checkpoint again")
    for file in sorted(directory.iterdir()):
        if file.suffix in _READ_SUFFIXES and file.name not in (*files, *_NOT_HASHED):
            raise UserError(f"{file} was not there when the export was proved; take it away")
    return files


def _describe_file(path: Path) -> dict[str, Any]:
    return {"num_bytes": path.stat().st_size, "sha256": hash_file(path, "sha256")}


# ---- shape


def read_llama_config(directory: Path) -> DecoderConfig:
    """Returns the decoder's shape from a directory's `config.json`.

    Raises:
        UserError: There is none, or it says something that the decoder cannot represent; the line names the key.
    """
    path = directory / CONFIG_NAME
    content = read_json(path)
    defaults = _DEFAULTS.get(str(content.get("model_type")))
    if defaults is None:
        raise UserError(
            f"{path}: model_type is {content.get('model_type')!r}, which the decoder cannot represent; "
            f"it must be {' or '.join(_DEFAULTS)}"
        )
    content = defaults | content
    for key, allowed in _ONLY.items():
        value = content.get(key)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed)) or "null"
            raise UserError(f"{path}: {key} is {value!r}, which the decoder cannot represent; it must be {wanted}")
    rope = content.get("rope_parameters") or {}
    is_plain = isinstance(rope, dict) and rope.keys() <= {"rope_type", "rope_theta"}
    if not is_plain or rope.get("rope_type", "default") != "default":
        raise UserError(f"{path}: rope_parameters is {rope!r}; only the rope_type 'default' can be represented")
    shape = {ours: content.get(theirs) for ours, theirs in _SHAPE.items()}
    null = [_SHAPE[ours] for ours, value in shape.items() if value is None]
    if null:
        raise UserError(f"{path}: {null[0]} is null; give its value")
    shape |= {
        "num_kv_heads": content.get("num_key_value_heads") or shape["num_heads"],
        "rope_theta": rope.get("rope_theta", content["rope_theta"]),
        "has_tied_embeddings": bool(content["tie_word_embeddings"]),
    }
    config = build_decoder_config(shape, where=str(path))
    _check_window(path, content.get("sliding_window"), config)
    head_dim = content.get("head_dim")
    if head_dim is not None and head_dim != config.head_dim:
        raise UserError(f"{path}: head_dim is {head_dim}, and the decoder's is hidden_size / heads, {config.head_dim}")
    return config


def _check_window(path: Path, window: Any, config: DecoderConfig) -> None:
    """Refuses a window of attention that is shorter than the context; a longer one changes nothing."""
    if window is not None and (type(window) is not int or window < config.max_seq_len):
        raise UserError(
            f"{path}: sliding_window is {window!r} (a missing key is 4096 in mistral), shorter than the context of "
            f"{config.max_seq_len}, which the decoder cannot represent; set sliding_window to null if the model was "
            "trained without one, or max_position_embeddings to the window"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Returns what is in a file of the directory.

    Raises:
        UserError: It cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give a directory of Hugging Face's layout") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object")
    return content


# ---- tensors


def read_weights(
    directory: Path, config: DecoderConfig, rename: Callable[[str], str] = decoder_name
) -> dict[str, Tensor]:
    """Returns the decoder's state, in the dtypes of the files.

    Args:
        directory: Holds safetensors files.
        config: The decoder's shape.
        rename: From a name in the files to the decoder's; the default is for Llama's names.

    Raises:
        UserError: There are no safetensors files, or a tensor is missing, has no place, or another shape.
    """
    state = _read_state(directory, rename)
    if config.has_tied_embeddings and "output.weight" in state:
        if not torch.equal(state["output.weight"], state["embedding.weight"]):
            raise UserError(f"{directory}: tie_word_embeddings is true, and lm_head.weight is not the embedding")
        del state["output.weight"]
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    for name, shape in shapes.items():
        if name not in state:
            raise UserError(f"{directory}: {huggingface_name(name)} is missing")
        if state[name].shape != shape:
            found = list(state[name].shape)
            raise UserError(f"{directory}: {huggingface_name(name)} is {found}; by config.json it is {list(shape)}")
    unknown = sorted(state.keys() - shapes.keys())
    if unknown:
        raise UserError(f"{directory}: by config.json {huggingface_name(unknown[0])} has no place in the model")
    return state


def _read_state(directory: Path, rename: Callable[[str], str]) -> dict[str, Tensor]:
    if not (directory / WEIGHTS_NAME).exists() and not (directory / INDEX_NAME).exists():
        raise UserError(f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; other formats are not read")
    try:
        return {rename(name): tensor for name, tensor in iterate_tensors(directory, read_file_names(directory))}
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
