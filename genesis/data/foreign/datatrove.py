"""Reads datatrove's token files, as its DocumentTokenizer and DocumentTokenizerMerger write them.

NAME.ds             the tokens of all documents, one after another: little-endian uint16 or uint32
NAME.ds.index       uint64, the cumulative end of each document, in tokens
NAME.ds.metadata    text, whose first line ends with "|" and the bytes of a token
NAME.ds.loss        one byte per token, 1 if it has a label; adopting cannot keep these, so that the file is refused
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from genesis.base.errors import UserError, numbered
from genesis.data.foreign.token_file import ENDS_PER_BLOCK, TokenFile, file_size, map_array, one_run
from genesis.data.shards import INDEX_ENTRY, shard_files
from genesis_callbacks.base.untrusted import read_text

_DTYPES = {2: "uint16", 4: "uint32"}


def read_datatrove(path: Path) -> TokenFile:
    """Returns the content of a `.ds` file.

    Raises:
        UserError: The file has a loss mask or no index, or its companions contradict it.
    """
    _, index, metadata = shard_files(path)
    loss = Path(f"{path}.loss")
    if loss.exists():
        raise UserError(
            f"{loss} masks the loss of some tokens, which cannot be kept; tokenize without save_loss_metadata"
        )
    num_bytes = file_size(path)
    if not index.exists():
        raise UserError(
            f"{path} has no {index.name}; tokenize with save_index, or name it as a file of format flat with its dtype "
            "(uint16 or uint32)"
        )
    index_bytes = file_size(index)
    if index_bytes % INDEX_ENTRY.itemsize:
        raise UserError(
            f"{index} has {index_bytes} bytes, not a multiple of {INDEX_ENTRY.itemsize}: it is truncated; copy it again"
        )
    num_documents = index_bytes // INDEX_ENTRY.itemsize
    ends = map_array(index, INDEX_ENTRY.str, 0, num_documents)
    num_tokens = int(ends[-1]) if num_documents else 0
    token_bytes = _read_token_bytes(metadata) if metadata.exists() else num_bytes // max(1, num_tokens)
    if token_bytes not in _DTYPES or num_tokens * token_bytes != num_bytes:
        raise UserError(
            f"{path} has {num_bytes} bytes, but its index lists {numbered(num_tokens, 'tokens')} (of 2 or 4 "
            f"bytes{f', {token_bytes} by its metadata' if metadata.exists() else ''}); copy or tokenize both again"
        )

    def read_ends() -> Iterator[NDArray[np.int64]]:
        for first in range(0, num_documents, ENDS_PER_BLOCK):
            yield ends[first : first + ENDS_PER_BLOCK].astype(np.int64)

    return TokenFile(path, num_bytes, _DTYPES[token_bytes], one_run(0, num_tokens), read_ends)


def _read_token_bytes(metadata: Path) -> int:
    last_field = read_text(metadata).split("\n", 1)[0].rpartition("|")[2]
    if not last_field.isdecimal():
        raise UserError(
            f"{metadata} does not end its first line with the bytes of a token; write it again or remove it"
        )
    return int(last_field)
