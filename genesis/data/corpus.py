"""Reads a corpus: each source of a split as one stream of tokens.

Opening reads the manifest, the tokenizer and the size of every token file. A shard is mapped into memory, and its hash
compared, when one of its tokens is first read. Beyond a limit, the least recently used maps are closed, so that a
corpus may have any number of shards. The index of document ends is checked when it is read.
"""

import os
import resource
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain
from pathlib import Path
from threading import Lock
from typing import Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt8
from numpy import ndarray

from genesis.base.errors import UserError, blaming_directory, numbered
from genesis.data.manifest import MANIFEST_NAME, CorpusManifest, ShardRecord, ShardTable, SourceRecord, read_manifest
from genesis.data.shards import (
    HASH_ALGORITHM,
    INDEX_ENTRY,
    find_token_fault,
    hash_index,
    hash_tokens,
    index_path,
    labels_path,
    map_index,
    map_labels,
    map_tokens,
    read_added,
    read_index,
    remedy,
    shard_path,
    stored_dtype,
)
from genesis.tokenizer.open import find_format, has_tokenizer, list_file_names, open_tokenizer
from genesis_callbacks.base.untrusted import path_below

MAX_OPEN_MAPS: Final = 1_000
_STAT_THREADS: Final = 16
"""Number of threads that stat files: on a network or a cold disk each stat waits for a response."""
_FILES_PER_THREAD: Final = 1_000
_LABELS_AT_ONCE: Final = 1 << 22
_FILES_PER_SHARD: Final = 3
"""Files per shard: tokens, document ends and labels."""

VerifyHashes = Literal["first_touch", "never"]


@dataclass(frozen=True)
class StoredTokens:
    """The tokens of a shard as stored, and the positions at which document ends are added to them.

    Args:
        stored: The content of the file.
        added: Positions in the shard, ascending, at which the file lacks a document's end.
        eos_id: The token to add at these positions.
    """

    stored: Integer[ndarray, " stored"]
    added: Int64[ndarray, " added"]
    eos_id: int

    def read(self, start: int, out: Integer[ndarray, " count"]) -> None:
        """Fills `out` with the shard's tokens from `start` on."""
        stop = start + len(out)
        if not len(self.added):
            out[:] = self.stored[start:stop]
            return
        first, last = np.searchsorted(self.added, (start, stop)).tolist()
        is_stored = np.ones(len(out), np.bool_)
        is_stored[self.added[first:last] - start] = False
        out[is_stored] = self.stored[start - first : stop - last]
        out[~is_stored] = self.eos_id


class OpenShard(NamedTuple):
    """The maps of one shard.

    Args:
        tokens: The shard's tokens.
        ends: The shard's entries of the index, each too large by `index_base`.
        index_base: Number of tokens that the index counts before the shard.
        labels: One byte per token, 0 if the token has no label; None if all tokens have one.
    """

    tokens: StoredTokens
    ends: Int64[ndarray, " documents"]
    index_base: int
    labels: Integer[ndarray, " tokens"] | None


class ShardMaps:
    """The memory maps of a corpus's shards. Several threads may read at once.

    Args:
        corpus: The corpus's directory.
        manifest: The corpus's manifest.
        verify_hashes: Whether to compare a shard's hash with the manifest's when the shard is first read, and again
            when its file has changed; a shard without a hash has its tokens checked instead.
        max_open: Number of shards whose maps may be open at the same time.
    """

    def __init__(self, corpus: Path, manifest: CorpusManifest, verify_hashes: VerifyHashes, max_open: int) -> None:
        self._corpus = corpus
        self._manifest = manifest
        self._verify_hashes = verify_hashes
        self._max_open = max_open
        self._verified: dict[tuple[str, int], int] = {}
        self._open: OrderedDict[tuple[int, int], OpenShard] = OrderedDict()
        self._lock = Lock()

    @property
    def eos_id(self) -> int | None:
        """Returns the token at the end of documents, None if the corpus has none."""
        return self._manifest.eos_id

    def open(self, shards: ShardTable, number: int) -> OpenShard:
        """Returns the maps of one shard of a source.

        Raises:
            UserError: A hash differs from the manifest's, or the shard has no hash and its tokens are invalid.
        """
        key = (id(shards), number)
        with self._lock:
            opened = self._open.get(key)
            if opened is None:
                opened = self._open[key] = self._map(shards[number])
                if len(self._open) > self._max_open:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(key)
            return opened

    def ends(self, shard: ShardRecord) -> Int64[ndarray, " documents"]:
        """Returns the ends of a shard's documents, relative to the shard's beginning.

        Raises:
            UserError: The index is missing or too short.
        """
        return read_index(self._corpus, shard)

    def _map(self, shard: ShardRecord) -> OpenShard:
        if self._verify_hashes == "first_touch":
            key = (shard.path, shard.byte_offset)
            _, (mtime_ns,) = _stat_files(self._corpus, [shard.path])
            if self._verified.get(key) != mtime_ns:  # not verified yet, or the file has changed since
                # In a separate map, closed right after: touched pages count as this process's memory while it is open.
                self._verify(shard, map_tokens(self._corpus, self._manifest.token_dtype, shard))
                self._verified[key] = mtime_ns
        stored = map_tokens(self._corpus, self._manifest.token_dtype, shard)
        tokens = StoredTokens(stored, read_added(self._corpus, shard), self._manifest.padding_id)
        ends = map_index(self._corpus, shard).view("<i8")  # numpy would copy an unsigned array to search it
        return OpenShard(tokens, ends, shard.index_base, map_labels(self._corpus, shard))

    def _verify(self, shard: ShardRecord, stored: Integer[ndarray, " stored"]) -> None:
        path = self._corpus / shard.path
        if not shard.hash:
            fault = find_token_fault(stored, self._manifest.vocab_size, self._manifest.eos_id, self.ends(shard))
            if fault is not None:
                raise UserError(f"{path} {fault}")
        for path, found, recorded in _hash_shard(self._corpus, shard, stored):
            if found != recorded:
                raise UserError(
                    f"{path} has hash {found[:16]}, the manifest lists {recorded[:16]}: the shard is damaged or has "
                    f"changed; {remedy(shard.path)}"
                )


class TokenSource:
    """All tokens of one source, across its shards, as one stream. Several threads may read at once.

    Attributes:
        has_conversations: Whether its documents are conversations.
    """

    def __init__(self, record: SourceRecord, maps: ShardMaps, *, has_conversations: bool = False) -> None:
        self.name = record.name
        self.has_conversations = has_conversations
        self.weight = record.weight
        self.num_documents = record.num_documents
        self._maps = maps
        self._shards = record.table
        self._starts: list[int] = [0, *accumulate(self._shards.column("num_tokens"))]
        self.num_tokens = self._starts[-1]

    @property
    def num_shards(self) -> int:
        """Returns the number of shards of the source."""
        return len(self._shards)

    def read(self, start: int, out: Integer[ndarray, " count"]) -> None:
        """Fills `out` with the tokens from `start` on; the stream must have that many."""
        shard = bisect_right(self._starts, start) - 1
        if 0 <= shard < len(self._starts) - 1 and start + len(out) <= self._starts[shard + 1]:
            # Nearly every read is in one shard: short sequences are read in half of the time that a span takes.
            self._maps.open(self._shards, shard).tokens.read(start - self._starts[shard], out)
            return
        for opened, offset, place, count in self._open_span(start, len(out)):
            opened.tokens.read(offset, out[place : place + count])

    @property
    def end_id(self) -> int | None:
        """Returns the token that ends each document and occurs nowhere else; None if only the index has the ends."""
        # A shard without a hash was adopted by its size, so that nothing has checked for eos within its documents.
        is_known = "ends_by_index" not in self._shards.columns and all(self._shards.column("hash"))
        return self._maps.eos_id if is_known else None

    @property
    def has_label_column(self) -> bool:
        """Returns whether tokens other than the first of a document may lack a label."""
        return "labels_hash" in self._shards.columns

    def read_labels(self, start: int, out: UInt8[ndarray, " count"] | Bool[ndarray, " count"]) -> None:
        """Fills `out` with which tokens from `start` on have labels, or their bytes of `mark_labels`."""
        for opened, offset, place, count in self._open_span(start, len(out)):
            labels = opened.labels
            out[place : place + count] = 1 if labels is None else labels[offset : offset + count]

    def count_labels(self, places: Int64[ndarray, " places"]) -> Int64[ndarray, " places"]:
        """Returns how many tokens between the first of `places` and each of them have labels by the label column.

        Args:
            places: Positions in the stream, ascending; a position beyond the end counts as the end.
        """
        counts = np.zeros(len(places), np.int64)
        places = np.minimum(places, self.num_tokens)
        num_before, num_placed = 0, 0
        start = int(places[0]) if len(places) else 0
        while num_placed < len(places):
            stop = min(start + _LABELS_AT_ONCE, self.num_tokens)
            has_label = np.empty(stop - start, np.bool_)
            self.read_labels(start, has_label)
            running = np.concatenate(([0], np.cumsum(has_label, dtype=np.int64)))
            last = int(np.searchsorted(places, stop, side="right"))
            counts[num_placed:last] = num_before + running[places[num_placed:last] - start]
            num_before, num_placed, start = num_before + int(running[-1]), last, stop
        return counts

    def ends_between(self, start: int, stop: int) -> Int64[ndarray, " ends"]:
        """Returns the document ends in the stream that are greater than `start` and at most `stop`."""
        found = []
        for opened, offset, place, count in self._open_span(start, stop - start):
            begin = opened.index_base + offset
            first, last = opened.ends.searchsorted((begin, begin + count), side="right")
            found.append(opened.ends[first:last] + (start + place - begin))
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.int64), *found])

    def _open_span(self, start: int, num_tokens: int) -> Iterator[tuple[OpenShard, int, int, int]]:
        """Yields (shard, offset in the shard, offset in the span, number of tokens) for each shard of a span."""
        assert 0 <= start <= self.num_tokens - num_tokens, "read beyond the end of a source"
        num_read = 0
        shard = bisect_right(self._starts, start) - 1
        while num_read < num_tokens:
            offset = start + num_read - self._starts[shard]
            count = min(num_tokens - num_read, self._starts[shard + 1] - self._starts[shard] - offset)
            if count:  # a shard may be empty
                yield self._maps.open(self._shards, shard), offset, num_read, count
            num_read += count
            shard += 1

    def shard(self, number: int) -> ShardRecord:
        """Returns the record of one shard."""
        return self._shards[number]

    def document_start(self, number: int, document: int) -> int:
        """Returns the start, in the source's stream, of a document that ends in shard `number`."""
        if document:
            return int(self.shard_ends(number)[document - 1])
        earlier = (self.shard_ends(shard) for shard in reversed(range(number)))
        return next((int(ends[-1]) for ends in earlier if len(ends)), 0)

    def shard_ends(self, number: int) -> Int64[ndarray, " documents"]:
        """Returns the ends, in the source's stream, of the documents that end in shard `number`.

        Raises:
            UserError: The index is missing, or its size differs from the manifest's.
        """
        return self._maps.ends(self._shards[number]) + self._starts[number]

    def document_ends(self) -> Iterator[Int64[ndarray, " documents"]]:
        """Yields the ends of all documents in the source's stream, one array per shard."""
        return map(self.shard_ends, range(self.num_shards))


@dataclass(frozen=True)
class Corpus:
    """An open corpus; `open_corpus` builds it."""

    path: Path
    manifest: CorpusManifest
    train: tuple[TokenSource, ...]
    validation: tuple[TokenSource, ...]

    def token_num_bytes(self) -> Integer[ndarray, " vocab"]:
        """Returns the number of UTF-8 bytes behind each id; all zeros if the tokenizer is unknown."""
        if not self.manifest.tokenizer_hash:
            return np.zeros(self.manifest.vocab_size, np.int32)
        return open_tokenizer(self.path).token_num_bytes


@blaming_directory("prepare the corpus again")
def open_corpus(
    path: Path,
    *,
    tokenizer_hash: str | None = None,
    verify_hashes: VerifyHashes = "first_touch",
) -> Corpus:
    """Opens the corpus in the directory `path`.

    Args:
        path: A directory that `genesis data prepare` or `genesis data adopt` wrote.
        tokenizer_hash: The tokenizer that the corpus must have been made with; None accepts any.
        verify_hashes: When to compare the shards' hashes with the manifest's.

    Raises:
        UserError: The corpus or a file is missing, a size differs from the manifest's, or the tokenizer is
            not the one that made the tokens.
    """
    manifest = read_manifest(path)
    if manifest.hash_algorithm != HASH_ALGORITHM:
        raise UserError(
            f"{path} has hashes of algorithm {manifest.hash_algorithm!r}, but this version reads {HASH_ALGORITHM!r}; "
            "prepare the corpus again"
        )
    _check_tokenizer(path, manifest, tokenizer_hash)
    for source in (*manifest.train, *manifest.validation):
        _check_sizes(path, manifest, source.table)
    maps = ShardMaps(path, manifest, verify_hashes, _limit_maps())
    with_chat = () if manifest.chat is None else manifest.chat.sources

    def build(record: SourceRecord) -> TokenSource:
        return TokenSource(record, maps, has_conversations=record.name in with_chat)

    return Corpus(
        path,
        manifest,
        train=tuple(map(build, manifest.train)),
        validation=tuple(map(build, manifest.validation)),
    )


def find_fault(corpus: Path, manifest: CorpusManifest, shard: ShardRecord) -> str | None:
    """Returns a line about how a shard's tokens or index differ from the manifest, None if they are equal."""
    tokens, index = shard_path(corpus, shard), index_path(corpus, shard)
    index_bytes = (shard.index_start + shard.num_documents) * INDEX_ENTRY.itemsize
    for path, num_bytes, is_shared in (
        (tokens, shard.file_bytes, False),
        (index, index_bytes, shard.index is not None),
    ):
        if not path.exists():
            return f"{path} is missing"
        found_bytes = path.stat().st_size
        if found_bytes < num_bytes or (found_bytes > num_bytes and not is_shared):
            return f"{path} has {found_bytes:,} bytes, but the manifest lists {num_bytes:,}"
    stored = map_tokens(corpus, manifest.token_dtype, shard)
    try:
        for path, found, recorded in _hash_shard(corpus, shard, stored):
            if found != recorded:
                return f"{path} has hash {found[:16]}, but the manifest lists {recorded[:16]}"
    except UserError as error:  # the label file is missing or truncated
        return str(error)
    if shard.hash:
        return None
    fault = find_token_fault(stored, manifest.vocab_size, manifest.eos_id, read_index(corpus, shard))
    return fault and f"{tokens} {fault}"


def _hash_shard(
    corpus: Path, shard: ShardRecord, stored: Integer[ndarray, " stored"]
) -> Iterator[tuple[Path, str, str]]:
    """Yields (path, hash, expected hash) for each file of a shard that has a hash."""
    path = shard_path(corpus, shard)
    if shard.hash:
        yield path, hash_tokens(stored), shard.hash
    yield index_path(corpus, shard), hash_index(corpus, shard), shard.index_hash
    labels = map_labels(corpus, shard)
    if labels is not None:
        yield labels_path(path), hash_tokens(labels), shard.labels_hash


def _check_tokenizer(path: Path, manifest: CorpusManifest, expected: str | None) -> None:
    here = manifest.tokenizer_hash
    if expected is not None and expected != here and not (here and has_tokenizer(path, expected)):
        made_with = f"was made with the tokenizer {here[:16]}" if here else "has ids of an unknown tokenizer"
        raise UserError(
            f"{path} {made_with}, but this run's is {expected[:16]}; prepare the corpus again with this run's tokenizer"
        )
    if not here:
        return
    if find_format(path) is None:
        looked_for = ", ".join(list_file_names())
        raise UserError(
            f"{path} lacks its tokenizer {here[:16]} (searched for {looked_for}); restore its files, or prepare again"
        )
    if not has_tokenizer(path, here):
        raise UserError(
            f"{path} has another tokenizer than {here[:16]}, with which it was made; restore its files, or "
            "prepare the corpus again"
        )


def _check_sizes(corpus: Path, manifest: CorpusManifest, shards: ShardTable) -> None:
    """Compares sizes of the token files with the manifest and, for files without a hash, modification times."""
    # Their directories, and not each shard: there can be a hundred thousand. Whoever opens a shard checks the rest.
    for home in {path.rpartition("/")[0] for path in shards.column("path")}:
        if home and not home.startswith("/"):
            path_below(corpus, home, corpus / MANIFEST_NAME)
    found_bytes, found_mtimes = _stat_files(corpus, shards.column("path"))
    expected_bytes = np.array(shards.column("file_bytes"), np.int64)
    wrong = np.flatnonzero(found_bytes != expected_bytes)
    if len(wrong):
        shard = shards[wrong[0]]
        raise UserError(
            f"{corpus / shard.path} has {found_bytes[wrong[0]]} bytes, but the manifest lists {shard.file_bytes}; "
            f"{remedy(shard.path)}"
        )
    for number, mtime_ns in enumerate(shards.columns.get("mtime_ns", ())):
        if mtime_ns is not None and mtime_ns != found_mtimes[number]:
            path = corpus / shards[number].path
            raise UserError(f"{path} has changed since it was adopted; {remedy(shards[number].path)}")
    token_bytes = np.array([_item_bytes(dtype or manifest.token_dtype) for dtype in shards.column("dtype")], np.int64)
    num_stored = np.array(shards.column("num_tokens"), np.int64) - np.array(shards.column("num_added"), np.int64)
    ends = np.array(shards.column("byte_offset"), np.int64) + num_stored * token_bytes
    is_whole = np.array([index is None for index in shards.column("index")], np.bool_)
    wrong = np.flatnonzero((ends > expected_bytes) | is_whole & (ends != expected_bytes))
    if len(wrong):
        shard = shards[wrong[0]]
        raise UserError(
            f"the manifest of {corpus} lists {numbered(shard.num_tokens, 'tokens')} of {token_bytes[wrong[0]]} bytes "
            f"but {shard.file_bytes} bytes for {shard.path}; {remedy(shard.path)}"
        )


def _stat_files(corpus: Path, paths: Sequence[str]) -> tuple[Int64[ndarray, " files"], Int64[ndarray, " files"]]:
    """Returns size and modification time of each file; a file that is listed more than once is read once."""
    unique = list(dict.fromkeys(paths))
    directory = os.open(corpus, os.O_RDONLY)
    try:
        parts = [unique[first : first + _FILES_PER_THREAD] for first in range(0, len(unique), _FILES_PER_THREAD)]
        look = partial(_stat_part, corpus, directory)
        if len(parts) > 1:
            with ThreadPoolExecutor(_STAT_THREADS) as pool:
                looked = list(pool.map(look, parts))
        else:
            looked = list(map(look, parts))
    finally:
        os.close(directory)
    found = dict(zip(unique, chain.from_iterable(looked), strict=True))
    status_of = np.array([found[path] for path in paths], np.int64).reshape(-1, 2)
    return status_of[:, 0], status_of[:, 1]


def _stat_part(corpus: Path, directory: int, paths: Sequence[str]) -> list[tuple[int, int]]:
    found = []
    for path in paths:
        try:
            status = os.stat(path, dir_fd=directory)  # building and resolving a Path takes twice as long
        except OSError as error:
            raise UserError(f"{corpus / path} cannot be read ({error.strerror}); {remedy(path)}") from None
        found.append((status.st_size, status.st_mtime_ns))
    return found


@cache
def _item_bytes(dtype: str) -> int:
    return stored_dtype(dtype).itemsize


def _limit_maps() -> int:
    """Returns how many shards may be mapped: the maps need at most half of the files that this process may open."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = soft_limit // (2 * _FILES_PER_SHARD)
    return MAX_OPEN_MAPS if soft_limit == resource.RLIM_INFINITY else max(1, min(MAX_OPEN_MAPS, most))
