"""Imports a Llama of Hugging Face's: read strictly, committed as a checkpoint of the engine, proved, then named.

The directory that it makes is a run's: `checkpoints/step-00000000` and, where it is taken over, `tokenizer.model`.
Training goes on from its weights in another run (`--ckpt_path ... --checkpoint.restore weights`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError
from torch import Tensor

from genesis.errors import UserError
from genesis.export.files import CONFIG_NAME, DECODER_PREFIX, INDEX_NAME, WEIGHTS_NAME, iterate_tensors, read_file_names
from genesis.export.proof import run_proof, write_proof
from genesis.export.staging import check_is_new, staged
from genesis.export.tokenizer import compare_tokenizers
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.huggingface import decoder_name, huggingface_name
from genesis.model.recipe import build_decoder_config
from genesis.tokenizer.tokenizer import Tokenizer
from genesis.tokenizer.train import MODEL_NAME
from genesis_callbacks.checkpoint import Origin, Ranks, Saver, Snapshot, local_parts
from genesis_callbacks.checkpoint.lineage import CHECKPOINTS_NAME
from genesis_callbacks.checkpoint.tagged_json import encode_tagged

_MODEL_TYPES = ("llama", "mistral")
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
_DEFAULT_ROPE_THETA = 10_000.0
"""Transformers'."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "sliding_window": (),
    "rope_scaling": (),
    "partial_rotary_factor": (1.0,),
    "attention_dropout": (0.0,),
    "quantization_config": (),
    "logit_scale": (),
    "pretraining_tp": (1,),
}
"""Key of config.json to the values that the decoder can represent, beside null and its absence."""


def read_llama_config(directory: Path) -> DecoderConfig:
    """Returns the decoder's shape from a directory's `config.json`.

    Raises:
        UserError: There is none, or it says something that the decoder cannot represent; the line names the key.
    """
    path = directory / CONFIG_NAME
    content = _read_json(path)
    if content.get("model_type") not in _MODEL_TYPES:
        raise UserError(
            f"{path}: model_type is {content.get('model_type')!r}, which the decoder cannot represent; "
            f"it must be {' or '.join(_MODEL_TYPES)}"
        )
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
    missing = [_SHAPE[ours] for ours, value in shape.items() if value is None]
    if missing:
        raise UserError(f"{path}: {missing[0]} is missing")
    shape |= {
        "num_kv_heads": content.get("num_key_value_heads") or shape["num_heads"],
        "rope_theta": rope.get("rope_theta") or content.get("rope_theta") or _DEFAULT_ROPE_THETA,
        "has_tied_embeddings": bool(content.get("tie_word_embeddings", False)),
    }
    config = build_decoder_config(shape, where=str(path))
    head_dim = content.get("head_dim")
    if head_dim is not None and head_dim != config.head_dim:
        raise UserError(f"{path}: head_dim is {head_dim}, and the decoder's is hidden_size / heads, {config.head_dim}")
    return config


def read_llama_weights(directory: Path, config: DecoderConfig) -> dict[str, Tensor]:
    """Returns the decoder's state in float32.

    Raises:
        UserError: There are no safetensors files, or a tensor is missing, has no place, or another shape.
    """
    state = _read_state(directory)
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


def _read_state(directory: Path) -> dict[str, Tensor]:
    if not (directory / WEIGHTS_NAME).exists() and not (directory / INDEX_NAME).exists():
        raise UserError(f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; other formats are not read")
    try:
        return {
            decoder_name(name): tensor.to(torch.float32)
            for name, tensor in iterate_tensors(directory, read_file_names(directory))
        }
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{directory} cannot be read: {' '.join(str(error).split())}") from None


def read_tokenizer(directory: Path, config: DecoderConfig) -> Tokenizer:
    """Returns the tokenizer of a directory: its SentencePiece model, if that gives every text back and is the fast one.

    Raises:
        UserError: It cannot be taken over; the line says why.
    """
    remedy = "import the weights alone by --no_tokenizer"
    model = directory / MODEL_NAME
    if not model.exists():
        raise UserError(f"{directory} has no {MODEL_NAME}: only SentencePiece's can be taken over; {remedy}")
    try:
        tokenizer = Tokenizer.load(model)
        fast = directory / "tokenizer.json"
        if fast.exists():
            theirs = tokenizers.Tokenizer.from_file(str(fast))
            theirs.encode_special_tokens = True
            compare_tokenizers(
                tokenizer,
                lambda text: theirs.encode(text, add_special_tokens=False).ids,
                lambda ids: theirs.decode(ids, skip_special_tokens=False),
                has_space_mark=False,
            )
    except UserError as error:
        raise UserError(f"{error}; or {remedy}") from None
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"{model} has {tokenizer.vocab_size:,} ids and the model only {config.vocab_size:,}; {remedy}")
    return tokenizer


def import_directory(directory: Path, out: Path, *, has_tokenizer: bool) -> dict[str, Any]:
    """Makes the run's directory `out` with one committed checkpoint of a Llama's weights and returns the proof.

    Args:
        directory: Of Hugging Face's layout.
        out: Must not be there.
        has_tokenizer: Whether its tokenizer is taken over.

    Raises:
        UserError: It cannot be represented, there is no room, or `out` is there.
        RunEndedError: The proof failed. Nothing is left in each case.
    """
    check_is_new(out)
    config = read_llama_config(directory)
    tokenizer = read_tokenizer(directory, config) if has_tokenizer else None
    state = read_llama_weights(directory, config)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    with staged(out, num_bytes + num_bytes // 10) as staging:
        if tokenizer is not None:
            (staging / MODEL_NAME).write_bytes(tokenizer.model)
        checkpoint = _save(state, config, tokenizer, staging / CHECKPOINTS_NAME)
        model = None if tokenizer is None else staging / MODEL_NAME
        proof = run_proof(directory, [checkpoint], model, "huggingface", is_import=True)
        write_proof(staging, proof)
    return proof


def _save(state: Mapping[str, Tensor], config: DecoderConfig, tokenizer: Tokenizer | None, checkpoints: Path) -> Path:
    checkpoints.mkdir()
    identity = {} if tokenizer is None else {"tokenizer_hash": tokenizer.hash}
    origin = Origin(identity, {"model": {"decoder": asdict(config)}})
    parts = [part for name, tensor in state.items() for part in local_parts(DECODER_PREFIX + name, tensor, "parameter")]
    section, _ = encode_tagged(_begin_trainer_state(), "state.0")
    saver = Saver(checkpoints, Ranks(), origin=origin)
    return saver.save(lambda: Snapshot(0, {"step": 0}, parts, section, has_optimizer=False)).path


def _begin_trainer_state() -> dict[str, Any]:
    """Returns what a save holds beside tensors, of a trainer that has done nothing."""
    return {
        "trainer": {
            "epoch": 0,
            "global_step": 0,
            "pytorch-lightning_version": version("lightning"),
            "callbacks": {},
            "lr_schedulers": [],
        },
        "model_extras": {},
        "optimizers": [],
        "rng": None,
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give a directory of Hugging Face's layout") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object")
    return content
