"""Makes a corpus of token files of other tools: it writes a manifest and indices, and reads the tokens in place.

Each file is divided into shards of moderate size, so that the first read need not hash a file of a hundred gigabytes.
The document ends are taken from the file's own index, or found by the end-of-document id, and written to:

    CORPUS/manifest.json
    CORPUS/…                         the tokenizer's files, if there is a tokenizer
    CORPUS/train/SOURCE.index        uint64, the end of each document that has tokens, counted over all files
    CORPUS/train/SOURCE.added        uint64, positions of added document ends, counted with the added tokens

Memory is bounded by a shard. The corpus is renamed into place when all of it is on disk.
"""

import secrets
import shutil
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genesis.base.errors import UserError, numbered
from genesis.base.progress import Stage, stage
from genesis.data.foreign.find import ForeignFormat, find_token_files, read_token_file
from genesis.data.foreign.token_file import TokenFile
from genesis.data.manifest import CorpusManifest, ShardRecord, SourceRecord, Split, check_source_name, write_manifest
from genesis.data.shards import (
    ADDED_SUFFIX,
    HASH_ALGORITHM,
    INDEX_ENTRY,
    INDEX_SUFFIX,
    find_token_fault,
    hash_tokens,
    stored_dtype,
    token_dtype,
)
from genesis.tokenizer.files import write_files
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.files import create_file, sync_directory
from genesis_callbacks.base.untrusted import open_file

SHARD_TOKENS: Final = 1 << 24
_TOKENS_PER_BLOCK: Final = 1 << 20


@dataclass(frozen=True)
class ForeignSource:
    """One named source of tokens that another tool wrote.

    Args:
        name: Its name: letters, digits, ".", "_" and "-".
        paths: Files or directories of the training set, in their order.
        validation_paths: Files or directories of the validation set.
        weight: Share in the training mix, an integer in proportion to the other sources' weights.
        format: datatrove (.ds), megatron (.bin and .idx), flat (.npy, .bin) or huggingface (a saved dataset); auto
            decides by the names of the files.
        documents: Where documents end: index (at each document or row of the files) or eos (after each `eos_id`, across
            rows and files); auto uses the index of a format that has one.
        column: The column of ids in a Hugging Face dataset.
        dtype: The type of tokens in flat files without a header, such as uint16.
    """

    name: str
    paths: tuple[str, ...]
    validation_paths: tuple[str, ...] = ()
    weight: int = 1
    format: ForeignFormat | Literal["auto"] = "auto"
    documents: Literal["auto", "index", "eos"] = "auto"
    column: str = "input_ids"
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None

    def __post_init__(self) -> None:
        check_source_name(self.name)
        if not self.paths:
            raise UserError(f"source {self.name} has no paths; name files or directories")
        if self.weight < 1:
            raise UserError(f"source {self.name} has weight {self.weight}; give a whole number of at least 1")


@dataclass(frozen=True)
class AdoptOptions:
    """Options of `genesis data adopt`.

    Args:
        name: The corpus's name; the corpus is written to the directory OUT/NAME.
        sources: Named sources of tokens.
        out: The directory of corpora.
        tokenizer: The tokenizer that made the tokens, a file or directory; without it, bits per byte are unknown and
            samples are shown as ids.
        vocab_size: Number of ids; by default the tokenizer's.
        eos_id: The token that ends a document; by default the tokenizer's.
        bos_id: The token that begins a document, if any; by default the tokenizer's.
        add_eos: Whether to add `eos_id`, when they are read, to documents that lack it.
        check: all reads every token once, for hashes, ids and document ends; sizes checks only the files' sizes and
            indices, and leaves the rest to the first read of each shard.
    """

    name: str
    sources: tuple[ForeignSource, ...]
    out: Path = Path("corpora")
    tokenizer: Path | None = None
    vocab_size: int | None = None
    eos_id: int | None = None
    bos_id: int | None = None
    add_eos: bool = False
    check: Literal["all", "sizes"] = "all"

    def __post_init__(self) -> None:
        if not self.name or Path(self.name).name != self.name:
            raise UserError(f"corpus name {self.name!r} is not the name of one directory; give its parent by `out`")
        names = [source.name for source in self.sources]
        if not names:
            raise UserError("no sources are given; name files of tokens")
        if len(set(names)) < len(names):
            raise UserError(f"two sources have the same name: {', '.join(names)}; give each its own")
        if self.check == "sizes" and self.add_eos:
            raise UserError("add_eos needs check all, because only reading a document shows whether it lacks its end")

    @property
    def corpus(self) -> Path:
        """Returns the directory of the corpus."""
        return self.out / self.name


@dataclass(frozen=True)
class Adoption:
    """The result of `adopt_corpus`.

    Args:
        manifest: The corpus's manifest.
        num_files: Number of token files.
        num_added: Number of document ends that are added at reading.
        num_unfinished: Number of files whose last document continues in the next file.
        num_inner: Number of times that eos occurs within a document; 0 if only sizes were checked.
    """

    manifest: CorpusManifest
    num_files: int
    num_added: int
    num_unfinished: int
    num_inner: int


def adopt_corpus(options: AdoptOptions) -> Adoption:
    """Makes the corpus; no token is copied.

    Raises:
        UserError: The corpus already exists, or the files contradict the options; no partial result is left.
    """
    vocabulary = _read_vocabulary(options)
    if options.corpus.exists() and any(options.corpus.iterdir()):
        raise UserError(f"{options.corpus} is not empty; choose another name, or remove it")
    staging = options.out / f".{options.name}-{secrets.token_hex(4)}"
    try:
        staging.mkdir(parents=True)
        with stage("reading tokens", unit="tokens") as shown:
            adoption = _Adopter(options, vocabulary, staging, shown).adopt()
        if vocabulary.tokenizer is not None:
            write_files(vocabulary.tokenizer.files, staging)
        write_manifest(staging, adoption.manifest)
        staging.replace(options.corpus)
        sync_directory(options.out)
    except OSError as error:
        raise UserError(f"cannot make {options.corpus} ({error}); fix the cause and start again") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return adoption


# What the ids mean


@dataclass(frozen=True)
class _Vocabulary:
    size: int
    eos_id: int | None
    bos_id: int | None
    tokenizer: Tokenizer | None


def _read_vocabulary(options: AdoptOptions) -> _Vocabulary:
    given = {"vocab_size": options.vocab_size, "eos_id": options.eos_id, "bos_id": options.bos_id}
    tokenizer = None if options.tokenizer is None else open_tokenizer(options.tokenizer)
    if tokenizer is not None:
        for key, wanted in given.items():
            given[key] = getattr(tokenizer, key)
            if wanted not in (None, given[key]):
                raise UserError(
                    f"{key} is {wanted}, but the tokenizer's is {given[key]}; remove {key}, or give another tokenizer"
                )
    size, eos_id, bos_id = given.values()
    if size is None or (eos_id is None and (tokenizer is None or options.add_eos)):
        missing = "vocab_size" if size is None else "eos_id"
        raise UserError(f"{missing} is unknown; give {missing}, or the tokenizer")
    for key, value in (("eos_id", eos_id), ("bos_id", bos_id)):
        if value is not None and not 0 <= value < size:
            raise UserError(f"{key} {value} is not below vocab_size {size:,}; correct one of them")
    return _Vocabulary(size, eos_id, bos_id, tokenizer)


# Shards


class _Piece(NamedTuple):
    """Tokens of a file that become a shard.

    Args:
        file: The file.
        mtime_ns: The file's modification time before it was read.
        byte_offset: Offset of the first token.
        num_tokens: Number of tokens.
        ends: Document ends among the tokens; None if the file does not have them.
        ends_file: Whether these are the file's last tokens.
    """

    file: TokenFile
    mtime_ns: int
    byte_offset: int
    num_tokens: int
    ends: NDArray[np.int64] | None
    ends_file: bool


class _Adopter:
    """Makes the records of all shards, and writes their indices."""

    def __init__(self, options: AdoptOptions, vocabulary: _Vocabulary, staging: Path, shown: Stage) -> None:
        self._options = options
        self._vocabulary = vocabulary
        self._staging = staging
        self._shown = shown
        self._num_files = self._num_unfinished = self._num_inner = 0

    def adopt(self) -> Adoption:
        sources = self._options.sources
        manifest = CorpusManifest(
            name=self._options.name,
            hash_algorithm=HASH_ALGORITHM,
            tokenizer_hash="" if self._vocabulary.tokenizer is None else self._vocabulary.tokenizer.hash,
            vocab_size=self._vocabulary.size,
            bos_id=self._vocabulary.bos_id,
            eos_id=self._vocabulary.eos_id,
            token_dtype=token_dtype(self._vocabulary.size),
            train=tuple(self._adopt_source("train", source, source.paths) for source in sources),
            validation=tuple(
                self._adopt_source("validation", source, source.validation_paths)
                for source in sources
                if source.validation_paths
            ),
        )
        num_added = sum(sum(record.table.column("num_added")) for record in (*manifest.train, *manifest.validation))
        return Adoption(manifest, self._num_files, num_added, self._num_unfinished, self._num_inner)

    def _adopt_source(self, split: Split, source: ForeignSource, paths: tuple[str, ...]) -> SourceRecord:
        (self._staging / split).mkdir(exist_ok=True)
        index = f"{split}/{source.name}{INDEX_SUFFIX}"
        added_path = (self._staging / index).with_suffix(ADDED_SUFFIX)
        shards: list[ShardRecord] = []
        num_documents = num_tokens = num_added = 0
        with create_file(self._staging / index) as index_file, create_file(added_path) as added_file:
            for piece, is_last in _with_last(self._find_pieces(source, paths)):
                shard, ends, added = self._look_into(piece, is_last)
                entries = (ends + num_tokens).astype(INDEX_ENTRY)
                index_file.write(entries.tobytes())
                added_file.write((added + num_tokens).astype(INDEX_ENTRY).tobytes())
                shards.append(
                    replace(
                        shard,
                        index=index,
                        index_hash=hash_tokens(entries),
                        index_start=num_documents,
                        index_base=num_tokens,
                    )
                )
                num_documents += shard.num_documents
                num_tokens += shard.num_tokens
                num_added += shard.num_added
                self._shown.advance(piece.num_tokens)
        if not num_added:
            added_path.unlink()
        sync_directory(self._staging / split)
        if not num_tokens:
            raise UserError(f"source {source.name}: {', '.join(paths)} has no tokens; remove the source")
        if self._vocabulary.eos_id is not None and num_documents == num_added and not self._options.add_eos:
            raise UserError(
                f"source {source.name}: {', '.join(paths)} has no eos_id {self._vocabulary.eos_id}; give the id that "
                "ends documents, or add_eos if each file is one document"
            )
        num_text_bytes = sum(shard.num_text_bytes for shard in shards)
        return SourceRecord(source.name, source.weight, num_documents, num_text_bytes, num_tokens, shards)

    def _find_pieces(self, source: ForeignSource, paths: tuple[str, ...]) -> Iterator[_Piece]:
        for found in find_token_files(paths, source.format):
            mtime_ns = found.path.stat().st_mtime_ns
            file = read_token_file(found, source.column, source.dtype)
            by_eos = source.documents == "eos" or (source.documents == "auto" and file.read_ends is None)
            if not by_eos and file.read_ends is None:
                raise UserError(f"{file.path} has no index of documents; set documents to eos")
            if by_eos and self._vocabulary.eos_id is None:
                raise UserError(f"{file.path}: documents would end at eos_id, but the tokenizer has none; give eos_id")
            if by_eos and self._options.check == "sizes":
                raise UserError(f"{file.path}: documents end at eos_id, which must be searched; set check to all")
            starts = list(accumulate((run.num_tokens for run in file.runs), initial=0))
            for start, num_tokens, ends in _cut_evenly(starts) if by_eos else _cut_at_documents(file, starts):
                run = bisect_right(starts, start) - 1
                in_run_bytes = (start - starts[run]) * stored_dtype(file.dtype).itemsize
                ends_file = start + num_tokens == starts[-1]
                yield _Piece(file, mtime_ns, file.runs[run].byte_offset + in_run_bytes, num_tokens, ends, ends_file)
            self._num_files += 1

    def _look_into(self, piece: _Piece, is_last: bool) -> tuple[ShardRecord, NDArray[np.int64], NDArray[np.int64]]:
        """Returns a piece's record, without its index entries, the ends of its documents, and the added ends.

        Raises:
            UserError: An id or a document's end is invalid, or the file changed while it was read.
        """
        if self._options.check == "sizes":
            assert piece.ends is not None
            ends, is_added, num_text_bytes, digest = piece.ends, np.zeros(len(piece.ends), np.bool_), 0, ""
            num_inner = 0
        else:
            tokens = _map_piece(piece)
            ends, is_added = self._find_ends(piece, tokens, is_last)
            fault = find_token_fault(tokens, self._vocabulary.size, self._vocabulary.eos_id, ends[~is_added])
            if fault is not None:
                raise UserError(f"{piece.file.path} {fault}")
            num_text_bytes, digest = self._count_text_bytes(tokens), hash_tokens(tokens)
            num_inner = 0
            if self._vocabulary.eos_id is not None:
                num_inner = int(np.count_nonzero(tokens == self._vocabulary.eos_id) - np.count_nonzero(~is_added))
        status = piece.file.path.stat()
        if (status.st_size, status.st_mtime_ns) != (piece.file.file_bytes, piece.mtime_ns):
            raise UserError(f"{piece.file.path} changed while it was read; start again when the file is finished")
        ends = ends + np.cumsum(is_added)
        added = ends[is_added] - 1
        shard = ShardRecord(
            path=str(piece.file.path),
            num_tokens=piece.num_tokens + len(added),
            num_documents=len(ends),
            num_text_bytes=num_text_bytes,
            file_bytes=piece.file.file_bytes,
            hash=digest,
            index_hash="",
            dtype=piece.file.dtype,
            byte_offset=piece.byte_offset,
            num_added=len(added),
            mtime_ns=None if digest else piece.mtime_ns,
            ends_by_index=self._vocabulary.eos_id is None or num_inner > 0,
        )
        self._num_inner += num_inner
        self._num_unfinished += piece.ends_file and (not len(ends) or int(ends[-1]) < shard.num_tokens)
        return shard, ends, added

    def _find_ends(
        self, piece: _Piece, tokens: NDArray[np.unsignedinteger], is_last: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the document ends, and which of them must be added.

        The last token of a stream is always a document's end, because packing relies on that.
        """
        eos_id = self._vocabulary.eos_id
        if piece.ends is not None:
            is_added = (tokens[piece.ends - 1] != eos_id) & self._options.add_eos
            return piece.ends, is_added
        ends = np.flatnonzero(tokens == eos_id) + 1
        is_open = not len(ends) or int(ends[-1]) < len(tokens)
        if is_open and (is_last or (piece.ends_file and self._options.add_eos)):
            ends = np.append(ends, len(tokens))
            return ends, np.arange(len(ends)) == len(ends) - 1
        return ends, np.zeros(len(ends), np.bool_)

    def _count_text_bytes(self, tokens: NDArray[np.unsignedinteger]) -> int:
        if self._vocabulary.tokenizer is None:
            return 0
        token_num_bytes = self._vocabulary.tokenizer.token_num_bytes
        blocks = (tokens[first : first + _TOKENS_PER_BLOCK] for first in range(0, len(tokens), _TOKENS_PER_BLOCK))
        return sum(int(token_num_bytes[block].sum(dtype=np.int64)) for block in blocks)


def _map_piece(piece: _Piece) -> NDArray[np.unsignedinteger]:
    dtype = stored_dtype(piece.file.dtype)
    with open_file(piece.file.path) as file:
        return np.memmap(file, dtype, "r", offset=piece.byte_offset, shape=(piece.num_tokens,))


def _with_last(pieces: Iterator[_Piece]) -> Iterator[tuple[_Piece, bool]]:
    """Yields each piece, and whether it is the last one."""
    last = next(pieces, None)
    for piece in pieces:
        assert last is not None
        yield last, False
        last = piece
    if last is not None:
        yield last, True


def _cut_evenly(starts: list[int]) -> Iterator[tuple[int, int, None]]:
    """Yields start and size of pieces of at most `SHARD_TOKENS` within the runs between `starts`."""
    for begin, end in pairwise(starts):
        for start in range(begin, end, SHARD_TOKENS):
            yield start, min(SHARD_TOKENS, end - start), None


def _cut_at_documents(file: TokenFile, starts: list[int]) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yields (start, size, document ends) for pieces of whole documents; documents without tokens are skipped."""
    assert file.read_ends is not None
    start = last = 0
    waiting = np.empty(0, np.int64)
    for block in file.read_ends():
        lengths = np.diff(block, prepend=last)
        if len(block) and (lengths.min() < 0 or block[-1] > starts[-1]):
            raise UserError(f"{file.path} has an index whose documents are not contiguous; write the index again")
        waiting = np.concatenate((waiting, block[lengths > 0]))
        last = int(waiting[-1]) if len(waiting) else last
        while len(waiting):
            run_end = starts[bisect_right(starts, start)]
            cut = int(np.searchsorted(waiting, min(start + SHARD_TOKENS, run_end)))
            if cut == len(waiting):
                break
            yield start, int(waiting[cut]) - start, waiting[: cut + 1] - start
            start, waiting = int(waiting[cut]), waiting[cut + 1 :]
    if start != starts[-1]:
        raise UserError(
            f"{file.path} has {numbered(starts[-1], 'tokens')}, but its index ends at {last:,}; write the index again"
        )
