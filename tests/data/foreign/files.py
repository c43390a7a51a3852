"""Writes documents as other tools do: by the tool itself where it installs, by its format's description elsewhere."""

import struct
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer, TokenizedFile
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

Documents = Sequence[Sequence[int]]

datasets.disable_progress_bars()


def flatten(documents: Documents) -> list[int]:
    return [token for document in documents for token in document]


def write_datatrove(directory: Path, documents: Documents, vocab_size: int) -> Path:
    """Has datatrove tokenize texts whose words are the ids; it adds the last id of each document itself."""
    words = Tokenizer(WordLevel({f"i{token}": token for token in range(vocab_size)}, unk_token="i0"))
    words.pre_tokenizer = WhitespaceSplit()
    directory.mkdir(parents=True)
    words.save(str(directory.with_suffix(".json")))
    (eos_id,) = {document[-1] for document in documents}
    texts = [" ".join(f"i{token}" for token in document[:-1]) for document in documents]
    step = DocumentTokenizer(
        str(directory), str(directory.with_suffix(".json")), eos_token=f"i{eos_id}", shuffle_documents=False
    )
    half = len(texts) // 2
    for rank, part in enumerate((texts[:half], texts[half:])):
        step.run((Document(text, str(number)) for number, text in enumerate(part)), rank=rank, world_size=2)
    return directory


def write_datatrove_file(path: Path, documents: Documents, token_size: int, *, loss: bool = False) -> Path:
    """Writes one file with datatrove's own writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = TokenizedFile(
        str(path.parent), path.name, save_final_metadata=True, token_size=token_size, save_loss_metadata=loss
    )
    for document in documents:
        file.write(list(document), np.ones(len(document)) if loss else None)
    file.close()
    return path


def write_dataset(directory: Path, documents: Documents, value_type: str = "int32", **columns: list[list[int]]) -> Path:
    """Has `datasets` save the ids, in two files."""
    features = datasets.Features({"input_ids": datasets.List(datasets.Value(value_type))})
    dataset = datasets.Dataset.from_dict({"input_ids": [list(document) for document in documents]}, features)
    for name, values in columns.items():
        dataset = dataset.add_column(name, values)
    dataset.save_to_disk(str(directory), num_shards=2)
    return directory


def write_megatron(prefix: Path, documents: Documents, code: int = 8, *, sequence_tokens: int | None = None) -> Path:
    """Writes Megatron's pair of files, byte by byte; with `sequence_tokens` documents have sequences of so many."""
    letter = {4: "i", 5: "q", 8: "H", 9: "I"}[code]
    sequences, first_of_document = [], [0]
    for document in documents:
        step = sequence_tokens or max(1, len(document))
        sequences += [document[start : start + step] for start in range(0, len(document), step)]
        first_of_document.append(len(sequences))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    pointers, tokens = [], b""
    for sequence in sequences:
        pointers.append(len(tokens))
        tokens += struct.pack(f"<{len(sequence)}{letter}", *sequence)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(first_of_document))
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    index += b"".join(struct.pack("<q", pointer) for pointer in pointers)
    index += b"".join(struct.pack("<q", first) for first in first_of_document)
    prefix.with_suffix(".bin").write_bytes(tokens)
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix


def write_npy(path: Path, documents: Documents, dtype: str = "uint16") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.array(flatten(documents), dtype))
    return path


def write_bin(path: Path, documents: Documents, dtype: str = "uint16") -> Path:
    """Writes what nanoGPT's `prepare.py` writes: tokens and nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(flatten(documents), dtype).tofile(path)
    return path


def write_llmc(path: Path, documents: Documents, magic: int, letter: str) -> Path:
    """Writes llm.c's header of 256 int32 and the tokens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = flatten(documents)
    header = struct.pack("<256i", magic, 1, len(tokens), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}{letter}", *tokens))
    return path
