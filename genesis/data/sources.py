"""Where text comes from: named sources, their files, and the documents in them.

A source's files are cut into *spans*, each of which can be read alone: a range of bytes of an uncompressed file of
records, a range of row groups of a parquet file, or a whole file. Reading all spans in order gives every document once.

A file may lie in a store (`genesis.data.remote`): it is then listed there and read from its copy in the local cache
(`genesis.data.cache`), which is made when a span of it is first read.
"""

import gzip
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from genesis.data.arrow_file import ArrowFile
from genesis.data.cache import open_copy
from genesis.data.remote import RemoteFile, file_name, is_url, list_files, strip_local
from genesis.errors import UserError

Kind = Literal["text", "jsonl", "parquet", "arrow"]
Format = Literal["auto"] | Kind

_DIRECTORY_SUFFIXES = (".txt", ".jsonl", ".parquet", ".arrow")
"""Files that a directory is searched for when a source names no suffixes."""
_TABLES: Final[dict[Kind, Callable[[str | Path], Any]]] = {"parquet": pq.ParquetFile, "arrow": ArrowFile}
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_BLOCK_BYTES = 1 << 20
_COMPRESSED_BLOCK_BYTES = 1 << 16
_ROWS_PER_BATCH = 256
_TRAINING_SPAN_BYTES = 4 << 20
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, pa.ArrowException)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class SourceOptions:
    """One named source of text.

    Args:
        name: Its name, also of its directory in the corpus: letters, digits, ".", "_" and "-".
        paths: Files, directories (searched through all levels) or globs ("**" crosses levels); also URLs of them, as
            s3://bucket/web/*.jsonl.zst, https://host/a.parquet or whatever else fsspec knows.
        format: How files hold documents: text (a file is one document; also source code), jsonl, parquet, arrow (a
            dataset that Hugging Face's `datasets` saved); auto goes by the name of each file. Text and jsonl files may
            be compressed (.gz, .zst).
        suffixes: Endings of the files taken from directories, as [.py, .md]; [.txt, .jsonl, .parquet, .arrow] if not
            given.
        text_field: Field (jsonl) or column (parquet, arrow) that holds the text.
        separator: What ends a document in a text file, as "\\n" or "<|endoftext|>"; without it a file is one document.
        weight: Share in the training mix, an integer in proportion to the other sources' weights.
        on_undecodable: What to do with bytes that are not UTF-8: error, or replace them by U+FFFD.
    """

    name: str
    paths: tuple[str, ...]
    format: Format = "auto"
    suffixes: tuple[str, ...] = ()
    text_field: str = "text"
    separator: str | None = None
    weight: int = 1
    on_undecodable: Literal["error", "replace"] = "error"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", self.name):
            raise UserError(
                f"source name {self.name!r} is not usable for a directory; use letters, digits, '.', '_', '-'"
            )
        if not self.paths:
            raise UserError(f"source {self.name} has no paths; name files, directories or globs")
        if self.weight < 1:
            raise UserError(f"source {self.name} has weight {self.weight}; give a whole number of at least 1")
        if self.separator == "":
            raise UserError(f'source {self.name} has an empty separator; leave it out or give one, as "\\n"')


@dataclass(frozen=True)
class InputFile:
    """A file as it was found; a later change of it is refused.

    Of a file in a store `path` is the URL, and `identity` stands for the time of modification: what the store says that
    changes with the file, as its ETag.
    """

    path: str
    num_bytes: int
    mtime_ns: int
    identity: str = ""


@dataclass(frozen=True)
class Span:
    """A part of a file that can be read alone: bytes, row groups (in arrow, batches), or all of it (0 to its size)."""

    file: InputFile
    start: int
    end: int
    num_bytes: int


class Document(NamedTuple):
    """One text, its UTF-8 form, and how many bytes of the span's file were read when it came."""

    text: str
    utf8: bytes
    position: int


def check_sources(sources: Sequence[SourceOptions]) -> None:
    """Refuses no sources, or two of one name.

    Raises:
        UserError: See above.
    """
    if not sources:
        raise UserError("no sources are given; list at least one under `sources`")
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two sources are named {name}; give each its own name")


def find_files(source: SourceOptions) -> tuple[InputFile, ...]:
    """Returns the files of a source, sorted by path, each once.

    Raises:
        UserError: A path leads to nothing or cannot be read, or a directory holds no file of the suffixes.
    """
    found: set[str] = set()
    remote: dict[str, InputFile] = {}
    for pattern in map(strip_local, source.paths):
        if is_url(pattern):
            remote.update({file.path: file for file in _find_remote(source, pattern)})
            continue
        matches = [Path(pattern)] if Path(pattern).exists() else _glob(pattern)
        if not matches:
            raise UserError(
                f"source {source.name}: nothing is at {pattern}; mend the path (it is seen from {Path.cwd()})"
            )
        for match in matches:
            found.update(_files_under(match, source) if match.is_dir() else [str(match)])
    local = {path: _stat(path, source) for path in found}
    return tuple(file for _, file in sorted({**local, **remote}.items()))


def plan_spans(source: SourceOptions, files: Sequence[InputFile], target_bytes: int) -> Iterator[Span]:
    """Yields the spans of a source's files in order, of about `target_bytes` where a file can be cut.

    A file in a store is one span: all of it is copied to read a part, and a small cache would not keep it for the next.

    Raises:
        UserError: A parquet file is damaged, or has no text in `text_field`.
    """
    for file in files:
        kind, compression = _kind_of(file.path, source)
        is_table = kind in _TABLES
        if is_url(file.path):
            if file.num_bytes or is_table:  # an empty one is refused where it is read
                yield Span(file, 0, file.num_bytes, file.num_bytes)
        elif is_table:
            yield from _plan_row_groups(source, file, target_bytes)
        elif compression is None and _can_cut(_delimiter(kind, source)):
            for start in range(0, file.num_bytes, target_bytes):
                end = min(start + target_bytes, file.num_bytes)
                yield Span(file, start, end, end - start)
        elif file.num_bytes:
            yield Span(file, 0, file.num_bytes, file.num_bytes)


def read_documents(source: SourceOptions, span: Span) -> Iterator[Document]:
    """Yields the documents of a span in order; empty ones are left out.

    Memory is bounded by the largest document (and, for parquet, by a row group).

    Raises:
        UserError: The file has changed or is damaged, or a document is not what `source` says; the line names the
            file and the place in it.
    """
    _check_unchanged(source, span.file)
    kind, _ = _kind_of(span.file.path, source)
    reader: Callable[[SourceOptions, Span], Iterator[Document]] = {
        "text": _read_text,
        "jsonl": _read_jsonl,
        "parquet": _read_rows,
        "arrow": _read_rows,
    }[kind]
    try:
        yield from (document for document in reader(source, span) if document.utf8)
    except _DAMAGE as error:
        raise UserError(f"{span.file.path} is cut short or damaged ({_one_line(error)}); fetch it again") from None
    except OSError as error:
        raise _unreadable(span.file.path, source, error) from None
    _check_unchanged(source, span.file)


def sample_texts(sources: Sequence[SourceOptions], budget_bytes: int, seed: int = 0) -> Iterator[str]:
    """Yields documents of all sources, by weight, up to about `budget_bytes` of text: the same for the same files.

    A source's share is taken from all over its files. One smaller than its share is taken whole.
    """
    check_sources(sources)
    total_weight = sum(source.weight for source in sources)
    for source in sources:
        yield from _sample_source(source, budget_bytes * source.weight // total_weight, seed)


def _sample_source(source: SourceOptions, budget_bytes: int, seed: int) -> Iterator[str]:
    spans = list(plan_spans(source, find_files(source), _TRAINING_SPAN_BYTES))
    random.Random(seed).shuffle(spans)
    for index, span in enumerate(spans):
        quota = budget_bytes // (len(spans) - index)
        for document in read_documents(source, span):
            if quota <= 0:
                break
            quota -= len(document.utf8)
            budget_bytes -= len(document.utf8)
            yield document.text


# Files


def _find_remote(source: SourceOptions, url: str) -> list[InputFile]:
    endings = _endings(source)
    files = list_files(url, endings)
    if not files:
        raise UserError(
            f"source {source.name}: {url} leads to no file (of a directory those are taken that end in "
            f"{', '.join(source.suffixes or _DIRECTORY_SUFFIXES)}); mend the URL or give other `suffixes`"
        )
    return [InputFile(file.url, file.num_bytes, 0, file.identity) for file in files]


def _endings(source: SourceOptions) -> tuple[str, ...]:
    suffixes = source.suffixes or _DIRECTORY_SUFFIXES
    return tuple(suffix + ending for suffix in suffixes for ending in ("", *_COMPRESSED_SUFFIXES))


def _glob(pattern: str) -> list[Path]:
    root = Path(pattern).anchor
    try:
        return [match for match in Path(root).glob(str(Path(pattern).relative_to(root))) if match.is_file()]
    except ValueError as error:
        raise UserError(f"{pattern!r} is not a path or a glob ({error})") from None


def _files_under(directory: Path, source: SourceOptions) -> list[str]:
    endings = _endings(source)
    files = [str(path) for path in directory.rglob("*") if path.name.endswith(endings) and path.is_file()]
    if not files:
        suffixes = source.suffixes or _DIRECTORY_SUFFIXES
        raise UserError(
            f"source {source.name}: {directory} holds no file that ends in {', '.join(suffixes)}; give other `suffixes`"
        )
    return files


def _stat(path: str, source: SourceOptions) -> InputFile:
    try:
        with Path(path).open("rb"):
            status = Path(path).stat()
    except OSError as error:
        raise _unreadable(path, source, error) from None
    return InputFile(path, status.st_size, status.st_mtime_ns)


def _check_unchanged(source: SourceOptions, file: InputFile) -> None:
    if _has_changed(source, file):
        raise UserError(f"{file.path} has changed since it was found; begin again with --restart")


def _has_changed(source: SourceOptions, file: InputFile) -> bool:
    # A copy in the cache never changes, and none is made of a file that has.
    return not is_url(file.path) and _stat(file.path, source) != file


def _unreadable(path: str, source: SourceOptions, error: OSError) -> UserError:
    return UserError(f"source {source.name}: cannot read {path} ({error.strerror or error}); mend it or leave it out")


def _kind_of(path: str, source: SourceOptions) -> tuple[Kind, str | None]:
    """Returns how a file holds documents, and its compression."""
    stem, compression = file_name(path), None
    for ending in _COMPRESSED_SUFFIXES:
        if stem.endswith(ending):
            stem, compression = stem.removesuffix(ending), ending
            break
    if source.format != "auto":
        return source.format, compression
    if stem.endswith((".jsonl", ".ndjson")):
        return "jsonl", compression
    return next((kind for kind in _TABLES if stem.endswith(f".{kind}")), "text"), compression


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


# Blocks and records


@contextmanager
def _open_local(found: InputFile) -> Iterator[Path]:
    """Gives the path of the file on the local disk; a copy that turns out to be damaged is not read again."""
    if not is_url(found.path):
        yield Path(found.path)
        return
    with open_copy(RemoteFile(found.path, found.num_bytes, found.identity)) as path:
        try:
            yield path
        except (*_DAMAGE, OSError):
            path.unlink(missing_ok=True)
            raise


def _read_blocks(found: InputFile, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yields the file's decompressed bytes from `start` on, and how much of the file itself has been read."""
    name = file_name(found.path)
    with _open_local(found) as path, path.open("rb") as file:
        file.seek(start)
        if name.endswith(".gz"):
            with gzip.open(file) as stream:
                while block := stream.read(_BLOCK_BYTES):
                    yield block, file.tell()
        elif name.endswith(".zst"):
            yield from _read_zst_blocks(file)
        else:
            while block := file.read(_BLOCK_BYTES):
                yield block, file.tell()


def _read_zst_blocks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    # zstandard's stream reader takes a frame that is cut short for the end of the data; a decompression object tells.
    frame = zstandard.ZstdDecompressor().decompressobj()
    is_between_frames = True
    while data := file.read(_COMPRESSED_BLOCK_BYTES):
        while data:
            yield frame.decompress(data), file.tell()
            is_between_frames = frame.eof
            data = frame.unused_data
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if not is_between_frames:
        raise EOFError("the compressed data ends in the middle of a frame")


def _can_cut(delimiter: bytes | None) -> bool:
    """Whether a file may be cut anywhere: occurrences of its delimiter can never overlap."""
    return delimiter is not None and not any(
        delimiter.startswith(delimiter[-length:]) for length in range(1, len(delimiter))
    )


def _delimiter(kind: Format, source: SourceOptions) -> bytes | None:
    if kind == "jsonl":
        return b"\n"
    return source.separator.encode() if source.separator is not None else None


def _read_records(span: Span, delimiter: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Yields (offset, record, position) of the records that begin within the span; the delimiter is left out."""
    begin = max(0, span.start - len(delimiter))
    records = _split(_read_blocks(span.file, begin), delimiter, begin)
    if span.start:
        next(records)  # it began before the span
    is_compressed = file_name(span.file.path).endswith(_COMPRESSED_SUFFIXES)
    for offset, record, position in records:
        if offset >= span.end and not is_compressed:
            return
        yield offset, record, position - span.start


def _split(blocks: Iterator[tuple[bytes, int]], delimiter: bytes, offset: int) -> Iterator[tuple[int, bytes, int]]:
    pending: list[bytes] = []
    tail = b""
    position = offset
    for block, position in blocks:
        pending.append(block)
        reach = tail + block
        tail = reach[len(reach) - len(delimiter) + 1 :]
        if delimiter not in reach:
            continue
        *records, rest = b"".join(pending).split(delimiter)
        for record in records:
            yield offset, record, position
            offset += len(record) + len(delimiter)
        pending = [rest]
        tail = rest[max(0, len(rest) - len(delimiter) + 1) :]
    if rest := b"".join(pending):
        yield offset, rest, position


# Documents


def _read_text(source: SourceOptions, span: Span) -> Iterator[Document]:
    delimiter = _delimiter("text", source)
    if delimiter is None:
        data = b"".join(block for block, _ in _read_blocks(span.file))
        yield _decode(source, data, span.num_bytes, _place_in_file(span, 0))
        return
    for offset, record, position in _read_records(span, delimiter):
        yield _decode(source, record, position, _place_in_file(span, offset))


def _decode(source: SourceOptions, data: bytes, position: int, place: Callable[[int], str]) -> Document:
    """Returns the document of UTF-8 `data`; `place(index)` says where its byte `index` stands."""
    try:
        return Document(data.decode(), data, position)
    except UnicodeDecodeError as error:
        if source.on_undecodable == "replace":
            text = data.decode(errors="replace")
            return Document(text, text.encode(), position)
        raise UserError(
            f"{place(error.start)}: byte 0x{data[error.start]:02x} is not UTF-8; "
            f"mend it, or set on_undecodable: replace for source {source.name}"
        ) from None


def _place_in_file(span: Span, offset: int) -> Callable[[int], str]:
    def place(index: int) -> str:
        text = " of its decompressed text" if file_name(span.file.path).endswith(_COMPRESSED_SUFFIXES) else ""
        return f"{span.file.path}, offset {offset + index}{text}"

    return place


def _read_jsonl(source: SourceOptions, span: Span) -> Iterator[Document]:
    for offset, line, position in _read_records(span, b"\n"):
        if _without_mark(offset, line).strip():
            yield _read_record(source, span, "jsonl", offset, line, position, is_located=True)


def _without_mark(offset: int, line: bytes) -> bytes:
    return line.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else line


def _text_of(source: SourceOptions, span: Span, offset: int, fields: object) -> str:
    if not isinstance(fields, dict):
        raise UserError(f"{_line(span, offset)} is a JSON {type(fields).__name__}, not an object; mend or remove it")
    if source.text_field not in fields:
        names = ", ".join(list(fields)[:20]) or "none"
        raise UserError(
            f"{_line(span, offset)} has no field {source.text_field!r} (it has: {names}); "
            f"set text_field of source {source.name}"
        )
    text = fields[source.text_field]
    if not isinstance(text, str):
        raise UserError(
            f"{_line(span, offset)}: field {source.text_field!r} is {type(text).__name__}, not text; "
            f"mend it or set text_field of source {source.name}"
        )
    return text


def _encode(source: SourceOptions, span: Span, offset: int, text: str, position: int) -> Document:
    try:
        return Document(text, text.encode(), position)
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is no character
        if source.on_undecodable == "replace":
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return Document(text, text.encode(), position)
        raise UserError(
            f"{_line(span, offset)} has a lone surrogate \\u{ord(text[error.start]):04x} at character {error.start} of "
            f"its text; mend it, or set on_undecodable: replace for source {source.name}"
        ) from None


def _line(span: Span, offset: int) -> str:
    number = 1
    for block, _ in _read_blocks(span.file):
        number += block[:offset].count(b"\n")
        offset -= len(block)
        if offset <= 0:
            break
    return f"{span.file.path}, line {number}"


# Tables: parquet, and Arrow's streams in its shape


def _plan_row_groups(source: SourceOptions, file: InputFile, target_bytes: int) -> Iterator[Span]:
    kind, _ = _kind_of(file.path, source)
    try:
        with _TABLES[kind](file.path) as parquet:
            _check_column(source, file.path, parquet.schema_arrow)
            sizes = [parquet.metadata.row_group(index).total_byte_size for index in range(parquet.num_row_groups)]
    except pa.ArrowException as error:
        raise UserError(f"{file.path} is not a whole {kind} file ({_one_line(error)}); fetch it again") from None
    start, num_bytes = 0, 0
    for index, size in enumerate(sizes):
        num_bytes += size
        if num_bytes >= target_bytes or index + 1 == len(sizes):
            yield Span(file, start, index + 1, num_bytes)
            start, num_bytes = index + 1, 0


def _check_column(source: SourceOptions, path: str, schema: pa.Schema) -> None:
    if source.text_field not in schema.names:
        raise UserError(
            f"{path} has no column {source.text_field!r} (it has: {', '.join(schema.names)}); "
            f"set text_field of source {source.name}"
        )
    kind = schema.field(source.text_field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not any(matches(kind) for matches in is_text):
        raise UserError(
            f"{path}: column {source.text_field!r} is {kind}, not text; set text_field of source {source.name}"
        )


@contextmanager
def _open_table(source: SourceOptions, span: Span) -> Iterator[tuple[Any, range]]:
    """Gives the file and the span's row groups."""
    kind, _ = _kind_of(span.file.path, source)
    with _open_local(span.file) as path, _TABLES[kind](path) as parquet:
        _check_column(source, span.file.path, parquet.schema_arrow)
        yield parquet, range(span.start, min(span.end, parquet.num_row_groups))


def _read_rows(source: SourceOptions, span: Span) -> Iterator[Document]:
    with _open_table(source, span) as (parquet, groups):
        row = sum(parquet.metadata.row_group(index).num_rows for index in range(span.start))
        position = 0
        for group in groups:
            batches = parquet.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=[source.text_field])
            for batch in batches:
                column = batch.column(0)
                if pa.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                for data in column.cast(pa.large_binary()).to_pylist():
                    yield _read_row(source, span, row, position, data, is_located=True)
                    row += 1
            # Of a file that is one span, `num_bytes` is the compressed size.
            position = min(position + parquet.metadata.row_group(group).total_byte_size, span.num_bytes)


def _place_in_row(span: Span, row: int) -> Callable[[int], str]:
    return lambda index: f"{span.file.path}, row {row}, offset {index} of its text"


# Entries: the same documents, from any of them on


class DamagedFileError(UserError):
    """A file is cut short or damaged: nothing after that place in its span can be read."""


class Entry(NamedTuple):
    """One record of a span, not understood yet: where it begins, where the next one does, and how to read it.

    `read(True)` raises `UserError` with the record's place if it is bad; `read(False)` may name a wrong line, which
    saves the pass over the file that counts them.
    """

    start: int
    end: int
    read: Callable[[bool], Document]


def read_entries(source: SourceOptions, span: Span, start: int = 0) -> Iterator[Entry]:
    """Yields the records of a span in order, from the one at `start` on: 0, or where an entry ends.

    A bad record raises when it is read, not here. An uncompressed file of records is read from `start` on, a parquet
    file from the row group that holds it, a compressed file from its beginning.

    Raises:
        DamagedFileError: The file is cut short or damaged.
        UserError: The file has changed or cannot be read.
    """
    check_unchanged(source, span.file)
    kind, _ = _kind_of(span.file.path, source)
    try:
        yield from (_row_entries if kind in _TABLES else _record_entries)(source, span, start)
    except _DAMAGE as error:
        raise DamagedFileError(
            f"{span.file.path} is cut short or damaged ({_one_line(error)}); fetch it again"
        ) from None
    except OSError as error:
        if error.errno is None:  # pyarrow's, of data that does not decompress
            raise DamagedFileError(f"{span.file.path} is damaged ({_one_line(error)}); fetch it again") from None
        raise _unreadable(span.file.path, source, error) from None
    check_unchanged(source, span.file)


def check_unchanged(source: SourceOptions, file: InputFile) -> None:
    """Refuses a file that is no longer what it was when it was found.

    Raises:
        UserError: See above.
    """
    if _has_changed(source, file):
        raise UserError(
            f"{file.path} has changed since the run began (its size or time of modification); put it back as it was, "
            "or begin a new run"
        )


def is_cheap_to_reopen(source: SourceOptions, span: Span) -> bool:
    """Whether `read_entries` begins at any entry without reading what is before it."""
    kind, compression = _kind_of(span.file.path, source)
    return kind not in _TABLES and compression is None


def _record_entries(source: SourceOptions, span: Span, start: int) -> Iterator[Entry]:
    kind, compression = _kind_of(span.file.path, source)
    delimiter = _delimiter(kind, source)
    if delimiter is None:
        if start == 0:
            data = b"".join(block for block, _ in _read_blocks(span.file))
            yield Entry(0, 1, partial(_read_record, source, span, kind, 0, data, span.num_bytes))
        return
    first = max(span.start, start)
    if compression is None:
        if first >= span.end:
            return
        span = Span(span.file, first, span.end, span.num_bytes)
    for offset, record, position in _read_records(span, delimiter):
        if offset >= first:
            yield Entry(
                offset,
                offset + len(record) + len(delimiter),
                partial(_read_record, source, span, kind, offset, record, position),
            )


def _read_record(
    source: SourceOptions, span: Span, kind: Format, offset: int, record: bytes, position: int, is_located: bool
) -> Document:
    if kind == "text":
        return _decode(source, record, position, _place_in_file(span, offset))
    line = _without_mark(offset, record)
    if not line.strip():
        return Document("", b"", position)
    decoded = _decode(source, line, position, _place_in_file(span, offset + len(record) - len(line)))
    shown = offset if is_located else 0
    try:
        fields = json.loads(decoded.text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{_line(span, shown)} is not JSON ({_one_line(error)}); mend or remove it") from None
    return _encode(source, span, shown, _text_of(source, span, shown, fields), position)


def _row_entries(source: SourceOptions, span: Span, start: int) -> Iterator[Entry]:
    with _open_table(source, span) as (parquet, groups):
        first = sum(parquet.metadata.row_group(index).num_rows for index in range(span.start))
        row = 0
        for group in groups:
            num_rows = parquet.metadata.row_group(group).num_rows
            if row + num_rows <= start:
                row += num_rows
                continue
            for batch in parquet.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=[source.text_field]):
                column = batch.column(0)
                if pa.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                skipped = min(max(start - row, 0), len(column))
                row += skipped
                for data in column.slice(skipped).cast(pa.large_binary()).to_pylist():
                    yield Entry(row, row + 1, partial(_read_row, source, span, first + row, 0, data))
                    row += 1


def _read_row(
    source: SourceOptions, span: Span, row: int, position: int, data: bytes | None, is_located: bool
) -> Document:
    """Returns the document of a row; `is_located` is for entries of other kinds, a row always knows its number."""
    if data is None:
        raise UserError(
            f"{span.file.path}, row {row} has no {source.text_field!r} (null); remove it or set another text_field for "
            f"source {source.name}"
        )
    return _decode(source, data, position, _place_in_row(span, row))
