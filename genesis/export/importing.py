"""Imports a Llama of Hugging Face's: read strictly, committed as a checkpoint of the engine, proved, then named.

The directory that it makes is a run's: `checkpoints/step-00000000` and, where it is taken over, `tokenizer.model`.
Training goes on from its weights in another run, by the `recipe.yaml` beside them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from genesis.errors import UserError
from genesis.export.proof import run_proof, write_proof
from genesis.export.recipe import write_recipe
from genesis.export.staging import check_is_new, staged
from genesis.export.tokenizer import compare_tokenizers
from genesis.model.decoder import DecoderConfig
from genesis.model.huggingface_files import DECODER_PREFIX, read_llama_config, read_weights
from genesis.tokenizer.tokenizer import Tokenizer
from genesis.tokenizer.train import MODEL_NAME
from genesis_callbacks.checkpoint import Origin, Ranks, SaveTarget, Snapshot, local_parts, save_blocking
from genesis_callbacks.checkpoint.lineage import CHECKPOINTS_NAME
from genesis_callbacks.checkpoint.tagged_json import encode_tagged


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
    state = {name: tensor.to(torch.float32) for name, tensor in read_weights(directory, config).items()}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    with staged(out, num_bytes + num_bytes // 10) as staging:
        if tokenizer is not None:
            (staging / MODEL_NAME).write_bytes(tokenizer.model)
        checkpoint = _save(state, config, tokenizer, staging / CHECKPOINTS_NAME)
        model = None if tokenizer is None else staging / MODEL_NAME
        held = str(checkpoint.relative_to(staging))
        write_recipe(out, staging, held, config, None if tokenizer is None else tokenizer.hash)
        proof = run_proof(directory, [checkpoint], model, "huggingface", is_import=True)
        write_proof(staging, proof)
    return proof


def _save(state: Mapping[str, Tensor], config: DecoderConfig, tokenizer: Tokenizer | None, checkpoints: Path) -> Path:
    checkpoints.mkdir()
    identity = {} if tokenizer is None else {"tokenizer_hash": tokenizer.hash}
    origin = Origin(identity, {"model": {"decoder": asdict(config)}})
    parts = [part for name, tensor in state.items() for part in local_parts(DECODER_PREFIX + name, tensor, "parameter")]
    section, _ = encode_tagged(_begin_trainer_state(), "state.0")
    target = SaveTarget(checkpoints, Ranks(), origin=origin)
    return save_blocking(target, lambda: Snapshot(0, {"step": 0}, parts, section, has_optimizer=False))


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
