"""Token shards on disk, in datatrove's layout, and their writer.

NAME.ds             the tokens of all documents, one after another: little-endian uint16 or uint32
NAME.ds.index       uint64, the cumulative end of each document, in tokens
NAME.ds.metadata    text: "TOKENIZER|bytes per token", the number of tokens, the same for people
"""

import mmap
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
from genesis.errors import UserError

HASH_ALGORITHM = "blake3"
SHARD_SUFFIX = ".ds"
INDEX_SUFFIX = ".index"
METADATA_SUFFIX = ".metadata"
ADDED_SUFFIX = ".added"
INDEX_ENTRY = np.dtype("<u8")

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


def sync_file(file: BinaryIO) -> None:
    """Makes what was written to `file` durable."""
    file.flush()
    os.fsync(file.fileno())


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
            sync_file(self._file)
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


def stored_dtype(name: str) -> np.dtype[np.unsignedinteger]:
    """Returns the numpy type of tokens on disk, as an unsigned one: so a negative id is one that is too large."""
    return np.dtype(f"<u{np.dtype(name).itemsize}")


def index_path(corpus: Path, shard: ShardRecord) -> Path:
    """Returns the file with the ends of a shard's documents."""
    return corpus / (shard.index if shard.index is not None else shard.path + INDEX_SUFFIX)


def map_tokens(corpus: Path, token_dtype: TokenDtype, shard: ShardRecord) -> NDArray[np.unsignedinteger]:
    """Returns the tokens of a shard, in a memory map of its own, as they lie on disk.

    Raises:
        UserError: The file is gone or too short.
    """
    dtype = stored_dtype(shard.dtype or token_dtype)
    return _map_run(corpus / shard.path, dtype, shard.byte_offset, shard.num_tokens - shard.num_added)


def read_index(corpus: Path, shard: ShardRecord) -> NDArray[np.int64]:
    """Returns the ends of a shard's documents, counted from the shard's beginning.

    Raises:
        UserError: The index is gone or has another size than the manifest says.
    """
    entries = _map_index(corpus, shard)
    return entries.astype(np.int64) - shard.index_base


def hash_tokens(tokens: NDArray[np.unsignedinteger]) -> str:
    """Returns the BLAKE3 hex digest of tokens as they lie on disk."""
    return blake3(tokens.view(np.uint8).data, max_threads=blake3.AUTO).hexdigest()


def hash_index(corpus: Path, shard: ShardRecord) -> str:
    """Returns the hash of a shard's entries in its index."""
    return hash_tokens(_map_index(corpus, shard))


def read_added(corpus: Path, shard: ShardRecord) -> NDArray[np.int64]:
    """Returns the places in a shard at which a document's end is added.

    Raises:
        UserError: The file that says so is gone or too short.
    """
    if not shard.num_added:
        return np.empty(0, np.int64)
    path = index_path(corpus, shard).with_suffix(ADDED_SUFFIX)
    places = _map_run(path, INDEX_ENTRY, 0, _file_bytes(path) // INDEX_ENTRY.itemsize)
    first = int(np.searchsorted(places, np.uint64(shard.index_base)))
    if len(places) < first + shard.num_added:
        raise UserError(f"{path} is cut short; {remedy(shard.path)}")
    return places[first : first + shard.num_added].astype(np.int64) - shard.index_base


def find_token_fault(
    tokens: NDArray[np.unsignedinteger], vocab_size: int, eos_id: int, ends: NDArray[np.int64] | None
) -> str | None:
    """Returns what is wrong with a shard's tokens, None if nothing is.

    Args:
        tokens: All of them.
        vocab_size: No id reaches it.
        eos_id: The last token of each document, and of no other place; without `ends` it is not looked at.
        ends: Of the documents.
    """
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        place = int(np.argmax(tokens == largest))
        signed = int(tokens[place : place + 1].view(f"<i{tokens.itemsize}")[0])
        shown = signed if signed < 0 and tokens.itemsize > 2 else largest
        return f"holds the id {shown} (token {place:,}), vocab_size is {vocab_size:,}; mend the one or the other"
    if ends is None:
        return None
    lacking = np.flatnonzero(tokens[ends - 1] != eos_id)
    if len(lacking):
        return (
            f"has {len(lacking):,} of {len(ends):,} documents that do not end with eos_id {eos_id} (from document "
            f"{lacking[0]:,} of a shard on); name the id that ends them, or adopt with add_eos"
        )
    within = int(np.count_nonzero(tokens == eos_id)) - len(ends)
    if within:
        return f"holds eos_id {eos_id} {within:,} times within documents; adopt with documents eos if it ends them"
    return None


def remedy(path: str) -> str:
    """Returns what a user can do about a shard that is not what the manifest says."""
    if Path(path).is_absolute():
        return "put the file back as it was, or run `genesis data adopt` again"
    return "run `genesis data prepare` again"


def iterate_documents(shard: Path, dtype: TokenDtype) -> Iterator[NDArray[np.unsignedinteger]]:
    """Yields the tokens of each document of a shard, in order, from memory maps."""
    tokens_path, index_path, _ = shard_files(shard)
    tokens = np.memmap(tokens_path, dtype=little_endian(dtype), mode="r")
    start = 0
    for end in np.fromfile(index_path, dtype="<u8").tolist():
        yield tokens[start:end]
        start = end


def _map_index(corpus: Path, shard: ShardRecord) -> NDArray[np.unsignedinteger]:
    path = index_path(corpus, shard)
    found = _file_bytes(path)
    expected = (shard.index_start + shard.num_documents) * INDEX_ENTRY.itemsize
    if found < expected or (shard.index is None and found != expected):
        raise UserError(f"{path} has {found} bytes, the manifest says {expected}; {remedy(shard.path)}")
    return _map_run(path, INDEX_ENTRY, shard.index_start * INDEX_ENTRY.itemsize, shard.num_documents)


def _map_run(
    path: Path, dtype: np.dtype[np.unsignedinteger], byte_offset: int, count: int
) -> NDArray[np.unsignedinteger]:
    if not count:
        return np.empty(0, dtype)
    start = byte_offset % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(
                file.fileno(), start + count * dtype.itemsize, access=mmap.ACCESS_READ, offset=byte_offset - start
            )
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); put it back as it was") from None
    except ValueError:
        expected = byte_offset + count * dtype.itemsize
        raise UserError(f"{path} was cut short: it has {_file_bytes(path)} bytes of {expected}") from None
    return np.frombuffer(mapped, dtype, count, start)


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); put it back as it was") from None


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        sync_file(file)


def _readable(count: int) -> str:
    scaled = float(count)
    for prefix in ("", "k", "M", "G"):
        if scaled < 1000:
            return f"{scaled:.3g} {prefix}T"
        scaled /= 1000
    return f"{scaled:.3g} TT"
