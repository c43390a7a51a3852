"""Reads Megatron's indexed datasets, which NeMo and other projects also use.

NAME.bin    the tokens of all sequences, one after another
NAME.idx    little-endian:
            9 bytes    "MMIDIDX", 0, 0
            uint64     version, 1
            uint8      the code of the tokens' type
            uint64     number of sequences
            uint64     number of documents plus one
            int32      per sequence: number of its tokens
            int64      per sequence: offset of its first byte in NAME.bin
            int64      per document: number of sequences before it; finally the number of all sequences
            int8       per sequence of a multimodal dataset: its mode

A document may have several sequences. References: `IndexedDataset` in NVIDIA/Megatron-LM,
megatron/core/datasets/indexed_dataset.py; the codes 9 and 10 are Megatron-DeepSpeed's.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from genesis.base.errors import UserError, numbered
from genesis.data.foreign.token_file import ENDS_PER_BLOCK, TokenFile, file_size, map_array, one_run
from genesis_callbacks.base.untrusted import open_file

_MAGIC: Final = b"MMIDIDX\0\0"
_OLD_MAGIC: Final = b"TNTIDX\0\0"
_HEADER: Final = struct.Struct("<9sQBQQ")
_DTYPES: Final = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16", 9: "uint32", 10: "uint64"}


def read_megatron(path: Path) -> TokenFile:
    """Returns the content of a `.bin` file, described by its `.idx` file.

    Raises:
        UserError: One of the two files is missing, is invalid, or contradicts the other.
    """
    bin_path, index = path.with_suffix(".bin"), path.with_suffix(".idx")
    num_bytes, index_bytes = file_size(bin_path), file_size(index)
    dtype, num_sequences, num_entries = _read_header(index, index_bytes)
    item_bytes = np.dtype(dtype).itemsize
    lengths_at = _HEADER.size
    pointers_at = lengths_at + 4 * num_sequences
    documents_at = pointers_at + 8 * num_sequences
    expected_bytes = documents_at + 8 * num_entries
    if index_bytes == expected_bytes + num_sequences and num_sequences:
        raise UserError(f"{index} is that of a multimodal dataset (its sequences have modes); give a dataset of text")
    if index_bytes != expected_bytes:
        raise UserError(
            f"{index} has {index_bytes} bytes, but its header requires {expected_bytes}; copy or build it again"
        )
    lengths = map_array(index, "<i4", lengths_at, num_sequences)
    pointers = map_array(index, "<i8", pointers_at, num_sequences)
    documents = map_array(index, "<i8", documents_at, num_entries)
    num_tokens = _check_sequences(index, lengths, pointers, item_bytes)
    if num_tokens * item_bytes != num_bytes:
        raise UserError(
            f"{bin_path} has {num_bytes} bytes, but {index.name} lists {numbered(num_tokens, 'tokens')} of "
            f"{item_bytes} bytes; copy or build both again"
        )
    if not num_entries or documents[0] != 0 or documents[-1] != num_sequences:
        raise UserError(
            f"{index} has documents that do not cover its {numbered(num_sequences, 'sequences')}; build it again"
        )

    def read_ends() -> Iterator[NDArray[np.int64]]:
        for first in range(1, num_entries, ENDS_PER_BLOCK):
            next_sequence = np.array(documents[first : first + ENDS_PER_BLOCK])
            if next_sequence.min() < 0:
                raise UserError(f"{index} has a document that begins before the first sequence; build it again")
            ends = np.full(len(next_sequence), num_tokens, np.int64)
            is_inner = next_sequence < num_sequences
            ends[is_inner] = pointers[next_sequence[is_inner]] // item_bytes
            yield ends

    return TokenFile(bin_path, num_bytes, dtype, one_run(0, num_tokens), read_ends)


def _read_header(index: Path, index_bytes: int) -> tuple[str, int, int]:
    with open_file(index) as file:
        header = file.read(_HEADER.size)
    if header.startswith(_OLD_MAGIC):
        raise UserError(f"{index} has Megatron's old format (TNTIDX); build it again with dataset-impl mmap")
    if not header.startswith(_MAGIC) or len(header) < _HEADER.size:
        raise UserError(
            f"{index} is not an index of Megatron's ({index_bytes} bytes, starting with {header[:9]!r}); build it again"
        )
    _, version, code, num_sequences, num_entries = _HEADER.unpack(header)
    if version != 1:
        raise UserError(f"{index} has version {version}, but this version of genesis reads 1; upgrade genesis")
    if code not in _DTYPES:
        known = ", ".join(f"{known} {name}" for known, name in _DTYPES.items())
        raise UserError(
            f"{index} has tokens of the type with code {code}; convert them to an integer type (codes {known})"
        )
    return _DTYPES[code], num_sequences, num_entries


def _check_sequences(index: Path, lengths: NDArray[np.integer], pointers: NDArray[np.integer], item_bytes: int) -> int:
    """Returns the number of tokens of all sequences, which must be contiguous."""
    num_tokens = 0
    for first in range(0, len(lengths), ENDS_PER_BLOCK):
        block = lengths[first : first + ENDS_PER_BLOCK].astype(np.int64)
        ends = num_tokens + np.cumsum(block)
        wrong = np.flatnonzero((pointers[first : first + ENDS_PER_BLOCK] != (ends - block) * item_bytes) | (block < 0))
        if len(wrong):
            raise UserError(
                f"{index} has sequence {first + wrong[0]} at byte {pointers[first + wrong[0]]}, which is not the end "
                "of the sequence before it; build the index again"
            )
        num_tokens = int(ends[-1])
    return num_tokens
