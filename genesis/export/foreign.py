"""Imports and exports a model of transformers as it is, for `genesis.model.foreign`: its own classes read and write it.

Files are read by our checked readers first. Each way ends with a proof: the directory is opened by transformers, every
tensor is compared bit for bit, and logits with those of the model that trains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from genesis.base.errors import RunEndedError, UserError, blaming, numbered
from genesis.base.progress import stage
from genesis.base.run_directory import RunDirectory
from genesis.export.hub import Download, describe_source
from genesis.export.importing import check_lossless, read_tokenizer, save_weights
from genesis.export.proof import check_proof_memory, write_proof
from genesis.export.recipe import write_recipe
from genesis.export.staging import check_is_new, staged
from genesis.export.tensors import Source, iterate_blocks
from genesis.export.theirs import leave_out, load_model
from genesis.huggingface.directory import CONFIG_NAME, read_json, reads_directory
from genesis.huggingface.weights import iterate_pieces, iterate_tensors, read_file_names
from genesis.model.decoder import DecoderConfig, build_model
from genesis.model.foreign.config import PREFIX, TransformersConfig
from genesis.model.foreign.decoder import TransformersDecoder, choose_auto, find_shape, own_logits, read_config
from genesis.model.language_model import project
from genesis.model.recipe import DECODER_PREFIX
from genesis.tokenizer.files import write_files
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import check_directory
from genesis_callbacks.checkpoint import read_manifest
from genesis_callbacks.checkpoint.restore import read_recorded_tensors

_TOLERANCE: Final = 1e-4
"""Of the largest logit, in float32."""
_PROOF_TOKENS: Final = 64
_MOST_MISSING: Final = 1 << 24
"""Values of parameters that no file need have, such as tied ones of a small model."""
_MOST_BUFFERED: Final = 1 << 29
"""Values of tables that no file has: rotary frequencies, or a causal mask for each layer, as GPT-Neo has."""
_SEED: Final = 20


@reads_directory
def import_foreign(
    directory: Path,
    out: Path,
    *,
    has_tokenizer: bool,
    dtype: torch.dtype = torch.float32,
    download: Download | None = None,
) -> dict[str, Any]:
    """Creates the run's directory `out` with a committed checkpoint of a model of transformers, and returns the proof.

    The recipe gives each document a row of its own if the model cannot keep packed documents apart.

    Args:
        directory: A directory in Hugging Face's layout.
        out: The run's directory to create; it must not exist.
        has_tokenizer: Whether to import the tokenizer as well.
        dtype: The type of the checkpoint's weights, as in `import_directory`.
        download: The download that `directory` comes from.

    Raises:
        UserError: The model cannot be trained, its files are damaged, or `out` exists.
        RunEndedError: The proof failed. No partial import is left.
    """
    check_is_new(out)
    with blaming(directory, "remove the file, or correct the path"):
        check_directory(directory)  # transformers opens whatever it finds there
    with blaming(directory / CONFIG_NAME, "correct it"):
        given = leave_out(read_json(directory / CONFIG_NAME))
    config = _describe(given, directory)
    tokenizer = read_tokenizer(directory, config) if has_tokenizer else None
    read = _read_files(directory)
    _check_size(directory, config, [tensor.numel() for tensor in read.values()])
    num_bytes = sum(tensor.numel() for tensor in read.values()) * torch.float32.itemsize
    check_proof_memory(2 * num_bytes)
    with stage("opening the model by transformers"):
        theirs, report = load_model(directory, choose_auto(read_config(given)))
    _check_report(directory, report)
    found = {f"{PREFIX}{name}": tensor for name, tensor in theirs.state_dict().items()}
    config = _choose_documents(config, found)
    with torch.device("meta"):
        model = build_model(config)
    kept = model.list_float32()
    check_lossless(directory, {name: one for name, one in read.items() if f"{PREFIX}{name}" not in kept}, dtype)
    state = {
        name: found[name].to(dtype if found[name].is_floating_point() and name not in kept else found[name].dtype)
        for name in model.state_dict()
    }
    with staged(out, num_bytes + num_bytes // 10) as staging:
        proof = _prove(config, found, theirs, sum(tensor.numel() for tensor in state.values()))
        if tokenizer is not None:
            write_files(tokenizer.files, staging)
        checkpoint = save_weights(
            {name: tensor.contiguous() for name, tensor in state.items()},
            *(config, tokenizer, RunDirectory(staging).checkpoints),
            imported_as=str(given["model_type"]),
        )
        _compare_weights(checkpoint, state, read)
        held = str(checkpoint.relative_to(staging))
        write_recipe(out, staging, held, config, None if tokenizer is None else tokenizer.hash)
        proof |= describe_source(download)
        write_proof(staging, proof)
    return proof


def _describe(given: Mapping[str, Any], directory: Path) -> DecoderConfig:
    with blaming(directory / CONFIG_NAME, "correct it"):
        theirs = read_config(given)
        # With every default of this version, so that another version reads the same model.
        whole = load_json(theirs.to_json_string(use_diff=False))
        body = TransformersConfig(leave_out(whole))
        return DecoderConfig(**find_shape(theirs)._asdict(), body=body)


@reads_directory
def _read_files(directory: Path) -> dict[str, Tensor]:
    """Returns the tensors of the files, views of mapped files, after checking all headers and values."""
    read = dict(iterate_tensors(directory, read_file_names(directory)))
    for name, tensor in read.items():
        is_quantised = tensor.element_size() == 1 and tensor.dtype != torch.bool
        if is_quantised or not all(bool(piece.isfinite().all()) for piece in iterate_pieces(tensor)):
            raise UserError(
                f"{directory}: {name} is {str(tensor.dtype).removeprefix('torch.')} or has values that are not "
                "finite, and weights must be finite, in float32, bfloat16 or float16: dequantise the model by "
                "transformers, and save it again"
            )
    return read


def _check_size(directory: Path, config: DecoderConfig, sizes: Sequence[int]) -> None:
    """Compares the size of the model that config.json describes with the files, before transformers allocates it.

    Twice as many values are let pass, and fail by their names.
    """
    assert isinstance(config.body, TransformersConfig)
    if config.num_layers > len(sizes):  # before layers are built, which takes time for each
        raise UserError(
            f"{directory}: config.json describes a model of {numbered(config.num_layers, 'layers')}, and the files "
            f"have {numbered(len(sizes), 'tensors')}: correct one of them"
        )
    with torch.device("meta"):
        model = build_model(replace(config, body=replace(config.body, documents="rows")))
    num_values = sum(sizes)
    num_described, num_buffered = (
        sum(one.numel() for one in tensors) for tensors in (model.parameters(), model.buffers())
    )
    if num_described > 2 * num_values + _MOST_MISSING or num_buffered > 2 * num_values + _MOST_BUFFERED:
        raise UserError(
            f"{directory}: config.json describes a model of {numbered(num_described + num_buffered, 'values')}, and "
            f"the files have {num_values:,}: correct one of them"
        )


def _check_report(directory: Path, report: Mapping[str, Any]) -> None:
    """Refuses files with tensors that the model lacks, or without some that it has."""
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report.get(what):
            first = sorted(map(str, report[what]))[0]
            raise UserError(
                f"{directory}: transformers reports {what.replace('_', ' ')}, such as {first}: the files are of "
                "another model than config.json, correct one of them"
            )


def _compare_weights(checkpoint: Path, state: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    """Compares the tensors of a checkpoint with those of transformers' model, and with the files' of the same names.

    Raises:
        RunEndedError: A value differs.
    """
    manifest = read_manifest(checkpoint)
    with stage("comparing the weights", len(state), "tensors") as shown:
        for name, tensor in shown.each(state.items()):
            (held,) = read_recorded_tensors(checkpoint, manifest, [DECODER_PREFIX + name]).values()
            of_file = read.get(name.removeprefix(PREFIX))  # transformers renames and stacks some
            is_of_file = of_file is None or torch.equal(of_file.to(tensor.dtype), tensor)
            if not (torch.equal(held, tensor) and is_of_file):
                raise RunEndedError(f"the values of {name} differ from those of the files, and the result was removed")


def _fill(config: DecoderConfig, state: Mapping[str, Tensor]) -> TransformersDecoder:
    with torch.device("meta"):
        model = build_model(config)
    assert isinstance(model, TransformersDecoder)
    model.load_state_dict({name: state[name] for name in model.state_dict()}, assign=True)
    model.fill_buffers()
    return model.eval()


def _choose_documents(config: DecoderConfig, state: Mapping[str, Tensor]) -> DecoderConfig:
    """Returns the configuration with one row for each document if packed documents are not kept apart."""
    length = min(_PROOF_TOKENS, config.max_seq_len)
    assert isinstance(config.body, TransformersConfig)
    try:
        _fill(config, state).prove(length)
    except UserError:
        config = replace(config, body=replace(config.body, documents="rows"))
        _fill(config, state).prove(length)
    return config


@torch.no_grad()
def _prove(config: DecoderConfig, state: Mapping[str, Tensor], theirs: Any, num_values: int) -> dict[str, Any]:
    """Returns the results of comparing logits with those of transformers' own model."""
    length = min(_PROOF_TOKENS, config.max_seq_len)
    ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(_SEED))
    model = _fill(config, state)
    wanted = theirs.eval()(input_ids=ids, use_cache=False).logits
    gaps = [float((model(ids, head=head) - wanted).abs().max()) for head in (project, own_logits)]
    allowed = _TOLERANCE * float(wanted.abs().max())
    if not max(gaps) <= allowed:
        raise RunEndedError(
            f"the logits differ from those of transformers by {max(gaps):.2g}, more than {allowed:.2g}, and the result "
            "was removed: report this model"
        )
    assert isinstance(config.body, TransformersConfig)
    return {
        "documents": config.body.documents,
        "weights": {"num_values": num_values},
        "logits": {
            "num_tokens": length,
            "largest_logit": float(wanted.abs().max()),
            "largest_difference": max(gaps),
            "tolerance": allowed,
        },
    }


def build_theirs(config: DecoderConfig, state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Any:
    """Returns transformers' own model with weights.

    Args:
        config: The model.
        state: The tensors by our names.
        dtype: The type of the weights.
    """
    assert isinstance(config.body, TransformersConfig)
    described = read_config(config.body.config)
    theirs = choose_auto(described).from_config(described, dtype=dtype, trust_remote_code=False)
    theirs.load_state_dict({name.removeprefix(PREFIX): tensor for name, tensor in state.items()}, strict=False)
    theirs.tie_weights()
    return theirs


def write_foreign(
    sources: Sequence[Source],
    config: DecoderConfig,
    staging: Path,
    *,
    dtype: torch.dtype,
    max_file_bytes: int,
    ids: Mapping[str, int | None],
) -> dict[str, Any]:
    """Writes a model of transformers by its own `save_pretrained` into a directory, and returns the proof.

    Args:
        sources: The checkpoints; several mean their average, and adapters are merged.
        config: The model.
        staging: The directory, which exists.
        dtype: The type of the weights.
        max_file_bytes: Size limit of a weights file.
        ids: The named tokens of the tokenizer that it was trained with, by transformers' keys; None for none.

    Raises:
        RunEndedError: What transformers reads is not what was written.
    """
    with torch.device("meta"):
        model = build_model(config)
    kept, described = model.list_float32(), model.state_dict()
    num_bytes = sum(tensor.numel() for tensor in described.values()) * torch.float32.itemsize
    check_proof_memory(3 * num_bytes)
    state = {}
    with stage("reading the weights", num_bytes, "bytes") as shown:
        for name, tensor in described.items():
            of_name = torch.float32 if name in kept else dtype if tensor.is_floating_point() else tensor.dtype
            blocks = list(iterate_blocks(sources, DECODER_PREFIX + name, of_name))
            state[name] = torch.cat(blocks).view(tensor.shape)
            shown.advance(tensor.numel() * torch.float32.itemsize)
    theirs = build_theirs(config, state, dtype)
    theirs.config.update({key: token for key, token in ids.items() if token is not None})
    theirs.save_pretrained(staging, max_shard_size=max_file_bytes)
    read, report = load_model(staging, choose_auto(theirs.config))
    _check_report(staging, report)
    again = read.state_dict()
    for name, tensor in state.items():
        if not torch.equal(again[name.removeprefix(PREFIX)], tensor.to(again[name.removeprefix(PREFIX)].dtype)):
            raise RunEndedError(f"{name} is another tensor when transformers reads it, and the result was removed")
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    return _prove(config, wide, read, sum(tensor.numel() for tensor in state.values()))
