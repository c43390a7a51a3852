"""Writes a GGUF file, which llama.cpp and programs that are built on it read: weights, tokenizer and chat template.

The weights are streamed, some rows at a time, where the file has them in the checkpoint's order.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from gguf import (
    GGML_QUANT_VERSION,
    GGMLQuantizationType,
    GGUFType,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    quantize,
)
from numpy.typing import NDArray
from torch import Tensor

from genesis.base.errors import UserError, numbered
from genesis.base.progress import stage
from genesis.chat.learned import find_stop_ids
from genesis.chat.options import ChatOptions
from genesis.chat.render import open_template
from genesis.export.card import write_card
from genesis.export.export import OTHER_BYTES, ExportOptions, name_tensors, open_source, read_config
from genesis.export.gguf_layout import (
    StoredTensor,
    count_stored_bytes,
    describe_model,
    find_architecture,
    plan_tensors,
    rotary_factors,
)
from genesis.export.gguf_tokenizer import GgufTokenizer, describe_tokenizer
from genesis.export.proof import (
    PROVE_GGUF_MODULE,
    PROVE_LLAMA_CPP_MODULE,
    check_proof_memory,
    run_proof_of,
    write_proof,
)
from genesis.export.reading import Reading, find_reading
from genesis.export.staging import check_is_new, staged
from genesis.export.tensors import Source, count_bytes, iterate_blocks
from genesis.huggingface.directory import CARD_NAME, hash_files
from genesis.huggingface.family import Family
from genesis.huggingface.shape import find_family
from genesis.huggingface.stored import list_weights
from genesis.model.adapter import is_adapter_tensor
from genesis.model.decoder import DecoderConfig
from genesis.model.describe import describe
from genesis.model.scores import refuse_scores
from genesis.tokenizer.files import write_files
from genesis_callbacks.base.manifest import read_committed_hash

_PLAIN: Final = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_LARGEST: Final = 65_504.0
"""The largest scale of a block, which is a float16."""


def export_gguf(checkpoints: Sequence[Path], out: Path, options: ExportOptions) -> dict[str, Any]:
    """Writes the directory `out` with a GGUF file of one checkpoint, or the mean of several, and returns the proof.

    Args:
        checkpoints: Committed checkpoints; the last one provides card, shape and tokenizer.
        out: The directory to create; it must not exist.
        options: The options; `dtype` is the type of the matrices.

    Raises:
        UserError: As `export_checkpoints` raises it; or llama.cpp does not have the model or the tokenizer. No partial
            export is left.
        RunEndedError: The proof failed. No partial export is left.
    """
    check_is_new(out)
    sources = [open_source(path, is_merged=options.is_merged, is_alone=len(checkpoints) == 1) for path in checkpoints]
    config = read_config(sources)
    if config.body is not None:
        raise UserError(
            "the model is of transformers, and no GGUF is written of it: leave out --gguf, and give the export to "
            "llama.cpp's convert_hf_to_gguf.py"
        )
    refuse_scores(config, sources[-1].path)
    family = find_family(config)
    name_tensors(sources, family)
    planned = plan_file(sources, family, config, options.dtype)
    last = sources[-1]
    reading = find_reading(
        last.path, last.manifest, config.vocab_size, options.tokenizer, may_be_unproved=options.may_be_unproved
    )
    described = describe_reading(reading, config)
    assert reading.tokenizer is not None, "or there is no description of it"
    asks_llama_cpp = options.compares_models and find_spec("xllamacpp") is not None
    if asks_llama_cpp:  # ours, and the file in llama.cpp
        names = {stored.ours: stored.name for stored in planned if stored.ours is not None}
        check_proof_memory(2 * count_bytes(names, last.manifest, torch.float32))
    num_bytes = sum(map(count_stored_bytes, planned))
    about = {
        "general.name": out.name,
        "general.version": f"{last.path.name}, manifest {read_committed_hash(last.path)}",
        "general.size_label": numbered(describe(config).num_parameters, "parameters"),
    }
    with staged(out, num_bytes + OTHER_BYTES) as staging, TemporaryDirectory() as beside:
        file = staging / f"{out.name}-{options.dtype.upper()}.gguf"
        write_gguf(file, planned, sources, family, config, options.dtype, described, about)
        card = write_card(out.name, sources, config, options.dtype, "gguf", reading.origin)
        (staging / CARD_NAME).write_text(card, encoding="utf-8", errors="backslashreplace")
        write_files(reading.tokenizer.files, Path(beside))
        request = {
            "directory": str(staging),
            "file": str(file),
            "kind": options.dtype,
            "checkpoints": [str(source.path) for source in sources],
            "scaling": last.scaling,
            "tokenizer": beside,
            "learned": None if reading.learned is None else str(reading.learned),
            "is_whole": options.is_whole,
        }
        proof = run_proof_of(request, PROVE_LLAMA_CPP_MODULE if asks_llama_cpp else PROVE_GGUF_MODULE)
        proof |= {
            "tokenizer_origin": reading.origin,
            "num_other_stops": described.num_other_stops,
            "num_of_16_bits": sum(one.kind is GGMLQuantizationType.F16 for one in planned),
        }
        proof["files"] = hash_files(staging)
        write_proof(staging, proof)
    return proof


def plan_file(sources: Sequence[Source], family: Family, config: DecoderConfig, kind: str) -> list[StoredTensor]:
    """Returns the tensors of a file.

    Where matrices have 4 or 5 bits, the one that gives the logits has 8.

    Raises:
        UserError: llama.cpp does not have this model.
    """
    stored = list_weights(sources[0].manifest)
    shapes = {name: stored[name] for name in sorted(stored) if not is_adapter_tensor(name)}
    of_matrices = GGMLQuantizationType[kind.upper()]
    of_output = GGMLQuantizationType.Q8_0 if kind.startswith(("q4", "q5")) else of_matrices
    return plan_tensors(shapes, family, config, of_matrices, of_output)


def describe_reading(reading: Reading, config: DecoderConfig) -> GgufTokenizer:
    """Returns the tokenizer and the template of a file, by which a model reads and ends texts.

    Raises:
        UserError: There is no tokenizer, or llama.cpp has none like it.
    """
    tokenizer = reading.tokenizer
    if tokenizer is None:
        raise UserError("a GGUF file holds a tokenizer, and the model was trained on ids without one: leave out --gguf")
    template = None
    if reading.learned is not None or tokenizer.chat_template is not None:
        template = open_template(tokenizer, ChatOptions(), reading.learned).text
    stops = find_stop_ids(tokenizer, reading.learned)
    return describe_tokenizer(tokenizer, config.vocab_size, config.max_seq_len, template, stops)


def write_gguf(
    path: Path,
    planned: Sequence[StoredTensor],
    sources: Sequence[Source],
    family: Family,
    config: DecoderConfig,
    kind: str,
    reading: GgufTokenizer,
    about: Mapping[str, str],
) -> None:
    """Writes the file.

    Args:
        path: The file.
        planned: Its tensors.
        sources: The checkpoints; several mean their average.
        family: The family.
        config: The model's shape.
        kind: The type of the matrices, as `--gguf` has it.
        reading: The tokenizer.
        about: Keys about the model as a whole, such as its name.

    Raises:
        CorruptCheckpointError: A tensor differs from its digest.
        UserError: A value is beyond the range of the type.
        OSError: The disk is full.
    """
    architecture, content = find_architecture(family, config)
    writer = GGUFWriter(path, architecture.name)
    try:
        writer.add_type(GGUFType.MODEL)
        for key, text in about.items():
            writer.add_string(key, text)
        writer.add_array("general.tags", ["genesis", "text-generation"])
        for key, (value, value_type) in describe_model(architecture, content, config).items():
            sub_type = GGUFValueType.UINT32 if value_type is GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, value_type, sub_type)
        file_type = LlamaFileType[f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{kind.upper()}"]
        writer.add_file_type(file_type)
        writer.add_quantization_version(GGML_QUANT_VERSION)
        reading.add_to(writer)
        for stored in planned:
            of_values: Any = np.dtype(np.float32)  # the shape counts values, and not bytes
            writer.add_tensor_info(stored.name, stored.shape, of_values, count_stored_bytes(stored), stored.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        (file,) = writer.fout
        writer.write_padding(file, file.tell())
        with stage("writing the file", sum(map(count_stored_bytes, planned)), "bytes") as shown:
            for stored in planned:
                for block in iterate_stored(stored, sources, config):
                    file.write(block.data)
                    shown.advance(block.nbytes)
                writer.write_padding(file, count_stored_bytes(stored))
        file.flush()
        os.fsync(file.fileno())
    finally:
        writer.close()


def iterate_stored(
    stored: StoredTensor, sources: Sequence[Source], config: DecoderConfig
) -> Iterator[NDArray[np.uint8]]:
    """Yields the bytes of a tensor of the file, some rows at a time.

    Raises:
        CorruptCheckpointError: The tensor differs from its digest; raised after the last row.
        UserError: A value is beyond the range of the type.
    """
    if stored.ours is None:
        yield _encode(rotary_factors(config), stored)
        return
    dtype = _PLAIN.get(stored.kind, torch.float32) if stored.is_plain else torch.float32
    blocks = iterate_blocks(sources, stored.ours, dtype)
    if stored.is_plain:
        for block in blocks:
            yield _encode(block, stored)
    else:
        yield _encode(stored.to_file(torch.cat(list(blocks))), stored)


def _encode(values: Tensor, stored: StoredTensor) -> NDArray[np.uint8]:
    """Returns the bytes of values in the type of their tensor."""
    dtype = _PLAIN.get(stored.kind)
    is_narrow = stored.kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.BF16)
    if is_narrow and bool((values.abs() > _LARGEST).any()):
        raise UserError(f"{stored.ours} has values beyond {stored.kind.name}: use --gguf bf16")
    if dtype is None:
        return quantize(values.float().numpy(), stored.kind).reshape(-1).view(np.uint8)
    return values.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
