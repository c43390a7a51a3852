"""Imports a model in Hugging Face's layout: reads it strictly, commits it as a checkpoint, proves it, and renames it.

The result is a run's directory: `checkpoints/step-00000000` and, if it is imported, the tokenizer's files. Training
continues from the weights in another run, with the `recipe.yaml` next to them.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from rich.filesize import decimal
from torch import Tensor

from genesis.base.errors import UserError, blaming, numbered
from genesis.base.progress import Stage, stage
from genesis.base.run_directory import RunDirectory
from genesis.chat.learned import find_stop_ids
from genesis.export.dequantise import without_blocks
from genesis.export.hub import Download, describe_source
from genesis.export.proof import check_proof_memory, run_proof, write_proof
from genesis.export.recipe import write_recipe
from genesis.export.staging import check_is_new, check_space, staged
from genesis.export.tokenizer import compare_fast_tokenizer
from genesis.huggingface.directory import CONFIG_NAME, read_json
from genesis.huggingface.family import IMPORTED_AS, OUTPUT_WEIGHT, Family
from genesis.huggingface.mxfp4 import is_mxfp4
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import count_dropped, read_weights
from genesis.model.adapter import check_nf4, list_nf4_weights
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.initial import INIT_STD, fill_normal
from genesis.model.nf4 import quantise
from genesis.model.recipe import DECODER_PREFIX, dump_decoder_config
from genesis.tokenizer.fast_form import FAST_NAME
from genesis.tokenizer.files import write_files
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.panics import without_panics_printed
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.local_shards import local_shards
from genesis_callbacks.base.manifest import Ancestor
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, check_directory, read_file
from genesis_callbacks.checkpoint import (
    Ranks,
    RunMetadata,
    SaveTarget,
    Snapshot,
    save_blocking,
)
from genesis_callbacks.checkpoint.tagged_json import encode_tagged

_WIDENED_NAME: Final = "weights.float32"
_ALIKE_SHARE: Final = 0.01
"""Rows that were never trained differ by rounding and the optimizer's noise, all others by about their length."""


def read_tokenizer(directory: Path, config: DecoderConfig) -> Tokenizer:
    """Returns the tokenizer of a directory, after checking that it round-trips and equals the fast tokenizer there.

    Raises:
        UserError: The tokenizer cannot be imported.
    """
    remedy = "import the weights alone by --no_tokenizer"
    try:
        tokenizer = open_tokenizer(directory)
        fast = directory / FAST_NAME
        if fast.exists() and FAST_NAME not in tokenizer.files:
            content = read_file(fast, MAX_DOCUMENT_BYTES)
            with without_panics_printed(), blaming(fast, "remove it"):
                compare_fast_tokenizer(tokenizer, content, left_out=tokenizer.altered_characters)
    except UserError as error:
        raise UserError(f"{error}; or {remedy}") from None
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer in {directory} has {numbered(tokenizer.vocab_size, 'ids')}, but the model only "
            f"{config.vocab_size:,}; {remedy}"
        )
    return tokenizer


def import_directory(
    directory: Path,
    out: Path,
    *,
    has_tokenizer: bool,
    dtype: torch.dtype | None = torch.float32,
    is_nf4: bool = False,
    download: Download | None = None,
    compares_models: bool = True,
    is_whole: bool = False,
    has_new_head: bool = False,
) -> dict[str, Any]:
    """Creates the run's directory `out` with one committed checkpoint of a model's weights and returns the proof.

    The weights stay in mapped files, so that an import takes little memory. The comparison of logits loads the model,
    as float32, by transformers and then by us.

    Args:
        directory: A directory in Hugging Face's layout.
        out: The run's directory to create; it must not exist.
        has_tokenizer: Whether to import the tokenizer as well.
        dtype: The type of the checkpoint's weights: float32 to train all of them, bfloat16 for a base with adapters,
            whose routers stay in float32; None for bfloat16 if all weights of the files are in it, else float32.
        is_nf4: Whether the linear layers of the blocks are quantised to NF4, for a base of adapters in a quarter of the
            memory of bfloat16. All other weights keep their type, bfloat16 if all of them are, else float32.
        download: The download that `directory` comes from; the proof names its repository and commit.
        compares_models: Whether the proof compares logits and generated text in addition to weights and tokenizer.
        is_whole: Whether the proof leaves nothing out, however long it takes.
        has_new_head: Whether the checkpoint is a reward model: the output weight is replaced by one row of initial
            values, with which scores begin at random. Its dtype must be float32, in which the row can be trained.

    Raises:
        UserError: The model cannot be represented, the disk has too little space, or `out` exists.
        RunEndedError: The proof failed. No partial import is left.
    """
    check_is_new(out)
    try:
        check_directory(directory)  # transformers opens whatever it finds there
    except OSError as error:
        raise UserError(f"cannot read {error.filename} ({error.strerror}): remove it, or correct the path") from None
    # Of the user's own files, before weights in FP8 are copied, which may take hours.
    family, config = read_shape(directory)
    if has_new_head and (is_nf4 or dtype != torch.float32):
        raise UserError("a score head is trained in float32 alone: give --dtype float32 beside --as reward_model")
    if has_new_head and config.num_scores is not None:
        raise UserError(f"{directory} is a reward model already: leave out --as reward_model, which keeps its scores")
    tokenizer = read_tokenizer(directory, config) if has_tokenizer else None
    with blaming(directory / CONFIG_NAME, "correct its sizes"), torch.device("meta"):
        decoder = Decoder(config)
    if is_nf4:
        check_nf4(decoder)
    with without_blocks(directory, out) as plain:
        return _import_plain(
            *(plain, out, family, decoder, tokenizer),
            dtype=dtype,
            is_nf4=is_nf4,
            download=download,
            compares_models=compares_models,
            is_whole=is_whole,
            is_dequantised=plain != directory or is_mxfp4(read_json(directory / CONFIG_NAME)),
            has_new_head=has_new_head,
        )


def _import_plain(
    directory: Path,
    out: Path,
    family: Family,
    decoder: Decoder,
    tokenizer: Tokenizer | None,
    *,
    dtype: torch.dtype | None,
    is_nf4: bool,
    download: Download | None,
    compares_models: bool,
    is_whole: bool,
    is_dequantised: bool,
    has_new_head: bool,
) -> dict[str, Any]:
    config, kept = decoder.config, decoder.list_float32()
    found = read_weights(
        *(directory, config, family),
        scratch=out.parent if out.parent.is_dir() else None,
        check_size=lambda num_values: _check_size(num_values, out, compares_models=compares_models),
    )
    if has_new_head:
        found, config = _replace_head(found, config)
    quantised = set(list_nf4_weights(decoder)) if is_nf4 else set[str]()
    if is_nf4 or dtype is None:
        others = {tensor.dtype for name, tensor in found.items() if name not in kept | quantised}
        dtype = torch.bfloat16 if others == {torch.bfloat16} else torch.float32
    stays = {name: tensor for name, tensor in found.items() if name not in quantised}
    check_lossless(directory, {name: tensor for name, tensor in stays.items() if name not in kept}, dtype)
    num_bytes = sum(tensor.numel() for tensor in found.values()) * torch.float32.itemsize
    widened = {name: tensor for name, tensor in stays.items() if dtype == torch.float32 or name in kept}
    num_widened = sum(tensor.numel() for tensor in widened.values() if tensor.dtype != torch.float32)
    with staged(out, num_bytes + num_bytes // 10 + num_widened * torch.float32.itemsize) as staging:
        with stage("widening the weights", num_widened * torch.float32.itemsize, "bytes") as shown:
            state = stays | _widen(widened, staging / _WIDENED_NAME, shown)
        state |= _quantise({name: found[name] for name in found if name in quantised})
        if tokenizer is not None:
            write_files(tokenizer.files, staging)
        checkpoint = save_weights(
            *(state, config, tokenizer, RunDirectory(staging).checkpoints),
            imported_as=str(read_json(directory / CONFIG_NAME)["model_type"]),
        )
        del state
        (staging / _WIDENED_NAME).unlink(missing_ok=True)
        place = None if tokenizer is None else staging
        held = str(checkpoint.relative_to(staging))
        alike = {} if tokenizer is None or config.num_scores else count_alike_stops(found, tokenizer)
        write_recipe(out, staging, held, config, None if tokenizer is None else tokenizer.hash)
        proof = run_proof(
            *(directory, [checkpoint], place, "huggingface"),
            is_import=True,
            compares_models=compares_models,
            is_whole=is_whole,
        )
        proof |= {"left_out": count_dropped(directory, family), "is_dequantised": is_dequantised}
        proof |= describe_source(download) | {"alike_stops": {str(token): number for token, number in alike.items()}}
        write_proof(staging, proof)
    return proof


def _replace_head(state: Mapping[str, Tensor], config: DecoderConfig) -> tuple[dict[str, Tensor], DecoderConfig]:
    """Returns the tensors and the shape of a reward model with the blocks of a model that writes text."""
    head = torch.empty(1, config.dim, dtype=state["embedding.weight"].dtype)
    fill_normal(head, INIT_STD, f"0 {OUTPUT_WEIGHT}")
    return {**state, OUTPUT_WEIGHT: head}, replace(config, num_scores=1)


def _quantise(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that hold these weights in NF4, by their names."""
    state: dict[str, Tensor] = {}
    with stage("quantising the weights", len(weights), "tensors") as shown:
        for name, weight in shown.each(weights.items()):
            layer = name.removesuffix(".weight")
            state |= {f"{layer}.{tensor}": held for tensor, held in quantise(weight).items()}
    return state


def count_alike_stops(state: Mapping[str, Tensor], tokenizer: Tokenizer) -> dict[int, int]:
    """Returns how many other control symbols have the output weights of a symbol that ends an answer, where any has.

    Rows that pretraining never reached are alike, such as those that base models keep for later. Whatever an adapter
    learns gives such symbols one probability.

    Args:
        state: The decoder's tensors under its own names.
        tokenizer: The model's tokenizer.
    """
    head = state.get("output.weight", state["embedding.weight"])  # tied embeddings are one tensor
    controls = [token for token in range(tokenizer.vocab_size) if tokenizer.is_control(token)]
    rows = head[controls].float()
    found = {}
    for stop in sorted(find_stop_ids(tokenizer, None)):
        row = head[stop].float()
        is_alike = (rows - row).norm(dim=1) <= _ALIKE_SHARE * row.norm()
        found[stop] = sum(token != stop for token, alike in zip(controls, is_alike.tolist(), strict=True) if alike)
    return {stop: number for stop, number in found.items() if number}


def _check_size(num_values: int, out: Path, *, compares_models: bool) -> None:
    num_bytes = num_values * torch.float32.itemsize
    if compares_models:
        check_proof_memory(num_bytes)
    check_space(out, num_bytes + num_bytes // 10)


def check_lossless(directory: Path, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Checks that no weight is rounded.

    Raises:
        UserError: A weight has a type that `dtype` cannot represent exactly.
    """
    other = next((name for name, tensor in state.items() if tensor.dtype != dtype), None)
    if dtype != torch.float32 and other is not None:
        found, wanted = (str(one).removeprefix("torch.") for one in (state[other].dtype, dtype))
        raise UserError(f"{directory}: {other} is {found}, which --dtype {wanted} would round: leave --dtype out")


def _widen(state: Mapping[str, Tensor], path: Path, shown: Stage) -> dict[str, Tensor]:
    """Returns the tensors as float32. Those of another dtype become views of the mapped file `path`, which is created.

    A model of 8 B parameters takes 32 GB as float32. The system can write a mapped file back to disk to free memory.
    """
    narrow = {name: tensor for name, tensor in state.items() if tensor.dtype != torch.float32}
    if not narrow:
        return dict(state)
    total = sum(tensor.numel() for tensor in narrow.values())
    mapped = torch.from_file(str(path), shared=True, size=total, dtype=torch.float32)
    widened, start = dict(state), 0
    for name, tensor in narrow.items():
        place = mapped[start : start + tensor.numel()].view(tensor.shape)
        widened[name] = place.copy_(tensor)
        start += tensor.numel()
        shown.advance(tensor.numel() * torch.float32.itemsize)
    return widened


def save_weights(
    state: Mapping[str, Tensor],
    config: DecoderConfig,
    tokenizer: Tokenizer | None,
    checkpoints: Path,
    ancestor: Ancestor | None = None,
    imported_as: str | None = None,
) -> Path:
    """Commits a checkpoint of step 0 with the decoder's weights alone and returns its directory.

    Args:
        state: The decoder's tensors under its own names.
        config: The decoder's shape.
        tokenizer: The model's tokenizer; None if it has none.
        checkpoints: The directory of checkpoints to create.
        ancestor: The checkpoint that the weights come from; None if there is none.
        imported_as: The `model_type` of the files that the weights are imported from; None if they are not imported.
    """
    checkpoints.mkdir()
    identity = {} if tokenizer is None else {"tokenizer_hash": tokenizer.hash}
    if imported_as is not None:
        identity[IMPORTED_AS] = imported_as
    origin = RunMetadata(identity, {"model": {"decoder": dump_decoder_config(config)}})
    parts = [
        part for name, tensor in state.items() for part in local_shards(DECODER_PREFIX + name, tensor, "parameter")
    ]
    section, _ = encode_tagged(_begin_trainer_state(), "state.0")
    target = SaveTarget(checkpoints, Ranks(), origin=origin)
    target.continue_from(ancestor, sequence=0)
    with stage(f"writing the checkpoint, {decimal(sum(tensor.nbytes for tensor in state.values()))}"):
        return save_blocking(target, lambda: Snapshot(0, {"step": 0}, parts, section, has_optimizer=False))


def _begin_trainer_state() -> dict[str, Any]:
    """Returns the state, other than tensors, of a trainer that has not trained yet."""
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
