"""Token shards on disk, in datatrove's layout, and their writer.

NAME.ds             the tokens of all documents, one after another: little-endian uint16 or uint32
NAME.ds.index       uint64, the cumulative end of each document, in tokens
NAME.ds.metadata    text: "TOKENIZER|bytes per token", the number of tokens, and the number in readable form
NAME.ds.loss        one byte per token: 0 if the token is not learned as a label, else 1 plus the value of its document
                    (0 without values); without this file, all tokens have labels except the first of each document
"""

import contextlib
import mmap
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from genesis.base.errors import UserError
from genesis.data.manifest import MANIFEST_NAME, ShardRecord
from genesis_callbacks.base.files import create_file, sync_directory
from genesis_callbacks.base.untrusted import check_file, open_file, path_below, read_file

HASH_ALGORITHM = "blake3"
INDEX_SUFFIX = ".index"
METADATA_SUFFIX = ".metadata"
LABELS_SUFFIX = ".loss"
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
    """Returns the paths of a shard's three files: tokens, index, metadata."""
    return shard, Path(f"{shard}{INDEX_SUFFIX}"), Path(f"{shard}{METADATA_SUFFIX}")


def labels_path(shard: Path) -> Path:
    """Returns the path of a shard's label file, which exists only if some of its tokens have no label."""
    return Path(f"{shard}{LABELS_SUFFIX}")


def hash_file(path: Path) -> str:
    """Returns the BLAKE3 hex digest of a file."""
    digest = blake3(max_threads=blake3.AUTO)
    if check_file(path) >= _MIN_SIZE_FOR_THREADS:
        digest.update_mmap(path)
    else:
        digest.update(read_file(path, _MIN_SIZE_FOR_THREADS))
    return digest.hexdigest()


@dataclass(frozen=True)
class EncodedDocuments:
    """Documents to append to a shard.

    Args:
        tokens: The tokens of all documents, with bos and eos.
        lengths: Number of tokens of each document.
        num_text_bytes: Number of UTF-8 bytes of their text.
        has_label: Whether each token is learned, as the label of the token before it, or the bytes of `mark_labels`;
            None if all are.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    num_text_bytes: int
    has_label: NDArray[np.bool_] | NDArray[np.uint8] | None = None


MAX_VALUE: Final = 254
"""The largest value of a document."""


def mark_labels(is_learned: NDArray[np.bool_] | NDArray[np.uint8], value: int) -> NDArray[np.uint8]:
    """Returns the bytes of a document's tokens in the file of labels.

    Example:
        >>> mark_labels(np.array([False, True]), 1)
        array([0, 2], dtype=uint8)
    """
    return np.where(is_learned, value + 1, 0).astype(np.uint8)


class ShardWriter:
    """Writes one shard. Not thread-safe.

    The files are a shard only after `finish`, which forces them to the disk and returns their record. The caller then
    gives the files their final names.

    Args:
        path: Path of the token file; the other files get the same path with other suffixes.
        dtype: Type of the tokens on disk.
        tokenizer_name: Name of the tokenizer in the metadata.
        eos_id: The token that usually ends a document; the shard's record says if some documents end otherwise. None
            if no token ends documents.
    """

    def __init__(self, path: Path, dtype: TokenDtype, tokenizer_name: str, eos_id: int | None) -> None:
        self.path = path
        self._dtype = little_endian(dtype)
        self._tokenizer_name = tokenizer_name
        self._eos_id = eos_id
        self._ends_by_index = eos_id is None
        self._labels: bytearray | None = None
        self._opened = contextlib.ExitStack()
        self._file = self._opened.enter_context(create_file(path))
        self._hash = blake3()
        self._ends = array("Q")
        self.num_tokens = 0
        self._num_text_bytes = 0

    def append(self, documents: EncodedDocuments) -> None:
        """Appends documents to the shard."""
        data = documents.tokens.astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        ends = np.cumsum(documents.lengths)
        # An eos within a document, or an end without one: a reader that splits at eos would find other documents.
        is_eos = documents.tokens == self._eos_id
        if not (np.count_nonzero(is_eos) == len(ends) and is_eos[ends - 1].all()):
            self._ends_by_index = True
        self._append_labels(documents)
        self._ends.frombytes((ends + self.num_tokens).astype(np.uint64).tobytes())
        self.num_tokens += len(documents.tokens)
        self._num_text_bytes += documents.num_text_bytes

    def finish(self, final_path: str) -> ShardRecord:
        """Completes the files and forces them to the disk; returns the record of the shard at `final_path`."""
        _, index_path, metadata_path = shard_files(self.path)
        self._opened.close()
        # Without a copy: documents of one letter have more bytes here than in their text.
        index = np.asarray(self._ends, "<u8").view(np.uint8).data
        _write(index_path, index)
        lines = (f"{self._tokenizer_name}|{self._dtype.itemsize}", str(self.num_tokens), _readable(self.num_tokens))
        _write(metadata_path, "\n".join(lines).encode())
        if self._labels is not None:
            _write(labels_path(self.path), self._labels)
        return ShardRecord(
            path=final_path,
            num_tokens=self.num_tokens,
            num_documents=len(self._ends),
            num_text_bytes=self._num_text_bytes,
            file_bytes=self.num_tokens * self._dtype.itemsize,
            hash=self._hash.hexdigest(),
            index_hash=blake3(index).hexdigest(),
            ends_by_index=self._ends_by_index,
            labels_hash="" if self._labels is None else blake3(self._labels).hexdigest(),
            num_labels=0 if self._labels is None else len(self._labels) - self._labels.count(0),
        )

    def _append_labels(self, documents: EncodedDocuments) -> None:
        """Stores which tokens have labels; earlier documents without this information have labels everywhere."""
        if documents.has_label is None and self._labels is None:
            return
        if self._labels is None:
            self._labels = bytearray(b"\1" * self.num_tokens)
        has_label = np.ones(len(documents.tokens), np.bool_) if documents.has_label is None else documents.has_label
        assert len(has_label) == len(documents.tokens), "one flag per token"
        self._labels += has_label.tobytes()


def publish_shard(staged: Path, final: Path) -> None:
    """Renames a finished shard's files into place, the token file last; the names are durable when the call returns."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if labels_path(staged).exists():
        labels_path(staged).replace(labels_path(final))
    for source, target in reversed(tuple(zip(shard_files(staged), shard_files(final), strict=True))):
        source.replace(target)
    sync_directory(final.parent)


def stored_dtype(name: str) -> np.dtype[np.unsignedinteger]:
    """Returns the unsigned numpy type of tokens on disk; it turns a negative id into an id above the vocabulary."""
    return np.dtype(f"<u{np.dtype(name).itemsize}")


def shard_path(corpus: Path, shard: ShardRecord) -> Path:
    """Returns the path of a shard's file, which lies in the corpus, or was adopted and has a hash or a time to compare.

    Raises:
        UserError: The manifest lists another place.
    """
    if Path(shard.path).is_absolute() and (shard.hash or shard.mtime_ns is not None):
        return Path(shard.path)
    return path_below(corpus, shard.path, corpus / MANIFEST_NAME)


def index_path(corpus: Path, shard: ShardRecord) -> Path:
    """Returns the path of the file with the ends of a shard's documents."""
    name = shard.index if shard.index is not None else shard.path + INDEX_SUFFIX
    return path_below(corpus, name, corpus / MANIFEST_NAME)


def map_tokens(corpus: Path, token_dtype: TokenDtype, shard: ShardRecord) -> NDArray[np.unsignedinteger]:
    """Returns the tokens of a shard as stored, in a new memory map.

    Raises:
        UserError: The file is missing or too short.
    """
    dtype = stored_dtype(shard.dtype or token_dtype)
    return _map_run(shard_path(corpus, shard), dtype, shard.byte_offset, shard.num_tokens - shard.num_added)


def read_index(corpus: Path, shard: ShardRecord) -> NDArray[np.int64]:
    """Returns the ends of a shard's documents, counted from the shard's beginning.

    Raises:
        UserError: The index is gone or has another size than the manifest says.
    """
    return map_index(corpus, shard).astype(np.int64) - shard.index_base


def map_labels(corpus: Path, shard: ShardRecord) -> NDArray[np.unsignedinteger] | None:
    """Returns a memory map of one byte per token of a shard, 0 if the token has no label; None if all tokens have one.

    Raises:
        UserError: The file is gone or has another size than the manifest says.
    """
    if not shard.labels_hash:
        return None
    path = labels_path(shard_path(corpus, shard))
    found = _file_bytes(path)
    if found != shard.num_tokens:
        raise UserError(f"{path} has {found} bytes, but the manifest lists {shard.num_tokens}; {remedy(shard.path)}")
    return _map_run(path, np.dtype(np.uint8), 0, shard.num_tokens)


def hash_tokens(tokens: NDArray[np.unsignedinteger]) -> str:
    """Returns the BLAKE3 hex digest of tokens as stored."""
    return blake3(tokens.view(np.uint8).data, max_threads=blake3.AUTO).hexdigest()


def hash_index(corpus: Path, shard: ShardRecord) -> str:
    """Returns the hash of a shard's entries in its index."""
    return hash_tokens(map_index(corpus, shard))


def read_added(corpus: Path, shard: ShardRecord) -> NDArray[np.int64]:
    """Returns the positions in a shard at which a document's end is added.

    Raises:
        UserError: The file of these positions is missing or too short.
    """
    if not shard.num_added:
        return np.empty(0, np.int64)
    path = index_path(corpus, shard).with_suffix(ADDED_SUFFIX)
    places = _map_run(path, INDEX_ENTRY, 0, _file_bytes(path) // INDEX_ENTRY.itemsize)
    first = int(np.searchsorted(places, np.uint64(shard.index_base)))
    if len(places) < first + shard.num_added:
        raise UserError(f"{path} is truncated; {remedy(shard.path)}")
    return places[first : first + shard.num_added].astype(np.int64) - shard.index_base


def find_token_fault(
    tokens: NDArray[np.unsignedinteger], vocab_size: int, eos_id: int | None, ends: NDArray[np.int64]
) -> str | None:
    """Returns a line about the first fault in a shard's tokens, None if there is none.

    Args:
        tokens: All tokens of the shard.
        vocab_size: Number of ids; each id must be smaller.
        eos_id: The last token of each document; None if documents may end with any token.
        ends: Ends of the documents.
    """
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        place = int(np.argmax(tokens == largest))
        signed = int(tokens[place : place + 1].view(f"<i{tokens.itemsize}")[0])
        shown = signed if signed < 0 and tokens.itemsize > 2 else largest
        return f"holds the id {shown} (token {place:,}), not below vocab_size {vocab_size:,}; correct one of them"
    if eos_id is None:
        return None
    lacking = np.flatnonzero(tokens[ends - 1] != eos_id)
    if len(lacking):
        return (
            f"has documents that do not end with eos_id {eos_id} ({len(lacking):,} of {len(ends):,}, from document "
            f"{lacking[0]:,} of a shard on); name the id that ends them, or adopt with add_eos"
        )
    return None


def remedy(path: str) -> str:
    """Returns the remedy for a shard that differs from the manifest."""
    if Path(path).is_absolute():
        return "restore the original file, or run `genesis data adopt` again"
    return "run `genesis data prepare` again"


def map_index(corpus: Path, shard: ShardRecord) -> NDArray[np.unsignedinteger]:
    """Returns a shard's entries of its index, in a memory map: ends of documents, `shard.index_base` too large.

    Raises:
        UserError: The index is gone or has another size than the manifest says.
    """
    path = index_path(corpus, shard)
    found = _file_bytes(path)
    expected = (shard.index_start + shard.num_documents) * INDEX_ENTRY.itemsize
    if found < expected or (shard.index is None and found != expected):
        raise UserError(f"{path} has {found} bytes, but the manifest lists {expected}; {remedy(shard.path)}")
    return _map_run(path, INDEX_ENTRY, shard.index_start * INDEX_ENTRY.itemsize, shard.num_documents)


def _map_run(
    path: Path, dtype: np.dtype[np.unsignedinteger], byte_offset: int, count: int
) -> NDArray[np.unsignedinteger]:
    if not count:
        return np.empty(0, dtype)
    start = byte_offset % mmap.ALLOCATIONGRANULARITY  # a map can begin at a page only
    try:
        with open_file(path) as file:
            mapped = mmap.mmap(
                file.fileno(), start + count * dtype.itemsize, access=mmap.ACCESS_READ, offset=byte_offset - start
            )
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); put it back as it was") from None
    except ValueError:
        expected = byte_offset + count * dtype.itemsize
        raise UserError(f"{path} is truncated: it has {_file_bytes(path)} of {expected} bytes") from None
    return np.frombuffer(mapped, dtype, count, start)


def _file_bytes(path: Path) -> int:
    try:
        return check_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); put it back as it was") from None


def _write(path: Path, data: bytes | bytearray | memoryview) -> None:
    with create_file(path) as file:
        file.write(data)


def _readable(count: int) -> str:
    scaled = float(count)
    for prefix in ("", "k", "M", "G"):
        if scaled < 1000:
            return f"{scaled:.3g} {prefix}T"
        scaled /= 1000
    return f"{scaled:.3g} TT"
