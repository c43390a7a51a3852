"""Reads a prepared corpus: each source of a split as one stream of tokens.

Opening looks at the manifest, the tokenizer and the size of every file. A shard is mapped into memory, and its hash
compared, when one of its tokens is first read; the least recently read maps are closed beyond a limit, so that a corpus
may have any number of shards.
"""

import mmap
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Final, Literal

import numpy as np
from blake3 import blake3
from jaxtyping import Integer
from numpy import ndarray

from genesis.data.manifest import CorpusManifest, ShardRecord, SourceRecord, Split, read_manifest
from genesis.data.shards import HASH_ALGORITHM, hash_file, little_endian, shard_files
from genesis.errors import UserError
from genesis.tokenizer.train import MODEL_NAME

MAX_OPEN_MAPS: Final = 1_000
INDEX_ENTRY_BYTES: Final = 8

VerifyHashes = Literal["first_touch", "never"]


class ShardMaps:
    """The memory maps of a corpus's shards. Several threads may read at once.

    Args:
        corpus: The corpus's directory.
        manifest: What it holds.
        verify_hashes: Whether to compare a shard's hash with the manifest's when it is first read.
        max_open: Maps that stay open at the same time.
    """

    def __init__(
        self, corpus: Path, manifest: CorpusManifest, verify_hashes: VerifyHashes, max_open: int = MAX_OPEN_MAPS
    ) -> None:
        self._corpus = corpus
        self._dtype = little_endian(manifest.token_dtype)
        self._verify_hashes = verify_hashes
        self._max_open = max_open
        self._verified: set[str] = set()
        self._open: OrderedDict[str, Integer[ndarray, " tokens"]] = OrderedDict()
        self._lock = Lock()

    @property
    def num_open(self) -> int:
        """Returns how many shards are mapped now."""
        return len(self._open)

    def tokens(self, shard: ShardRecord) -> Integer[ndarray, " tokens"]:
        """Returns the tokens of a shard as they lie on disk.

        Raises:
            UserError: Its hash is not the manifest's.
        """
        with self._lock:
            tokens = self._open.get(shard.path)
            if tokens is None:
                tokens = self._open[shard.path] = self._map(shard)
                if len(self._open) > self._max_open:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(shard.path)
            return tokens

    def _map(self, shard: ShardRecord) -> Integer[ndarray, " tokens"]:
        path = self._corpus / shard.path
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._verify_hashes == "first_touch" and shard.path not in self._verified:
            found = blake3(mapped, max_threads=blake3.AUTO).hexdigest()
            if found != shard.hash:
                raise UserError(
                    f"{path} has hash {found[:16]}, the manifest says {shard.hash[:16]}: the shard is damaged or was "
                    "changed; run `genesis data prepare` again"
                )
            self._verified.add(shard.path)
        return np.frombuffer(mapped, self._dtype)


class TokenSource:
    """All tokens of one source, across its shards, as one stream. Several threads may read at once."""

    def __init__(self, record: SourceRecord, maps: ShardMaps) -> None:
        self.name = record.name
        self.weight = record.weight
        self._maps = maps
        self._shards = tuple(shard for shard in record.shards if shard.num_tokens)
        self._starts = [0, *accumulate(shard.num_tokens for shard in self._shards)]
        self.num_tokens = self._starts[-1]

    def read(self, start: int, out: Integer[ndarray, " count"]) -> None:
        """Fills `out` with the tokens from `start` on; the stream must hold as many."""
        assert 0 <= start <= self.num_tokens - len(out), "read beyond the end of a source"
        num_read = 0
        shard = bisect_right(self._starts, start) - 1
        while num_read < len(out):
            offset = start + num_read - self._starts[shard]
            part = self._maps.tokens(self._shards[shard])[offset : offset + len(out) - num_read]
            out[num_read : num_read + len(part)] = part
            num_read += len(part)
            shard += 1


@dataclass(frozen=True)
class Corpus:
    """An opened corpus; `open_corpus` makes one."""

    path: Path
    manifest: CorpusManifest
    train: tuple[TokenSource, ...]
    validation: tuple[TokenSource, ...]

    @property
    def tokenizer_path(self) -> Path:
        """Returns the tokenizer that made the tokens."""
        return self.path / MODEL_NAME


def open_corpus(
    path: Path,
    *,
    tokenizer_hash: str | None = None,
    verify_hashes: VerifyHashes = "first_touch",
    max_open_maps: int = MAX_OPEN_MAPS,
) -> Corpus:
    """Opens the corpus in the directory `path`.

    Args:
        path: Where `genesis data prepare` wrote it.
        tokenizer_hash: The tokenizer that it must have been made with; by default any.
        verify_hashes: When to compare the shards' hashes with the manifest's.
        max_open_maps: Shards that stay mapped at the same time.

    Raises:
        UserError: There is no corpus, a file is missing or has another size than the manifest says, or the tokenizer is
            not the one that made the tokens.
    """
    manifest = read_manifest(path)
    if manifest.hash_algorithm != HASH_ALGORITHM:
        raise UserError(
            f"{path} has hashes made with {manifest.hash_algorithm!r}, this version reads {HASH_ALGORITHM!r}; "
            "prepare the corpus again"
        )
    _check_tokenizer(path, manifest, tokenizer_hash)
    for split in ("train", "validation"):
        _check_sizes(path, manifest, split)
    maps = ShardMaps(path, manifest, verify_hashes, max_open_maps)
    return Corpus(
        path,
        manifest,
        train=tuple(TokenSource(record, maps) for record in manifest.train),
        validation=tuple(TokenSource(record, maps) for record in manifest.validation),
    )


def _check_tokenizer(path: Path, manifest: CorpusManifest, expected: str | None) -> None:
    if expected is not None and expected != manifest.tokenizer_hash:
        raise UserError(
            f"{path} was made with the tokenizer {manifest.tokenizer_hash[:16]}, this run's is {expected[:16]}; "
            "prepare the corpus again with this run's tokenizer"
        )
    model = path / MODEL_NAME
    if not model.is_file():
        raise UserError(
            f"{model} is missing; copy the tokenizer {manifest.tokenizer_hash[:16]} there, or prepare again"
        )
    found = hash_file(model)
    if found != manifest.tokenizer_hash:
        raise UserError(
            f"{model} is the tokenizer {found[:16]}, the corpus was made with {manifest.tokenizer_hash[:16]}; put that "
            "one back, or prepare the corpus again"
        )


def _check_sizes(path: Path, manifest: CorpusManifest, split: Split) -> None:
    token_bytes = little_endian(manifest.token_dtype).itemsize
    for source in manifest.split(split):
        for shard in source.shards:
            tokens, index, _ = shard_files(path / shard.path)
            _check_size(tokens, shard.file_bytes)
            _check_size(index, shard.num_documents * INDEX_ENTRY_BYTES)
            if shard.num_tokens * token_bytes != shard.file_bytes:
                raise UserError(
                    f"{path} has a manifest that says {shard.num_tokens} tokens of {token_bytes} bytes and "
                    f"{shard.file_bytes} bytes for {shard.path}; prepare the corpus again"
                )


def _check_size(file: Path, expected_bytes: int) -> None:
    remedy = "run `genesis data prepare` again"
    try:
        found_bytes = file.stat().st_size
    except OSError as error:
        raise UserError(f"{file} can't be read ({error.strerror}); {remedy}") from None
    if found_bytes != expected_bytes:
        raise UserError(f"{file} has {found_bytes} bytes, the manifest says {expected_bytes}; {remedy}")
