"""Reads spans of all kinds of files: their entries, from any entry on, and their documents."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import pyarrow as pa

from genesis.base.errors import UserError, numbered
from genesis.data.sources.blocks import DAMAGE, read_blocks, read_head, refuse_binary
from genesis.data.sources.entry import BadRow, DamagedFileError, Document, Entry, one_line
from genesis.data.sources.files import (
    InputFile,
    Listing,
    Span,
    check_unchanged,
    compression_of,
    explain_unreadable,
    kind_of,
    list_source,
)
from genesis.data.sources.options import SourceOptions
from genesis.data.sources.records import find_delimiter, record_entries
from genesis.data.sources.tables import TABLES, plan_row_groups, row_entries
from genesis.data.store import is_url

_MAX_SEARCHED_BYTES: Final = 1 << 28
"""Bytes that are searched for a separator; of more text without one, nothing is reported."""
_RECORDS: Final = re.compile(rb'\s*(?:\[\s*)?\{\s*"')
"""The beginning of an object of JSON, or of an array of them."""


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
                f"{file.path} is read as text, which cannot hold conversations; give jsonl, json, parquet or arrow, or "
                f"the format of source {source.name}"
            )
        if is_url(file.path):
            if file.num_bytes or kind in TABLES:  # an empty table is refused when it is read
                yield Span(file, 0, file.num_bytes, file.num_bytes)
        elif kind in TABLES:
            yield from plan_row_groups(source, file, target_bytes)
        elif compression_of(file.path) is None and (delimiter := find_delimiter(kind, source)) and delimiter.can_cut:
            for start in range(0, file.num_bytes, target_bytes):
                end = min(start + target_bytes, file.num_bytes)
                yield Span(file, start, end, end - start)
        elif file.num_bytes:
            yield Span(file, 0, file.num_bytes, file.num_bytes)


def read_entries(source: SourceOptions, span: Span, start: int = 0, fields: Sequence[str] = ()) -> Iterator[Entry]:
    """Yields the entries of a span in order, from the entry at `start`, which is 0 or the end of an entry.

    The records of tables have the columns `fields` beside the text.

    A bad record raises an error when its entry is read, not here. An uncompressed file of records is read from `start`
    on, a parquet file from the row group of that entry, a compressed file from its beginning. Memory is bounded by the
    largest record (and, for parquet, by a row group).

    Raises:
        DamagedFileError: The file is truncated or damaged.
        UserError: The file has changed or cannot be read.
    """
    check_unchanged(source, span.file)
    kind = kind_of(span.file.path, source)
    try:
        if kind not in TABLES:
            if span.reading > 1:
                refuse_binary(span.file)
            yield from record_entries(source, span, start)
        else:
            yield from row_entries(source, span, start, fields)
    except pa.ArrowNotImplementedError as error:
        raise UserError(
            f"{span.file.path} has a layout that pyarrow {pa.__version__} does not read ({one_line(error)}); write it "
            "again with plain strings"
        ) from None
    except DAMAGE as error:
        what, remedy = "is truncated or damaged", "fetch it again"
        if kind in ("csv", "tsv"):
            what, remedy = f"is no {kind} file", "correct it"
        raise DamagedFileError(f"{span.file.path} {what} ({one_line(error)}); {remedy}") from None
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
    """Yields the documents of a span in order, also those of white space, and the entries that have none.

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
        if document.utf8 or document.is_blank:
            yield document


def _explain(entry: Entry) -> str:
    try:
        entry.read(True)
    except UserError as error:
        return str(error)
    raise AssertionError("the record was bad before")


def list_sources(sources: Sequence[SourceOptions], note: Callable[[str], None]) -> dict[str, tuple[InputFile, ...]]:
    """Returns the files of each source, and calls `note` with the lines about them."""
    listings = [list_source(source) for source in sources]
    for listing in listings:
        for line in describe_listing(listing):
            note(line)
    return {listing.source.name: listing.files for listing in listings}


def describe_listing(listing: Listing) -> list[str]:
    """Returns the lines to print about the files of a source: those that are read, and what may be a mistake there."""
    notes = (_describe_json(listing.source, listing.files), _describe_missing_separator(listing.source, listing.files))
    return [listing.describe(), *filter(None, notes)]


def describe_left_out(listing: Listing) -> list[str]:
    """Returns the lines of `describe_listing`, an empty list if all files are read and nothing may be a mistake."""
    read, *notes = describe_listing(listing)
    return [read, *notes] if listing.skipped else notes


def _describe_json(source: SourceOptions, files: Sequence[InputFile]) -> str:
    """Returns a line if a file that a path names is read as text and begins as records do; empty if none does."""
    named = set(source.paths) if source.format == "auto" else set()
    for file in files:
        if file.path in named and kind_of(file.path, source) == "text":
            try:
                head = read_head(file)
            except (*DAMAGE, OSError, UserError):  # left to the readers, which report it
                continue
            if _RECORDS.match(head):
                return (
                    f"source {source.name}: {file.path} is read as text, and begins as JSON does: its names and braces "
                    "would be learned; give `format: jsonl` or `format: json`, or `format: text` if that is wanted"
                )
    return ""


def _describe_missing_separator(source: SourceOptions, files: Sequence[InputFile]) -> str:
    """Returns a line if no text file has the separator; empty if one has, or if there is nothing to separate.

    Files are read up to the first separator. What cannot be read is left to the readers, which report it.
    """
    delimiter = find_delimiter("text", source)
    texts = [file for file in files if kind_of(file.path, source) == "text" and file.num_bytes]
    if delimiter is None or not texts:
        return ""
    num_bytes = num_returns = num_breaks = 0
    try:
        for file in texts:
            tail = b""
            for block, _ in read_blocks(file):
                if num_bytes > _MAX_SEARCHED_BYTES or delimiter.is_in(tail + block):
                    return ""
                tail = block[-delimiter.num_bytes :]
                num_bytes += len(block)
                num_returns, num_breaks = num_returns + block.count(b"\r"), num_breaks + block.count(b"\n")
    except (*DAMAGE, OSError, UserError):
        return ""
    hint = ""
    if "\\" in (source.separator or ""):
        hint = "; in YAML, \\n is a line break only between double quotes"
    elif num_returns and not num_breaks and "\n" in (source.separator or ""):
        hint = "; the line breaks there are \\r alone, so write \\r for \\n"
    number = (
        "its text file is one document"
        if len(texts) == 1
        else f"each of its {numbered(len(texts), 'text files')} is one document"
    )
    return f"source {source.name}: the separator {source.separator!r} does not occur: {number}{hint}"


def is_cheap_to_reopen(source: SourceOptions, span: Span) -> bool:
    """Returns whether `read_entries` can start at any entry without reading the entries before it."""
    return kind_of(span.file.path, source) in ("text", "jsonl") and compression_of(span.file.path) is None
