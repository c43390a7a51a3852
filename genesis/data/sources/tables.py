"""Reads the entries of tables: parquet files, and Arrow streams through the same interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from genesis.data.arrow_file import ArrowFile
from genesis.data.sources.blocks import open_local
from genesis.data.sources.entry import Document, Entry, decode, decode_conversation, one_line
from genesis.data.sources.files import InputFile, Span, kind_of
from genesis.data.sources.options import Kind, SourceOptions
from genesis.errors import UserError

TABLES: Final[dict[Kind, Callable[[str | Path], Any]]] = {"parquet": pq.ParquetFile, "arrow": ArrowFile}
"""The function that opens a table, by kind."""

_ROWS_PER_BATCH: Final = 256


def plan_row_groups(source: SourceOptions, file: InputFile, target_bytes: int) -> Iterator[Span]:
    """Yields spans of whole row groups, of about `target_bytes`.

    Raises:
        UserError: The file is damaged, or has no text in `text_field`.
    """
    kind = kind_of(file.path, source)
    try:
        with TABLES[kind](file.path) as table:
            _check_column(source, file.path, table.schema_arrow)
            sizes = [table.metadata.row_group(index).total_byte_size for index in range(table.num_row_groups)]
    except pa.ArrowException as error:
        raise UserError(f"{file.path} is not a complete {kind} file ({one_line(error)}); fetch it again") from None
    start, num_bytes = 0, 0
    for index, size in enumerate(sizes):
        num_bytes += size
        if num_bytes >= target_bytes or index + 1 == len(sizes):
            yield Span(file, start, index + 1, num_bytes)
            start, num_bytes = index + 1, 0


def row_entries(source: SourceOptions, span: Span, start: int) -> Iterator[Entry]:
    """Yields the rows of a span, from row `start` of the span on; row groups before it are not read."""
    with _open_table(source, span) as (table, groups):
        first = sum(table.metadata.row_group(index).num_rows for index in range(span.start))
        row = position = 0
        for index in groups:
            group = table.metadata.row_group(index)
            num_skipped = min(max(start - row, 0), group.num_rows)
            row += num_skipped
            if num_skipped < group.num_rows:
                for data in _read_values(source, table, index, num_skipped):
                    yield Entry(row, row + 1, partial(_read_row, source, span, first + row, position, data))
                    row += 1
            # Of a file that is one span, `num_bytes` is the compressed size.
            position = min(position + group.total_byte_size, span.num_bytes)


def _read_values(source: SourceOptions, table: Any, group: int, num_skipped: int) -> Iterator[Any]:
    """Yields the texts of a row group, or its records with conversations, without the first `num_skipped`."""
    columns = [source.text_field] if source.chat is None else list(table.schema_arrow.names)
    for batch in table.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=columns):
        if source.chat is not None:
            rest = batch.slice(min(num_skipped, len(batch)))
            num_skipped -= len(batch) - len(rest)
            yield from map(_without_nulls, rest.to_pylist())
            continue
        column = batch.column(0)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        rest = column.slice(min(num_skipped, len(column)))
        num_skipped -= len(column) - len(rest)
        yield from rest.cast(pa.large_binary()).to_pylist()


def _read_row(source: SourceOptions, span: Span, row: int, position: int, data: Any, is_located: bool) -> Document:
    """Returns the document of a row; `is_located` has no effect, because a row's number is always known."""
    if source.chat is not None:
        return decode_conversation(source, data, position, partial("{}, row {}".format, span.file.path, row))
    if data is None:
        raise UserError(
            f"{span.file.path}, row {row} has no {source.text_field!r} (null); remove it or set another text_field for "
            f"source {source.name}"
        )
    return decode(source, data, position, lambda index: f"{span.file.path}, row {row}, offset {index} of its text")


@contextmanager
def _open_table(source: SourceOptions, span: Span) -> Iterator[tuple[Any, range]]:
    """Yields the open file and the span's row groups."""
    kind = kind_of(span.file.path, source)
    with open_local(span.file) as path, TABLES[kind](path) as table:
        _check_column(source, span.file.path, table.schema_arrow)
        yield table, range(span.start, min(span.end, table.num_row_groups))


def _without_nulls(value: Any) -> Any:
    """Returns a value of a table without its keys that are null: a column of objects has the keys of all of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _check_column(source: SourceOptions, path: str, schema: pa.Schema) -> None:
    if source.chat is not None:
        return  # the form decides, by all columns
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
