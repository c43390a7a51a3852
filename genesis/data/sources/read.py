"""Reads spans of all kinds of files: their entries, from any entry on, and their documents."""

from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa

from genesis.data.sources.blocks import DAMAGE, can_cut
from genesis.data.sources.entry import BadRow, DamagedFileError, Document, Entry, one_line
from genesis.data.sources.files import InputFile, Span, check_unchanged, compression_of, explain_unreadable, kind_of
from genesis.data.sources.options import SourceOptions
from genesis.data.sources.records import find_delimiter, record_entries
from genesis.data.sources.tables import TABLES, plan_row_groups, row_entries
from genesis.data.store import is_url
from genesis.errors import UserError


def plan_spans(source: SourceOptions, files: Sequence[InputFile], target_bytes: int) -> Iterator[Span]:
    """Yields the spans of a source's files in order, of about `target_bytes` where a file can be cut.

    A file in a store is one span: reading any part requires a download of the whole file, and a small cache might not
    keep the file until the next span.

    Raises:
        UserError: A parquet file is damaged, or has no text in `text_field`.
    """
    for file in files:
        kind = kind_of(file.path, source)
        if kind == "text" and source.chat is not None:
            raise UserError(
                f"{file.path} is read as text, which cannot hold conversations; give jsonl, parquet or arrow, or the "
                f"format of source {source.name}"
            )
        if is_url(file.path):
            if file.num_bytes or kind in TABLES:  # an empty table is refused when it is read
                yield Span(file, 0, file.num_bytes, file.num_bytes)
        elif kind in TABLES:
            yield from plan_row_groups(source, file, target_bytes)
        elif compression_of(file.path) is None and can_cut(find_delimiter(kind, source)):
            for start in range(0, file.num_bytes, target_bytes):
                end = min(start + target_bytes, file.num_bytes)
                yield Span(file, start, end, end - start)
        elif file.num_bytes:
            yield Span(file, 0, file.num_bytes, file.num_bytes)


def read_entries(source: SourceOptions, span: Span, start: int = 0) -> Iterator[Entry]:
    """Yields the entries of a span in order, from the entry at `start`, which is 0 or the end of an entry.

    A bad record raises an error when its entry is read, not here. An uncompressed file of records is read from `start`
    on, a parquet file from the row group of that entry, a compressed file from its beginning. Memory is bounded by the
    largest record (and, for parquet, by a row group).

    Raises:
        DamagedFileError: The file is truncated or damaged.
        UserError: The file has changed or cannot be read.
    """
    check_unchanged(source, span.file)
    entries = row_entries if kind_of(span.file.path, source) in TABLES else record_entries
    try:
        yield from entries(source, span, start)
    except pa.ArrowNotImplementedError as error:
        raise UserError(
            f"{span.file.path} has a layout that pyarrow {pa.__version__} does not read ({one_line(error)}); write it "
            "again with plain strings"
        ) from None
    except DAMAGE as error:
        raise DamagedFileError(
            f"{span.file.path} is truncated or damaged ({one_line(error)}); fetch it again"
        ) from None
    except OSError as error:
        if error.errno is None:  # pyarrow raises it for data that does not decompress
            raise DamagedFileError(f"{span.file.path} is damaged ({one_line(error)}); fetch it again") from None
        raise explain_unreadable(span.file.path, source, error) from None
    check_unchanged(source, span.file)


def read_documents(source: SourceOptions, span: Span) -> Iterator[Document]:
    """Yields the documents of a span in order; empty ones are left out.

    Raises:
        UserError: The file has changed or is damaged, or a document does not match the options in `source`; the message
            has the file and the position in it.
    """
    for entry in read_entries(source, span):
        document = entry.read(True)
        if document.utf8:
            yield document


def read_rows(source: SourceOptions, span: Span) -> Iterator[Document | BadRow]:
    """Yields the documents of a span in order, without empty ones, and the entries that have none.

    Raises:
        UserError: The file has changed or is damaged.
    """
    position = 0
    for entry in read_entries(source, span):
        try:
            document = entry.read(False)
        except UserError:
            yield BadRow(position, entry.place, partial(_explain, entry))
            continue
        position = document.position
        if document.utf8:
            yield document


def _explain(entry: Entry) -> str:
    try:
        entry.read(True)
    except UserError as error:
        return str(error)
    raise AssertionError("the record was bad before")


def is_cheap_to_reopen(source: SourceOptions, span: Span) -> bool:
    """Returns whether `read_entries` can start at any entry without reading the entries before it."""
    return kind_of(span.file.path, source) not in TABLES and compression_of(span.file.path) is None
