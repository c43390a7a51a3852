"""The proof of exported adapters: a separate process that loads them with PEFT and compares them with the checkpoint.

weights      every tensor in the directory equals, bit for bit, the checkpoint's tensor cast to its dtype
tokenizer    equal ids and decoded text, as in the proof of a whole model
logits       of transformers' model with PEFT and our decoder with its adapters, both in float32, on random tokens
"""

import json
import platform
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from genesis.base.errors import UserError
from genesis.base.progress import sent_as_lines, stage
from genesis.export.foreign import build_theirs
from genesis.export.proof import answer_request
from genesis.export.proof_size import plan_proof
from genesis.export.prove import PACKAGES, count_parameters, prove_tokenizer
from genesis.export.theirs import load_model
from genesis.generate.load import load_decoder
from genesis.huggingface.directory import CONFIG_NAME
from genesis.huggingface.directory import WEIGHTS_NAME as BASE_NAME
from genesis.huggingface.family import TensorNames
from genesis.huggingface.peft import (
    WEIGHTS_NAME,
    name_adapter_tensor,
    name_adapter_tensors_of_peft,
    name_tied_output,
    to_peft,
)
from genesis.huggingface.shape import find_family, find_names, write_shape
from genesis.huggingface.stored import list_weights, read_stored
from genesis.model.adapter import is_adapter_tensor
from genesis.model.decoder import DecoderConfig
from genesis.model.language_model import LanguageModel
from genesis.model.recipe import DECODER_PREFIX, build_decoder_config
from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.checkpoint import read_manifest, read_tensors

RELATIVE_TOLERANCE = 1e-4
"""Largest allowed difference, relative to the largest logit: the effect of another summation order in float32."""
_NUM_SEQUENCES = 4
_SEQUENCE_TOKENS = 64


def main(argv: Sequence[str]) -> int:
    """Runs the proof for the request, JSON in the first argument; prints the results as one line of JSON."""
    with sent_as_lines():
        return answer_request(argv, _prove)


def _prove(request: dict[str, Any]) -> dict[str, Any]:
    directory, checkpoint, base = (Path(request[name]) for name in ("directory", "checkpoint", "base"))
    manifest = read_manifest(checkpoint)
    config = build_decoder_config(manifest.recipe["model"]["decoder"], where=f"the recipe in {checkpoint}")
    family = find_names(config)
    held, dtype = _compare_weights(directory, checkpoint, family)
    tokenizer = None if request["tokenizer"] is None else open_tokenizer(request["tokenizer"])
    packages = (*PACKAGES, "peft", *(() if tokenizer is None else tokenizer.packages))
    result: dict[str, Any] = {
        "weights": held,
        "versions": {"python": platform.python_version()} | {package: version(package) for package in packages},
    }
    if tokenizer is not None:
        size = plan_proof(count_parameters(manifest), 0, is_whole=request["is_whole"])
        result["tokenizer"] = prove_tokenizer(directory, tokenizer, is_import=False, size=size)
    if not request["compares_models"]:
        return result
    with stage("loading genesis's model"):
        decoder = load_decoder(checkpoint, dtype=torch.float32, allows_body=True).model
    for parameter in decoder.parameters():
        if parameter.requires_grad:  # rounded to the dtype of the file
            parameter.data = parameter.data.to(dtype).float()
    return result | {"logits": _compare_logits(directory, base, decoder, config)}


def _compare_weights(directory: Path, checkpoint: Path, family: TensorNames) -> tuple[dict[str, Any], torch.dtype]:
    theirs = load_file(directory / WEIGHTS_NAME)
    tied = name_tied_output(family)
    own = [name for name in read_manifest(checkpoint).own_tensors if name.startswith(DECODER_PREFIX)]
    held = read_tensors(checkpoint, own)
    named = {name.removeprefix(DECODER_PREFIX): tensor for name, tensor in held.items()}
    names = name_adapter_tensors_of_peft(named.keys(), family)
    ours = {names[name]: to_peft(name, tensor, family) for name, tensor in named.items()}
    missing = {names[name] for name in named if is_adapter_tensor(name)} - theirs.keys()
    if tied in theirs and tied not in ours:
        ours[tied] = ours[name_adapter_tensor("embedding.weight", family)]
    if missing or not theirs.keys() <= ours.keys():
        raise UserError(f"the file has other tensors than the checkpoint, such as {min(missing or theirs.keys())}")
    with stage("comparing the weights", len(theirs), "tensors") as shown:
        for name, tensor in shown.each(theirs.items()):
            if not torch.equal(ours[name].to(tensor.dtype), tensor):
                raise UserError(f"the values of {name} differ from the checkpoint's")
    num_values = sum(tensor.numel() for tensor in theirs.values())
    compared = {"compared": "every value, bit for bit, after the cast", "num_values": num_values, "num_different": 0}
    return compared, next(iter(theirs.values())).dtype


def _build_theirs(base: Path, config: DecoderConfig) -> Any:
    """Returns transformers' model with the weights of a base.

    Raises:
        UserError: transformers has other tensors.
    """
    manifest = read_manifest(base)
    ours = read_stored(base, manifest, list_weights(manifest)).items()
    held = {name.removeprefix(DECODER_PREFIX): tensor for name, tensor in ours}
    if config.body is not None:
        return build_theirs(config, held)
    family = find_family(config)
    renamed = family.to_theirs(held)
    state = {name: tensor.float().contiguous() for name, tensor in renamed.items()}
    # By a directory, because transformers stacks the weights of experts only while it loads files.
    with TemporaryDirectory() as directory:
        save_file(state, Path(directory, BASE_NAME), metadata={"format": "pt"})
        Path(directory, CONFIG_NAME).write_text(json.dumps(write_shape(family, config)), encoding="utf-8")
        model, loaded = load_model(Path(directory))
    left = [name for name in loaded["missing_keys"] if not (config.has_tied_embeddings and name == "lm_head.weight")]
    unexpected = [*left, *loaded["unexpected_keys"]]
    if unexpected:
        raise UserError(f"transformers has other tensors than the base, such as {unexpected[0]}")
    return model


def _compare_logits(directory: Path, base: Path, decoder: LanguageModel, config: DecoderConfig) -> dict[str, Any]:
    with stage("loading transformers' model with PEFT"), warnings.catch_warnings():
        model = _build_theirs(base, config)
        warnings.simplefilter("error", RuntimeWarning)  # PEFT warns if the config and the file name different layers
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        adapted: Any = PeftModel.from_pretrained(model, str(directory)).eval()
    length = min(_SEQUENCE_TOKENS, config.max_seq_len)
    ids = torch.randint(config.vocab_size, (_NUM_SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), stage("logits of PEFT, of genesis, and of the base", 3, "forwards") as shown:
        theirs = adapted(input_ids=ids).logits.float()
        shown.advance()
        ours = decoder(ids)
        shown.advance()
        with adapted.disable_adapter():
            without = adapted(input_ids=ids).logits.float()
        shown.advance()
    largest, difference = float(theirs.abs().max()), float((ours - theirs).abs().max())
    tolerance = RELATIVE_TOLERANCE * max(1.0, largest)
    if not difference <= tolerance:
        raise UserError(f"logits differ by {difference:.3g}, more than the rounding tolerance {tolerance:.3g}")
    return {
        "compared": "peft and genesis in float32, the adapters from this directory",
        "num_sequences": _NUM_SEQUENCES,
        "num_tokens": ids.numel(),
        "largest_logit": largest,
        "largest_difference": difference,
        "tolerance": tolerance,
        "largest_change_by_the_adapters": float((theirs - without).abs().max()),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
