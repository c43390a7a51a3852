"""Weights for a server that writes answers: a directory of the run for each update, complete before it has its name.

    RUN/served/weights/UPDATE-DIGEST/    config.json, model.safetensors, the tokenizer's files, proof.json
                                         adapters: adapter_config.json, adapter_model.safetensors, proof.json

A model is in Hugging Face's layout where a family of transformers represents it, else in our own. The weights are those
that train, in their type. `proof.json` lists the hashes of the files alone: they are no export that was compared with a
checkpoint. The digest is the hash of that list.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from genesis.base.errors import UserError
from genesis.huggingface.adapter_config import describe_adapter
from genesis.huggingface.directory import (
    CONFIG_NAME,
    DECODER_NAME,
    PROOF_NAME,
    WEIGHTS_NAME,
    hash_files,
    hash_listed,
)
from genesis.huggingface.family import Family, weave
from genesis.huggingface.peft import BASE_FORMAT, FINGERPRINT, fingerprint, name_adapter_tensors_of_peft, to_peft
from genesis.huggingface.peft import CONFIG_NAME as ADAPTER_CONFIG_NAME
from genesis.huggingface.peft import WEIGHTS_NAME as ADAPTER_WEIGHTS_NAME
from genesis.huggingface.shape import find_family, find_names, write_shape
from genesis.huggingface.stored import list_nf4_tensors
from genesis.model.adapter import EXTRA_TENSORS, AdapterConfig, is_adapter_tensor
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.recipe import DECODER_PREFIX, dump_decoder_config
from genesis.tokenizer.files import write_files
from genesis.tokenizer.huggingface import TEMPLATE_NAME
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.files import replace_file, staged_file, sync_directory
from genesis_callbacks.base.untrusted import read_file
from genesis_callbacks.checkpoint import Manifest

_STAGING: Final = ".writing"
_REMOVED: Final = ".removed-"
"""Begins the name of a directory that is no longer whole."""
_DIGEST_SHOWN: Final = 32


class Weights(NamedTuple):
    """Weights of a server: the name that it has for them, and the digest of their files; none for weights that stay."""

    name: str
    digest: str | None = None


class Texts(NamedTuple):
    """How a model reads and ends texts: its tokenizer, and the file of the chat template if it has another one."""

    tokenizer: Tokenizer
    template: Path | None


def write_weights(
    root: Path,
    update: int,
    decoder: Decoder,
    adapter: AdapterConfig | None,
    texts: Texts,
    *,
    base: Manifest | None = None,
) -> Weights:
    """Writes the weights after an update, in place of those that are there under the name. One rank calls it.

    Args:
        root: The directory of the weights of all updates.
        update: The number of updates.
        decoder: The whole model.
        adapter: Its adapters, which are written alone; None for the whole model.
        texts: How it reads and ends texts.
        base: The manifest of the adapters' base, which is named in their file so that no other base takes them.

    Raises:
        UserError: PEFT has no form for the adapters.
        OSError: The disk is full.
    """
    staging = root / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    config = decoder.config
    state = decoder.state_dict()
    if adapter is None:
        _write_model(staging, config, _copy(state), texts)
    else:
        _write_adapter(staging, config, adapter, state, base)
    _write_json(staging / PROOF_NAME, {"files": hash_files(staging)})
    digest = hash_listed(staging)
    weights = Weights(f"{update:010d}-{digest[:_DIGEST_SHOWN]}", digest)
    sync_directory(staging)
    if (root / weights.name).exists():  # of a step that a resumed run repeats; its files may be damaged since
        _remove(root / weights.name)
    staging.rename(root / weights.name)
    sync_directory(root)
    return weights


def find_weights(root: Path, name: str) -> Weights | None:
    """Returns the weights with a name; None if they are no longer there."""
    return Weights(name, hash_listed(root / name)) if (root / name / PROOF_NAME).exists() else None


def read_update(name: str) -> int:
    """Returns the number of updates in the name of weights."""
    return int(name.partition("-")[0])


def remove_weights(root: Path, before: int) -> None:
    """Removes the weights of the updates before one, and what a killed process has left of a removal."""
    for path in root.glob(f"{_REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob("[0-9]*-*"):
        if read_update(path.name) < before:
            with suppress(OSError):  # what stays costs space alone
                _remove(path)


def _remove(path: Path) -> None:
    """Removes weights, which lose their name before their files: weights with a name are whole."""
    removed = path.with_name(_REMOVED + path.name)
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _copy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors on the host."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _write_model(staging: Path, config: DecoderConfig, state: Mapping[str, Tensor], texts: Texts) -> None:
    write_files(texts.tokenizer.files, staging)
    if texts.template is not None:
        replace_file(staging / TEMPLATE_NAME, read_file(texts.template))
    try:
        family = find_family(config)
    except UserError:
        _write_json(staging / DECODER_NAME, dump_decoder_config(config))
        _write_tensors(staging / WEIGHTS_NAME, state)
        return
    ids = {f"{name}_token_id": getattr(texts.tokenizer, f"{name}_id") for name in ("bos", "eos", "pad")}
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    _write_json(staging / CONFIG_NAME, {**write_shape(family, config), **ids, "dtype": dtype})
    _write_tensors(staging / WEIGHTS_NAME, name_as_family(family, state))


def name_as_family(family: Family, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a decoder's tensors as the files of a family have them: some are joined, woven, or cut into experts."""
    parts: dict[str, list[Tensor]] = {}
    for ours, pattern in family.order(state).items():
        if "{}" in pattern:
            parts |= {pattern.format(row): [one.clone()] for row, one in enumerate(state[ours])}
        else:
            parts.setdefault(pattern, []).append(state[ours])
    return {
        name: weave(ones) if family.is_woven(name) else torch.cat(ones) if len(ones) > 1 else ones[0]
        for name, ones in parts.items()
    }


def _write_adapter(
    staging: Path,
    config: DecoderConfig,
    adapter: AdapterConfig,
    state: Mapping[str, Tensor],
    base: Manifest | None,
) -> None:
    family, extras = find_names(config), {EXTRA_TENSORS[extra] for extra in adapter.also_train}
    own = _copy({name: one for name, one in state.items() if is_adapter_tensor(name) or name in extras})
    named = name_adapter_tensors_of_peft(own, family).items()
    _write_json(staging / ADAPTER_CONFIG_NAME, describe_adapter(config, adapter))
    belongs = {}
    if base is not None:
        kept = "nf4" if list_nf4_tensors(base) else "plain"
        belongs = {FINGERPRINT: fingerprint(base, DECODER_PREFIX), BASE_FORMAT: kept}
    tensors = {name: to_peft(one, own[one], family) for one, name in named}
    _write_tensors(staging / ADAPTER_WEIGHTS_NAME, tensors, belongs)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with staged_file(path) as file:
        try:
            save_file(whole, file, metadata={"format": "pt", **(metadata or {})})
        except SafetensorError as error:  # of a full disk, too
            raise OSError(f"{path} cannot be written: {error}") from None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(content, indent=2).encode() + b"\n")
