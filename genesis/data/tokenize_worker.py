"""One process of `genesis data prepare`: reads the documents of a work unit and writes them as staged shards.

The process is a `PipedWorker`. It receives `Job`s from its connection and answers with `Progress` and `FinishedPart`s;
the last part of a unit is marked `is_last`. A worker renames nothing: if its parent dies, all files of the worker are
still in that attempt's staging directory. A worker ends when its parent is gone.

A unit is written in *parts* of one train and one validation shard each. A part is closed when one of its shards has
reached the size limit, so that a unit of any length can restart at its last finished part.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
from blake3 import blake3

from genesis.base.errors import RunEndedError, UserError, find_remedy
from genesis.base.limited_workers import encoding, serve_texts
from genesis.chat.render import RenderedChat
from genesis.data.conversations import ChatSetup, ConversationCounts, EncodedChats, join_rendered
from genesis.data.manifest import SPLITS, ShardRecord, Split
from genesis.data.row_notes import (
    MAX_REFUSED,
    BadRowsError,
    RefusedRow,
    RowNotes,
    SkippedCounter,
    explain_refused,
    strip_place,
)
from genesis.data.shards import EncodedDocuments, ShardWriter, TokenDtype, token_dtype
from genesis.data.sources import BadRow, Document, SourceOptions, Span, read_rows
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer, frame_document

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1 << 16
"""Lines of one letter would otherwise be a million documents at once, which take 800 MB."""
_HASH_RANGE = 1 << 64


@dataclass(frozen=True)
class Setup:
    """Settings of all units of one attempt; `tokenizer` and `staging` are directories."""

    tokenizer: Path
    tokenizer_hash: str
    staging: Path
    seed: int
    validation_fraction: float
    shard_tokens: int
    chat: ChatSetup | None = None


@dataclass(frozen=True)
class Unit:
    """Spans of one source that are tokenized together; `number` counts the units of that source."""

    source: SourceOptions
    number: int
    spans: tuple[Span, ...]

    @property
    def num_bytes(self) -> int:
        """Returns the number of input bytes in all spans of the unit."""
        return sum(span.num_bytes for span in self.spans)


@dataclass(frozen=True)
class Job:
    """A unit, or the rest of one: the documents after the first `num_documents_done`, as parts from `first_part` on."""

    unit: Unit
    first_part: int
    num_documents_done: int
    num_bytes_done: int
    num_threads: int


@dataclass(frozen=True)
class Progress:
    """The amount of text that was tokenized since the last message."""

    num_bytes: int
    num_tokens: int


@dataclass(frozen=True)
class FinishedPart:
    """A part whose shards are complete and durable in the staging directory.

    `num_documents` and `num_bytes` count the unit's documents and input bytes up to the end of the part. A shard that
    would be empty is None. `conversations` are the counts of the part, and `notes` list what its rows lost.
    """

    source: str
    unit: int
    part: int
    num_documents: int
    num_bytes: int
    is_last: bool
    train: ShardRecord | None
    validation: ShardRecord | None
    conversations: ConversationCounts = field(default_factory=ConversationCounts)
    notes: RowNotes = field(default_factory=RowNotes)

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Returns the part whose fields were written as JSON, by this version or an earlier one."""
        fields = {name: value for name, value in raw.items() if name != "fault"}  # of earlier versions
        for split in SPLITS:
            fields[split] = ShardRecord(**raw[split]) if raw[split] else None
        fields["conversations"] = ConversationCounts(**raw.get("conversations", {}))
        fields["notes"] = RowNotes.read(raw.get("notes", {}))
        return cls(**fields)


def add_notes(parts: Sequence[FinishedPart], source: str) -> RowNotes:
    """Returns the notes of all parts of a source."""
    ordered = sorted(parts, key=lambda part: (part.unit, part.part))
    return sum((part.notes for part in ordered if part.source == source), RowNotes())


@dataclass(frozen=True)
class Failure:
    """A user's mistake or a failure of the disk, in one line; with `has_rows`, bad rows have lines of their own."""

    message: str
    has_rows: bool = False


def shard_path(split: Split, source: str, unit: int, part: int) -> str:
    """Returns the path of a shard within the corpus."""
    suffix = f"_{part:03d}" if part else ""
    return f"{split}/{source}/{unit:05d}{suffix}.ds"


def staged_path(staging: Path, path: str) -> Path:
    """Returns the path in the staging directory of the shard whose final path is `path`."""
    return staging / path.replace("/", "-")


def is_validation(utf8: bytes, seed: int, fraction: float) -> bool:
    """Returns whether a document belongs to the validation set, which depends only on its text and the seed."""
    key = blake3(str(seed).encode()).digest()
    return int.from_bytes(blake3(utf8, key=key).digest(8), "little") < int(fraction * _HASH_RANGE)


def tokenize(setup: Setup, tokenizer: Tokenizer, job: Job) -> Iterator[Progress | FinishedPart]:
    """Writes the parts of a unit; the files depend neither on the part where work resumes nor on the number of threads.

    Raises:
        UserError: The input does not match the options of its source; the first bad rows of the unit are named.
        OSError: A shard cannot be written.
    """
    unit = job.unit
    documents = islice(_read_unit(unit), job.num_documents_done, None)
    num_documents, num_bytes = job.num_documents_done, job.num_bytes_done
    batch_bytes = min(_BATCH_BYTES, max(1, setup.shard_tokens // 4))
    part = _Part(setup, tokenizer, unit, job.first_part)
    batches = _batches(documents, batch_bytes)
    for batch in batches:
        num_tokens = part.append(batch, job.num_threads)
        if part.refused:
            for rest in batches:
                if len(part.refused) >= MAX_REFUSED:
                    break
                part.append(rest, job.num_threads)
            raise BadRowsError(explain_refused(unit.source.name, part.refused, _remedy(unit.source)))
        num_documents += len(batch)
        yield Progress(batch[-1].position - num_bytes, num_tokens)
        num_bytes = batch[-1].position
        if part.is_full:
            yield part.finish(num_documents, num_bytes, is_last=False)
            part = _Part(setup, tokenizer, unit, part.number + 1)
    yield Progress(unit.num_bytes - num_bytes, 0)
    yield part.finish(num_documents, unit.num_bytes, is_last=True)


class _Part:
    """The train and the validation shard that are being written."""

    def __init__(self, setup: Setup, tokenizer: Tokenizer, unit: Unit, number: int) -> None:
        self.number = number
        self._setup = setup
        self._tokenizer = tokenizer
        self._unit = unit
        self._dtype: TokenDtype = token_dtype(tokenizer.vocab_size)
        self._writers: dict[Split, ShardWriter] = {}
        is_chat = setup.chat is not None and unit.source.chat
        self._encoder = setup.chat.build(tokenizer, unit.source) if setup.chat is not None and is_chat else None
        self._counts = ConversationCounts()
        self._notes = RowNotes()
        self.refused: list[RefusedRow] = []

    @property
    def is_full(self) -> bool:
        return any(writer.num_tokens >= self._setup.shard_tokens for writer in self._writers.values())

    def append(self, documents: Sequence[Document | BadRow], num_threads: int) -> int:
        """Appends each document to its split's shard and returns their tokens; bad rows are skipped or refused."""
        if self._encoder is not None:
            with encoding(sum(len(document.utf8) for document in documents)):
                chats = self._encoder.encode(documents)
            return self._append_conversations(chats)
        texts = [document for document in documents if isinstance(document, Document) and not document.is_blank]
        bad = [document for document in documents if isinstance(document, BadRow)]
        self._note_bad(bad)
        self._notes += RowNotes(num_blank=len(documents) - len(texts) - len(bad))
        by_split: dict[Split, list[Document]] = {"train": [], "validation": []}
        for document in texts:
            by_split[self._split_of(document)].append(document)
        num_tokens = 0
        for split, chosen in by_split.items():
            if chosen:
                encoded = _encode(self._tokenizer, chosen, num_threads)
                self._writer(split).append(encoded)
                num_tokens += len(encoded.tokens)
        return num_tokens

    def _note_bad(self, rows: Sequence[BadRow]) -> None:
        skipped = SkippedCounter()
        for row in rows:
            if self._unit.source.on_bad_row == "skip":
                skipped.add(strip_place(row.explain(), row.place()), row.place)
            elif len(self.refused) < MAX_REFUSED:
                self.refused.append(RefusedRow(row.place(), strip_place(row.explain(), row.place()), may_skip=True))
        self._notes += RowNotes(skipped.rows)

    def _append_conversations(self, encoded: EncodedChats) -> int:
        self._counts += encoded.counts
        self._notes += encoded.notes
        self.refused += encoded.refused
        by_split: dict[Split, list[RenderedChat]] = {"train": [], "validation": []}
        for document, chat in encoded.chats:
            by_split[self._split_of(document)].extend(chat)
        for split, chats in by_split.items():
            if chats:
                self._writer(split).append(join_rendered(chats, self._tokenizer.token_num_bytes))
        return sum(len(chat.ids) for _, rendered in encoded.chats for chat in rendered)

    def _split_of(self, document: Document) -> Split:
        held_out = is_validation(document.utf8, self._setup.seed, self._setup.validation_fraction)
        return "validation" if held_out else "train"

    def finish(self, num_documents: int, num_bytes: int, *, is_last: bool) -> FinishedPart:
        """Completes both shards."""
        return FinishedPart(
            source=self._unit.source.name,
            unit=self._unit.number,
            part=self.number,
            num_documents=num_documents,
            num_bytes=num_bytes,
            is_last=is_last,
            train=self._finish_shard("train"),
            validation=self._finish_shard("validation"),
            conversations=self._counts,
            notes=self._notes,
        )

    def _path(self, split: Split) -> str:
        return shard_path(split, self._unit.source.name, self._unit.number, self.number)

    def _writer(self, split: Split) -> ShardWriter:
        if split not in self._writers:
            path = staged_path(self._setup.staging, self._path(split))
            name = f"genesis-{self._tokenizer.hash[:16]}"
            self._writers[split] = ShardWriter(path, self._dtype, name, self._tokenizer.eos_id)
        return self._writers[split]

    def _finish_shard(self, split: Split) -> ShardRecord | None:
        return self._writers[split].finish(self._path(split)) if split in self._writers else None


def _encode(tokenizer: Tokenizer, documents: Sequence[Document], num_threads: int) -> EncodedDocuments:
    num_bytes = sum(len(document.utf8) for document in documents)
    with encoding(num_bytes):
        texts = tokenizer.encode_batch([document.text for document in documents], num_threads)
    framed = [frame_document(tokenizer, text) for text in texts]
    return EncodedDocuments(
        tokens=np.concatenate(framed),
        lengths=np.array([len(tokens) for tokens in framed], dtype=np.int64),
        num_text_bytes=num_bytes,
    )


def _remedy(source: SourceOptions) -> str:
    option = f"on_bad_row: skip for source {source.name}" if source.chat is None else "chat.on_bad_row: skip"
    return f"set {option}, which counts such records"


def _read_unit(unit: Unit) -> Iterator[Document | BadRow]:
    """Yields the unit's documents and bad rows, with positions counted from the beginning of the unit."""
    begin = 0
    for span in unit.spans:
        for document in read_rows(unit.source, span):
            yield document._replace(position=begin + min(document.position, span.num_bytes))
        begin += span.num_bytes


def _batches(documents: Iterator[Document | BadRow], num_bytes: int) -> Iterator[list[Document | BadRow]]:
    batch: list[Document | BadRow] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.utf8)
        if size >= num_bytes or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def main(descriptor: int) -> None:
    """Serves the connection with the file descriptor `descriptor` until its other end is closed."""
    serve_texts(descriptor, _serve)


def _serve(connection: "Connection[object, object]") -> None:
    setup = connection.recv()
    assert isinstance(setup, Setup)
    tokenizer = open_tokenizer(setup.tokenizer)
    while True:
        job = connection.recv()
        assert isinstance(job, Job)
        try:
            if tokenizer.hash != setup.tokenizer_hash:
                raise UserError(f"{setup.tokenizer} changed after the command started; start again with --restart")
            for message in tokenize(setup, tokenizer, job):
                connection.send(message)
        except (UserError, RunEndedError) as error:
            connection.send(Failure(str(error), has_rows=isinstance(error, BadRowsError)))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except OSError as error:
            connection.send(Failure(explain_write_error(error, setup.staging.parent.parent)))


def explain_write_error(error: OSError, corpus: Path) -> str:
    """Returns the message about a full or failing disk, with the file if the error has one."""
    return (
        f"cannot write to {error.filename or corpus} ({error.strerror or error}); "
        f"{find_remedy(error) or 'fix the disk'}, and run the same command again: finished shards are kept"
    )
