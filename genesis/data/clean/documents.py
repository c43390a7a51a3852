"""Reads documents from sources, stores them between two passes, and writes them as shards.

datatrove's own readers skip a line of invalid JSON and only log the line. Its writer makes no file for a task without
documents, so that later tasks read the wrong files. The readers and writers here are as strict as
`genesis data prepare`, and every file appears completely or not at all.
"""

import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import zstandard
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from genesis.chat.conversation import load_conversation
from genesis.data.clean.filters import FIELDS, LANGUAGE
from genesis.data.shards import hash_file
from genesis.data.sources import SourceOptions, Span, read_entries
from genesis.data.sources.files import kind_of
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.files import replace_file, replacing
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, open_file, read_text

CONVERSATION = "conversation"
"""The key of a document's metadata with its conversation as it is written; the text holds only what is said."""
SOURCE = "source"
"""The key of a document's source in the metadata and in the written records."""
NUM_TOKENS = "num_tokens"
Compression = Literal["zst", "gz"]

_ZSTD_LEVEL = 3
_GZIP_LEVEL = 6


@dataclass(frozen=True)
class WrittenShard:
    """A shard of the result: `path` is relative to the result's directory; `hash` is BLAKE3."""

    path: str
    source: str
    num_documents: int
    num_characters: int
    num_tokens: int | None
    file_bytes: int
    hash: str


def count_tokens(tokenizer: Path | None, text: str) -> int | None:
    """Returns the tokens of `text`, without bos and eos, by the tokenizer at a path; None without a tokenizer."""
    return None if tokenizer is None else len(_load(tokenizer).encode(text))


@lru_cache(maxsize=1)
def _load(path: Path) -> Tokenizer:
    return open_tokenizer(path)


class SourceReader(PipelineStep):  # type: ignore[misc]
    """Reads the documents of a task's spans, with the fields that score filters need."""

    name = "sources"
    type = "reader"

    def __init__(
        self,
        sources: Sequence[SourceOptions],
        spans: Sequence[Sequence[tuple[str, Span]]],
        fields: Sequence[str],
        tokenizer: Path | None,
    ) -> None:
        super().__init__()
        self._sources = {source.name: source for source in sources}
        self._spans = spans
        self._fields = tuple(fields)
        self._tokenizer = tokenizer

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yields the documents of the task `rank`."""
        assert data is None
        for name, span in self._spans[rank]:
            count_blank = partial(self.stat_update, f"blank.{name}")
            found = _read(self._sources[name], span, self._fields, count_blank)
            for number, (text, fields, conversation) in enumerate(found):
                metadata: dict[str, Any] = {SOURCE: name}
                if conversation is not None:
                    metadata[CONVERSATION] = conversation
                if fields:
                    metadata[FIELDS] = fields
                num_tokens = count_tokens(self._tokenizer, text)
                if num_tokens is not None:
                    metadata[NUM_TOKENS] = num_tokens
                self.stat_update(f"documents.{name}")
                self.stat_update(f"characters.{name}", value=len(text))
                self.stat_update(f"tokens.{name}", value=num_tokens or 0)
                yield Document(text, f"{span.file.path}:{span.start}:{number}", metadata=metadata)


class PassWriter(PipelineStep):  # type: ignore[misc]
    """Stores a task's documents for the next pass, and yields them."""

    name = "pass"
    type = "writer"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Writes and yields the documents of `data`."""
        with _written_whole(_pass_file(self._folder, rank), "zst") as write:
            for document in data:
                write(_line([document.text, document.id, document.metadata]))
                yield document


class PassReader(PipelineStep):  # type: ignore[misc]
    """Reads the documents that the `PassWriter` of the same task stored, in the same order."""

    name = "pass"
    type = "reader"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yields the documents of the task `rank`."""
        assert data is None
        with (
            open_file(_pass_file(self._folder, rank)) as file,
            zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as stream,
        ):
            for line in io.BufferedReader(stream):
                text, identifier, metadata = json.loads(line)
                yield Document(text, identifier, metadata=metadata)


class TextWriter(PipelineStep):  # type: ignore[misc]
    """Writes a task's documents as shards of the result, one for each source, and a record of them."""

    name = "text"
    type = "writer"

    def __init__(self, out: Path, records: Path, compression: Compression) -> None:
        super().__init__()
        self._out = out
        self._records = records
        self._compression: Compression = compression

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Writes the documents of `data` and yields them. Documents of a source follow each other."""
        shards = []
        document = next(data, None)
        while document is not None:
            source = document.metadata[SOURCE]
            path = f"text/{source}/{rank:05d}.jsonl.{self._compression}"
            counts = [0, 0, 0]
            with _written_whole(self._out / path, self._compression) as write:
                while document is not None and document.metadata[SOURCE] == source:
                    write(_line(_published(document)))
                    counts[0] += 1
                    counts[1] += len(document.text)
                    counts[2] += document.metadata.get(NUM_TOKENS, 0)
                    num_tokens = counts[2] if NUM_TOKENS in document.metadata else None
                    yield document
                    document = next(data, None)
            file_bytes = (self._out / path).stat().st_size
            shards.append(
                WrittenShard(path, source, counts[0], counts[1], num_tokens, file_bytes, hash_file(self._out / path))
            )
        self._records.mkdir(parents=True, exist_ok=True)
        record = json.dumps([asdict(shard) for shard in shards])
        write_durably(self._records / f"{rank:05d}.json", record.encode())


def read_shard_records(records: Path) -> list[WrittenShard]:
    """Returns the shards of all tasks, in the order of the tasks."""
    paths = sorted(records.glob("*.json"))
    return [WrittenShard(**shard) for path in paths for shard in load_json(read_text(path, MAX_DOCUMENT_BYTES))]


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file completely or not at all, and creates its directories; two runs of a task may write at one time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data, has_rivals=True)


# Reading with fields


def _read(
    source: SourceOptions, span: Span, names: Sequence[str], count_blank: Callable[[], None]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """Yields the texts of a span, of each record the fields `names` that it has, and its conversation if it is one."""
    has_types = kind_of(span.file.path, source) not in ("csv", "tsv")
    for entry in read_entries(source, span, 0, names):
        document = entry.read(True)
        if document.is_blank:
            count_blank()
        if not document.utf8:
            continue
        record = document.record or {}
        found = ((name, record[name] if has_types else _number(record[name])) for name in names if name in record)
        fields = {name: value for name, value in found if value is not None}
        if source.chat is None:
            yield document.text, fields, None
        else:
            yield load_conversation(document.text).plain_text(), fields, json.loads(document.text)


def _number(text: str) -> float | str | None:
    """Returns the number in a cell of a table without types; None if it is empty, and other text as it is."""
    try:
        return float(text) if text else None
    except ValueError:
        return text


# Writing


def _pass_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank:05d}.documents.zst"


def _line(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _published(document: Document) -> dict[str, Any]:
    known = {key: document.metadata[key] for key in (SOURCE, LANGUAGE) if key in document.metadata}
    if CONVERSATION in document.metadata:
        fields = document.metadata.get(FIELDS, {})
        return {**fields, **document.metadata[CONVERSATION], "id": document.id, **known}
    return {**document.metadata.get(FIELDS, {}), "text": document.text, "id": document.id, **known}


@contextmanager
def _written_whole(path: Path, compression: Compression) -> Iterator[Callable[[bytes], object]]:
    """Yields what writes bytes to a file, which appears completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, has_rivals=True) as file:
        if compression == "zst":
            with zstandard.ZstdCompressor(level=_ZSTD_LEVEL).stream_writer(file, closefd=False) as stream:
                yield stream.write
        else:
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=_GZIP_LEVEL) as stream:
                yield stream.write
