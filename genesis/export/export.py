"""Exports checkpoints: verifies them, streams them into a staging directory, proves it, and renames it at the end."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from genesis.base.errors import UserError
from genesis.export.adapter import read_adapter
from genesis.export.card import describe_reading, describe_scores, write_card
from genesis.export.proof import (
    Layout,
    check_proof_memory,
    run_proof,
    write_proof,
)
from genesis.export.reading import check_choice, find_reading, write_generation_config, write_tokenizer
from genesis.export.staging import check_is_new, staged
from genesis.export.tensors import DTYPES, GGUF_KINDS, Source, count_bytes, plan_files, write_weights
from genesis.generate.checkpoint_reference import verify_shown
from genesis.generate.load import build_empty_decoder
from genesis.huggingface.directory import (
    CARD_NAME,
    CONFIG_NAME,
    DECODER_NAME,
    hash_files,
)
from genesis.huggingface.family import Family
from genesis.huggingface.shape import find_family, write_shape
from genesis.huggingface.stored import list_weights
from genesis.model.adapter import is_adapter_tensor
from genesis.model.decoder import DecoderConfig
from genesis.model.recipe import DECODER_PREFIX, build_decoder_config, dump_decoder_config, read_adapter_config

OTHER_BYTES = 64 << 20
"""Upper bound for the size of all files other than weights."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Args:
        layout: `huggingface` for transformers, `safetensors` for our own names, `gguf` for llama.cpp.
        dtype: The type of the weights in the files: a name in `DTYPES`, or in `GGUF_KINDS` for a GGUF file.
        max_file_bytes: Size limit of a weights file; a single larger tensor gets a file of its own.
        tokenizer: Tokenizer file or directory; None for the checkpoint's own tokenizer.
        may_be_unproved: Whether to accept a `tokenizer` whose hash differs from the run's; proof and card report this.
        is_merged: Whether the checkpoint's adapters are merged into the weights of their base.
        compares_models: Whether the proof compares logits and generated text in addition to weights and tokenizer.
        is_whole: Whether the proof leaves nothing out, however long it takes.
    """

    layout: Layout = "huggingface"
    dtype: str = "float32"
    max_file_bytes: int = 5_000_000_000
    tokenizer: Path | None = None
    may_be_unproved: bool = False
    is_merged: bool = False
    compares_models: bool = True
    is_whole: bool = False

    def __post_init__(self) -> None:
        known = GGUF_KINDS if self.layout == "gguf" else DTYPES
        if self.dtype not in known:
            raise UserError(f"dtype is {self.dtype!r}: it must be one of {', '.join(known)}")
        if self.max_file_bytes < 1:
            raise UserError(f"max_file_bytes is {self.max_file_bytes}: it must be at least 1")
        check_choice(self.tokenizer, may_be_unproved=self.may_be_unproved)


def export_checkpoints(checkpoints: Sequence[Path], out: Path, options: ExportOptions) -> dict[str, Any]:
    """Writes the directory `out` from one checkpoint, or the mean of several, and returns the proof.

    Peak memory is a few blocks of rows for any model size; the proof runs in its own process.

    Args:
        checkpoints: Committed checkpoints; the last one provides card, shape and tokenizer.
        out: The directory to create; it must not exist.
        options: The options.

    Raises:
        UserError: A checkpoint does not verify, the checkpoints are of different models, the disk or the memory is too
            small, `out` exists, or the tokenizer is not the run's or has no exact fast form. No partial export is left.
        RunEndedError: The proof failed. No partial export is left.
    """
    check_is_new(out)
    sources = [open_source(path, is_merged=options.is_merged, is_alone=len(checkpoints) == 1) for path in checkpoints]
    config = read_config(sources)
    is_foreign = config.body is not None
    if is_foreign and options.layout != "huggingface":
        raise UserError("the model is of transformers, which alone reads and writes it: leave out --format safetensors")
    if is_foreign and (options.is_whole or not options.compares_models):
        raise UserError("--proof is of models of the decoder of Genesis: leave it out, all tensors are compared")
    family = find_family(config) if options.layout == "huggingface" and not is_foreign else None
    names = name_tensors(sources, family)
    dtype = DTYPES[options.dtype]
    manifest = sources[-1].manifest
    path, given = sources[-1].path, options.tokenizer
    reading = find_reading(path, manifest, config.vocab_size, given, may_be_unproved=options.may_be_unproved)
    if options.compares_models and family is not None:
        # Of a merged model, the proof also holds the base beside its adapters.
        check_proof_memory(count_bytes(names, manifest, torch.float32) * (2 if options.is_merged else 1))
    with staged(out, count_bytes(names, manifest, dtype) + OTHER_BYTES) as staging:
        tokenizer, form = reading.tokenizer, write_tokenizer(reading, config, options.layout, staging)
        if is_foreign:
            proof: dict[str, Any] = import_module("genesis.export.foreign").write_foreign(
                *(sources, config, staging), dtype=dtype, max_file_bytes=options.max_file_bytes, ids=reading.ids
            )
            write_generation_config(reading, staging)
        elif family is not None:
            ids = reading.ids if config.num_scores is None else reading.ids_of_scores
            _write_json(staging / CONFIG_NAME, {**write_shape(family, config), **ids, "dtype": options.dtype})
            if config.num_scores is None:
                write_generation_config(reading, staging)
        else:
            _write_json(staging / DECODER_NAME, dump_decoder_config(config))
        if not is_foreign:
            woven = frozenset(name for name in names.values() if family is not None and family.is_woven(name))
            files = plan_files(names, manifest, dtype, options.max_file_bytes, woven)
            write_weights(staging, files, sources, dtype)
        described = describe_reading(tokenizer, staging) if tokenizer and form == "huggingface" else ""
        if config.num_scores is not None and options.layout == "huggingface":
            described = " ".join(filter(None, (described, describe_scores(reading))))
        card = write_card(out.name, sources, config, options.dtype, options.layout, reading.origin, form, described)
        # A recipe may contain a path with bytes that are not valid UTF-8, which no text file can contain.
        (staging / CARD_NAME).write_text(card, encoding="utf-8", errors="backslashreplace")
        place = None if tokenizer is None else staging
        paths = [source.path for source in sources]
        if not is_foreign:
            proof = run_proof(
                *(staging, paths, place, options.layout),
                compares_models=options.compares_models,
                is_whole=options.is_whole,
                is_merged=options.is_merged,
            )
        proof |= {"tokenizer_origin": reading.origin, "tokenizer_form": form}
        proof["files"] = hash_files(staging)
        write_proof(staging, proof)
    return proof


def open_source(checkpoint: Path, *, is_merged: bool, is_alone: bool) -> Source:
    """Returns a verified checkpoint. It has adapters exactly if the options merge them.

    Raises:
        UserError: The checkpoint has adapters but `is_merged` is false, or it has none but `is_merged` is true.
    """
    manifest = verify_shown(checkpoint)
    if not is_merged:
        if read_adapter_config(manifest.recipe, where=f"the recipe in {checkpoint}") is not None:
            raise UserError(
                f"{checkpoint} holds adapters beside a base: give --adapter for the adapters in PEFT's format, or "
                "--merge for the whole model"
            )
        return Source(checkpoint, manifest)
    if not is_alone:
        raise UserError("--merge takes one checkpoint: a mean of adapters is no adapter")
    return Source(checkpoint, manifest, read_adapter(manifest, checkpoint).scaling)


def read_config(sources: Sequence[Source]) -> DecoderConfig:
    """Returns the shape that all checkpoints have.

    Raises:
        UserError: They have different shapes or tokenizers.
    """
    configs = []
    for source in sources:
        model = source.manifest.recipe.get("model")
        shape = model.get("decoder") if isinstance(model, dict) else None
        configs.append(build_decoder_config(shape, where=f"the recipe in {source.path}"))
        num_tensors = sum(name.startswith(DECODER_PREFIX) for name in source.manifest.tensors)
        if configs[-1].body is None:
            build_empty_decoder(configs[-1], num_tensors, source.path)
    tokenizers = {source.manifest.identity.get("tokenizer_hash") for source in sources}
    if any(config != configs[0] for config in configs) or len(tokenizers) > 1:
        raise UserError(
            f"{sources[0].path} and {sources[-1].path} have different shapes or tokenizers: average only checkpoints "
            "of one model"
        )
    return configs[-1]


def name_tensors(sources: Sequence[Source], family: Family | None) -> dict[str, str]:
    """Returns canonical name to name in the files, in the checkpoint's order of names."""
    held = [sorted(name for name in list_weights(source.manifest) if not is_adapter_tensor(name)) for source in sources]
    if not held[0] or any(names != held[0] for names in held):
        raise UserError(f"{sources[0].path} has no decoder, or another one than {sources[-1].path}")
    short = {name: name.removeprefix(DECODER_PREFIX) for name in held[0]}
    if family is None:
        return short
    return {DECODER_PREFIX + ours: pattern for ours, pattern in family.order(short.values()).items()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
