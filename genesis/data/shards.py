"""Token shards on disk, in datatrove's layout, and their writer.

NAME.ds             the tokens of all documents, one after another: little-endian uint16 or uint32
NAME.ds.index       uint64, the cumulative end of each document, in tokens
NAME.ds.metadata    text: "TOKENIZER|bytes per token", the number of tokens, the same for people
"""

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from genesis.data.manifest import ShardRecord

HASH_ALGORITHM = "blake3"
SHARD_SUFFIX = ".ds"
INDEX_SUFFIX = ".index"
METADATA_SUFFIX = ".metadata"

TokenDtype = Literal["uint16", "uint32"]

_UINT16_VOCAB_SIZE = 65_536
_MIN_SIZE_FOR_THREADS = 1 << 20


def token_dtype(vocab_size: int) -> TokenDtype:
    """Returns the narrowest type that holds every id."""
    return "uint16" if vocab_size <= _UINT16_VOCAB_SIZE else "uint32"


def little_endian(dtype: TokenDtype) -> np.dtype[np.unsignedinteger]:
    """Returns the numpy type of a shard's file, whatever this machine's byte order."""
    return np.dtype("<u2") if dtype == "uint16" else np.dtype("<u4")


def shard_files(shard: Path) -> tuple[Path, Path, Path]:
    """Returns the three files of a shard: tokens, index, metadata."""
    return shard, Path(f"{shard}{INDEX_SUFFIX}"), Path(f"{shard}{METADATA_SUFFIX}")


def hash_file(path: Path) -> str:
    """Returns the BLAKE3 hex digest of a file."""
    digest = blake3(max_threads=blake3.AUTO)
    if path.stat().st_size >= _MIN_SIZE_FOR_THREADS:
        digest.update_mmap(path)
    else:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sync_directory(directory: Path) -> None:
    """Makes the names in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class EncodedDocuments:
    """Documents to append: all their tokens (with bos and eos), how many each has, and the bytes of their text."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    num_text_bytes: int


class ShardWriter:
    """Writes one shard; it belongs to one thread.

    Nothing is a shard before `finish` returns: it flushes the three files to disk and says what they hold. The caller
    gives them their final names.
    """

    def __init__(self, path: Path, dtype: TokenDtype, tokenizer_name: str) -> None:
        self.path = path
        self._dtype = little_endian(dtype)
        self._tokenizer_name = tokenizer_name
        self._file: BinaryIO = path.open("wb")
        self._hash = blake3()
        self._ends = array("Q")
        self.num_tokens = 0
        self._num_text_bytes = 0

    def append(self, documents: EncodedDocuments) -> None:
        """Appends documents at the end."""
        data = documents.tokens.astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._ends.extend((np.cumsum(documents.lengths) + self.num_tokens).tolist())
        self.num_tokens += len(documents.tokens)
        self._num_text_bytes += documents.num_text_bytes

    def finish(self, final_path: str) -> ShardRecord:
        """Completes the three files, durable when this returns, and returns the record of the shard at `final_path`."""
        _, index_path, metadata_path = shard_files(self.path)
        with self._file:
            _flush(self._file)
        index = np.array(self._ends, dtype="<u8").tobytes()
        _write(index_path, index)
        lines = (f"{self._tokenizer_name}|{self._dtype.itemsize}", str(self.num_tokens), _readable(self.num_tokens))
        _write(metadata_path, "\n".join(lines).encode())
        return ShardRecord(
            path=final_path,
            num_tokens=self.num_tokens,
            num_documents=len(self._ends),
            num_text_bytes=self._num_text_bytes,
            file_bytes=self.num_tokens * self._dtype.itemsize,
            hash=self._hash.hexdigest(),
            index_hash=blake3(index).hexdigest(),
        )


def publish_shard(staged: Path, final: Path) -> None:
    """Gives a finished shard its final name, the tokens last; durable when this returns."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for source, target in reversed(tuple(zip(shard_files(staged), shard_files(final), strict=True))):
        source.replace(target)
    sync_directory(final.parent)


def iterate_documents(shard: Path, dtype: TokenDtype) -> Iterator[NDArray[np.unsignedinteger]]:
    """Yields the tokens of each document of a shard, in order, from memory maps."""
    tokens_path, index_path, _ = shard_files(shard)
    tokens = np.memmap(tokens_path, dtype=little_endian(dtype), mode="r")
    start = 0
    for end in np.fromfile(index_path, dtype="<u8").tolist():
        yield tokens[start:end]
        start = end


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        _flush(file)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _readable(count: int) -> str:
    scaled = float(count)
    for prefix in ("", "k", "M", "G"):
        if scaled < 1000:
            return f"{scaled:.3g} {prefix}T"
        scaled /= 1000
    return f"{scaled:.3g} TT"
