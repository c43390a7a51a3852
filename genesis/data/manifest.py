"""The corpus manifest: everything that a corpus contains, with hashes.

`genesis data prepare` and `genesis data adopt` write the manifest last and atomically; every reader of a corpus starts
with it. The shards of a source are stored by column, on disk and in memory, because a large corpus has a hundred
thousand of them.

A manifest is written in schema 2 whenever that can express it, so that earlier versions can read it; they find document
ends by eos. It needs schema 3 if a shard has `ends_by_index` or `labels_hash`, schema 4 if it has `chat`, and schema 5
if its documents are pairs of answers, which earlier versions would take for conversations.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, Self, overload

from blake3 import blake3

from genesis.base.errors import UserError
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, RefusedFileError, find_name_fault, read_file

SCHEMA_VERSION: Final = 6
FEW_HELD_OUT: Final = 10
"""Below this number of held-out documents, their loss says little."""
MANIFEST_NAME: Final = "manifest.json"

Split = Literal["train", "validation"]
SPLITS: Final[tuple[Split, ...]] = ("train", "validation")
_HASHED_COLUMNS: Final = ("num_tokens", "num_documents", "hash", "index_hash", "labels_hash")


@dataclass(frozen=True)
class ShardRecord:
    """One token shard: a run of tokens in a file, and where its documents end.

    Args:
        path: The file, relative to the corpus; absolute for token files that were adopted in place.
        num_tokens: Number of tokens, including added ones.
        num_documents: Number of documents that end in the shard.
        num_text_bytes: Number of UTF-8 bytes of their text; 0 if unknown.
        file_bytes: Size of the whole file.
        hash: Hash of the run's bytes; empty if unknown.
        index_hash: Hash of the shard's entries in the index.
        dtype: numpy's name of the type of tokens on disk; None for the corpus's `token_dtype`.
        byte_offset: Offset of the run in the file.
        index: The file of document ends; None for `path` with ".index".
        index_start: The shard's first entry in the index.
        index_base: Number of tokens that the index counts before the shard.
        num_added: Number of document ends (eos) that the file lacks, and that reading adds. Their positions are in the
            file next to `index` with the suffix ".added".
        mtime_ns: The file's modification time, to detect changes if there is no hash.
        ends_by_index: Whether only the index has the document ends: eos occurs within documents, or not at each end.
        labels_hash: Hash of the file of labels; empty if all tokens have labels.
        num_labels: Number of tokens with labels by that file.
    """

    path: str
    num_tokens: int
    num_documents: int
    num_text_bytes: int
    file_bytes: int
    hash: str
    index_hash: str
    dtype: str | None = None
    byte_offset: int = 0
    index: str | None = None
    index_start: int = 0
    index_base: int = 0
    num_added: int = 0
    mtime_ns: int | None = None
    ends_by_index: bool = False
    labels_hash: str = ""
    num_labels: int = 0


_SOURCE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_DEFAULTS: Final = {field.name: field.default for field in fields(ShardRecord)}


class ShardTable(Sequence[ShardRecord]):
    """The shards of a source, stored by column: `column` returns a column without building records.

    Raises:
        TypeError: A column is unknown, missing or of another length than the others.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        unknown = columns.keys() - _DEFAULTS.keys()
        missing = [name for name, default in _DEFAULTS.items() if default is MISSING and name not in columns]
        lengths = {len(column) for column in columns.values()}
        if unknown or missing or len(lengths) != 1:
            raise TypeError(f"shards have columns {', '.join(columns)} of lengths {sorted(lengths)}")
        self._columns = columns
        (self._length,) = lengths

    @classmethod
    def of(cls, shards: Sequence[ShardRecord]) -> Self:
        """Returns the table of `shards`, without columns whose values are all defaults."""
        columns = {name: [getattr(shard, name) for shard in shards] for name in _DEFAULTS}
        return cls(
            {
                name: column
                for name, column in columns.items()
                if _DEFAULTS[name] is MISSING or any(value != _DEFAULTS[name] for value in column)
            }
        )

    @property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """Returns the columns that have a value other than the default."""
        return self._columns

    def column(self, name: str) -> Sequence[Any]:
        """Returns one field of all shards."""
        return self._columns[name] if name in self._columns else [_DEFAULTS[name]] * self._length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> ShardRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ShardRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> ShardRecord | tuple[ShardRecord, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(self._length)))
        return ShardRecord(**{name: column[index] for name, column in self._columns.items()})

    def __iter__(self) -> Iterator[ShardRecord]:
        return (self[number] for number in range(self._length))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True)
class SourceRecord:
    """One named source of one split; `weight` is the integer weight of the mix that it was prepared with."""

    name: str
    weight: int
    num_documents: int
    num_text_bytes: int
    num_tokens: int
    shards: Sequence[ShardRecord]

    def __post_init__(self) -> None:
        if not isinstance(self.shards, ShardTable):
            object.__setattr__(self, "shards", ShardTable.of(self.shards))

    @property
    def num_labels(self) -> int:
        """Returns the number of tokens with labels, those of first tokens of documents included."""
        columns = (self.table.column(name) for name in ("labels_hash", "num_labels", "num_tokens"))
        return sum(
            num_labels if labels else num_tokens for labels, num_labels, num_tokens in zip(*columns, strict=True)
        )

    @property
    def table(self) -> ShardTable:
        """Returns the shards by column."""
        assert isinstance(self.shards, ShardTable)
        return self.shards


@dataclass(frozen=True)
class ChatRecord:
    """How the conversations of a corpus became tokens.

    Args:
        template: The file of the chat template, in the corpus.
        template_name: Where the template came from.
        hash: Of the template, the date that it prints, and its variables.
        date: The date that the template prints; None if it prints no date.
        labels: The tokens that are learned: assistant, last or all.
        sources: For each source of conversations, the fields of `genesis.data.conversations.ConversationCounts`.
        is_paired: Whether the documents 2i and 2i + 1 of each source are the chosen and the rejected answer of a pair.
        has_values: Whether the labels of each document have a value (`genesis.data.shards.mark_labels`).
    """

    template: str
    template_name: str
    hash: str
    date: str | None
    labels: str
    sources: Mapping[str, Mapping[str, int]]
    is_paired: bool = False
    has_values: bool = False


@dataclass(frozen=True)
class CorpusManifest:
    """The content of a corpus. Hashes are hex digests made with `hash_algorithm`.

    An adopted corpus may have no tokenizer (`tokenizer_hash` is empty) and no `bos_id`; `eos_id` is None if the
    tokenizer has no eos. `token_dtype` is the type in which tokens are read, and the type on disk of shards without
    another. `chat` is None without conversations.
    """

    name: str
    hash_algorithm: str
    tokenizer_hash: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    token_dtype: Literal["uint16", "uint32"]
    train: tuple[SourceRecord, ...]
    validation: tuple[SourceRecord, ...]
    chat: ChatRecord | None = None

    def advise_held_out(self, fraction: float = 0.0) -> str:
        """Returns what to do if few documents or none are held out: a larger share that is enough, or more documents.

        Args:
            fraction: The share that was too small.
        """
        num_documents = sum(source.num_documents for source in (*self.train, *self.validation))
        enough = [share for share in (0.05, 0.1, 0.2) if share > fraction and share * num_documents >= FEW_HELD_OUT]
        if enough:
            return f"prepare it again with --validation_fraction {enough[0]:g} --restart"
        return "give more documents (a file of text is one, unless `separator` of its source cuts it)"

    @property
    def is_paired(self) -> bool:
        """Returns whether the documents are pairs of answers."""
        return self.chat is not None and self.chat.is_paired

    @property
    def has_values(self) -> bool:
        """Returns whether each document has a value in its labels."""
        return self.chat is not None and self.chat.has_values

    @property
    def padding_id(self) -> int:
        """Returns the id that fills positions without a token: eos, or any id if there is no eos."""
        return 0 if self.eos_id is None else self.eos_id

    @property
    def tokens_hash(self) -> str:
        """Returns a hash of the tokens, the ends of documents and the labels, in the order of the sources."""
        columns = [
            [split, source.name, [list(source.table.column(name)) for name in _HASHED_COLUMNS]]
            for split in SPLITS
            for source in self.split(split)
        ]
        return blake3(json.dumps(columns).encode()).hexdigest()

    def split(self, split: Split) -> tuple[SourceRecord, ...]:
        """Returns the sources of `split`."""
        return self.train if split == "train" else self.validation


def write_manifest(corpus: Path, manifest: CorpusManifest) -> None:
    """Writes `manifest` into `corpus` atomically; the file is durable when the call returns."""
    raw = vars(manifest) | {
        split: [vars(source) | {"shards": source.table.columns} for source in manifest.split(split)] for split in SPLITS
    }
    del raw["chat"]
    if manifest.chat is not None:
        raw["chat"] = asdict(manifest.chat)
        if not manifest.is_paired:  # schema 4 does not know the field
            del raw["chat"]["is_paired"]
        if not manifest.has_values:  # schema 5 does not know this one
            del raw["chat"]["has_values"]
    raw["schema_version"] = _needed_schema(manifest)
    replace_file(corpus / MANIFEST_NAME, json.dumps(raw).encode())


class NotPreparedError(UserError):
    """A directory is not a corpus."""

    def __init__(self, corpus: Path) -> None:
        super().__init__(f"{corpus} is not a prepared corpus (no {MANIFEST_NAME}); run `genesis data prepare`")


def check_source_name(name: object) -> None:
    """Checks the name of a source, which becomes the name of directories and files.

    Raises:
        UserError: The name is not usable for that.
    """
    if find_name_fault(name) is not None or not _SOURCE_NAME.fullmatch(str(name)):
        fault = find_name_fault(name) or "has other characters"
        raise UserError(
            f"source name {str(name)[:80]!r} is not usable for a directory ({fault}); "
            "use letters, digits, '.', '_', '-'"
        )


def read_manifest(corpus: Path) -> CorpusManifest:
    """Returns the manifest of the corpus in the directory `corpus`; all schemas are read.

    Raises:
        UserError: The manifest is missing, not a file or not JSON, or its schema is newer than this version reads.
    """
    path = corpus / MANIFEST_NAME
    try:
        raw: dict[str, Any] = load_json(read_file(path, MAX_DOCUMENT_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise NotPreparedError(corpus) from None
    except RefusedFileError as error:
        raise UserError(f"{path} {error.strerror}; remove it and prepare the corpus again") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); prepare the corpus again") from None
    schema = raw.pop("schema_version", None) if isinstance(raw, dict) else None
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA_VERSION:
        raise UserError(f"{path} has schema {schema}, but this version reads 1 to {SCHEMA_VERSION}; upgrade genesis")
    read_shards = _read_records if schema == 1 else ShardTable
    try:
        for split in SPLITS:
            for source in raw[split]:
                check_source_name(source["name"])
            raw[split] = tuple(
                SourceRecord(**{**source, "shards": read_shards(source["shards"])}) for source in raw[split]
            )
        if "chat" in raw:
            raw["chat"] = ChatRecord(**raw["chat"])
        return CorpusManifest(**raw)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); prepare the corpus again") from None


def _read_records(shards: Sequence[Mapping[str, Any]]) -> ShardTable:
    """Returns the shards of a manifest of schema 1, which lists each by itself."""
    return ShardTable.of([ShardRecord(**shard) for shard in shards])


def _needed_schema(manifest: CorpusManifest) -> int:
    """Returns the oldest schema that can express a manifest."""
    columns = {column for split in SPLITS for source in manifest.split(split) for column in source.table.columns}
    if manifest.chat is not None:
        return 6 if manifest.has_values else 5 if manifest.is_paired else 4
    return 2 if columns.isdisjoint(("ends_by_index", "labels_hash")) else 3
