"""Reads the entries of tables: parquet files, and Arrow, CSV and TSV files through the same interface.

Text may lie in any layout that Arrow has for it: strings and bytes, with long or short offsets or as views, as a
dictionary, run-end encoded, or in an extension type whose storage is one of these.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from genesis.base.errors import UserError
from genesis.data.sources.binary import find_binary, guess_encodings
from genesis.data.sources.blocks import (
    MAX_RECORD_BYTES,
    BlockStream,
    check_expansion,
    open_local,
    read_head,
    refuse_binary,
)
from genesis.data.sources.entry import Document, Entry, decode, decode_conversation, drop_blank, one_line
from genesis.data.sources.files import InputFile, Span, compression_of, kind_of
from genesis.data.sources.options import Kind, SourceOptions
from genesis.data.sources.table_files import Table, open_arrow, open_csv, open_parquet
from genesis_callbacks.base.untrusted import check_file

TABLES: Final[frozenset[Kind]] = frozenset(("parquet", "arrow", "csv", "tsv"))
"""The kinds of tables."""

_MAX_NAMES: Final = 40
"""Columns that a message lists, at most."""


def plan_row_groups(source: SourceOptions, file: InputFile, target_bytes: int) -> Iterator[Span]:
    """Yields spans of whole row groups, of about `target_bytes`.

    Raises:
        UserError: The file is damaged, or has no text in `text_field`, or columns of one name.
    """
    kind = kind_of(file.path, source)
    try:
        with _open(source, file, Path(file.path)) as table:
            sizes = table.num_bytes
    except pa.ArrowException as error:
        what = find_binary(read_head(file)) if kind in ("parquet", "arrow") else None
        raise UserError(
            f"{file.path} is {'no' if kind in ('csv', 'tsv') else 'not a complete'} {kind} file ({one_line(error)}); "
            # A name of its own kind is no remedy: the file begins as it should, and is cut off.
            + (f"it is {what}" if what and f"format: {kind}" not in what else "correct it, or fetch it again")
        ) from None
    start, num_bytes = 0, 0
    for index, size in enumerate(sizes):
        num_bytes += size
        if num_bytes >= target_bytes or index + 1 == len(sizes):
            yield Span(file, start, index + 1, num_bytes)
            start, num_bytes = index + 1, 0


def row_entries(source: SourceOptions, span: Span, start: int, fields: Sequence[str]) -> Iterator[Entry]:
    """Yields the rows of a span, from row `start` of the span on; row groups before it are not read.

    The documents of texts have those of the columns `fields` that there are as their records.
    """
    with open_local(span.file) as path, _open(source, span.file, path) as table:
        first = sum(table.num_rows[: span.start])
        row = position = 0
        for index in range(span.start, min(span.end, len(table.num_rows))):
            num_skipped = min(max(start - row, 0), table.num_rows[index])
            row += num_skipped
            if num_skipped < table.num_rows[index]:
                for text, record in _read_values(source, table, index, num_skipped, fields):
                    place = partial("{}, row {}".format, span.file.path, first + row)
                    read = partial(_read_row, source, span, text, record)
                    yield Entry(row, row + 1, partial(read, position, place), place)
                    row += 1
            # Of a file that is one span, `num_bytes` is the compressed size.
            position = min(position + table.num_bytes[index], span.num_bytes)


def _read_values(
    source: SourceOptions, table: Table, group: int, num_skipped: int, fields: Sequence[str]
) -> Iterator[tuple[bytes | None, dict[str, Any]]]:
    """Yields the rows of a row group without the first `num_skipped`: text and some fields, or conversations."""
    names = table.schema.names
    path = _find_column(source.text_field, table.schema) if source.chat is None else None
    columns = (
        list(names) if path is None else list(dict.fromkeys((path[0], *(name for name in fields if name in names))))
    )
    for batch in table.read(group, columns):
        rest = batch.slice(min(num_skipped, len(batch)))
        num_skipped -= len(batch) - len(rest)
        if path is None:
            yield from ((None, _plain(record)) for record in rest.to_pylist())
        else:
            # Parquet's `columns` are paths, so that another column may come with this one.
            texts = _bytes_of(rest.column(rest.schema.names.index(path[0])), path[1:]).to_pylist()
            others = rest.select([name for name in fields if name in columns])
            records = others.to_pylist() if others.num_columns else [{}] * len(texts)
            yield from ((text, _plain(record)) for text, record in zip(texts, records, strict=True))


def _bytes_of(column: Any, path: Sequence[str]) -> Any:
    """Returns the bytes of a column of text, in any layout, or of the text in its objects at a path."""
    for name in path:
        column = pc.struct_field(_stored(column), name)
    return _stored(column).cast(pa.large_binary())


def _stored(column: Any) -> Any:
    """Returns the values of a column without the layouts around them."""
    while True:
        if isinstance(column.type, pa.BaseExtensionType):
            column = column.storage
        elif pa.types.is_dictionary(column.type):
            values = _stored(column.dictionary)
            if pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type):
                values = values.cast(pa.large_binary())  # Arrow cannot take from views
            column = values.take(column.indices)
        elif pa.types.is_run_end_encoded(column.type):
            column = pc.run_end_decode(column)
        else:
            return column


def _read_row(
    source: SourceOptions,
    span: Span,
    text: bytes | None,
    record: dict[str, Any],
    position: int,
    place: Callable[[], str],
    is_located: bool,
) -> Document:
    """Returns the document of a row; `is_located` has no effect, because a row's number is always known."""
    if source.chat is not None:
        return decode_conversation(source, record, position, place)
    if text is None:
        raise UserError(
            f"{place()} has no {source.text_field!r} (null); remove it or set another text_field for source "
            f"{source.name}"
        )
    if len(text) > MAX_RECORD_BYTES:
        raise UserError(
            f"{place()} has more than {MAX_RECORD_BYTES >> 20} MiB of text, the most that is read; divide it"
        )
    document = decode(source, text, position, lambda index: f"{place()}, offset {index} of its text")
    return drop_blank(document._replace(record=record), span.reading)


@contextmanager
def _open(source: SourceOptions, file: InputFile, path: Path) -> Iterator[Table]:
    """Yields the table in a file, which lies at `path`, after checking its columns."""
    kind, compression = kind_of(file.path, source), compression_of(file.path)
    check_file(path)
    if kind in ("csv", "tsv"):
        refuse_binary(file)
        open_expanded = None if compression is None else partial(BlockStream, file)
        try:
            table = open_csv(path, "," if kind == "csv" else "\t", open_expanded)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file.path}: the names of its columns are not UTF-8; {guess_encodings(error.object)}"
            ) from None
        _check_column(source, file.path, table.schema)
        yield table
        return
    if compression is not None:
        raise UserError(f"{file.path}: a {kind} file cannot be read while it is compressed as a whole; decompress it")
    check = partial(check_expansion, file.path, num_bytes=path.stat().st_size)
    with (open_arrow if kind == "arrow" else open_parquet)(path, check) as table:
        _check_column(source, file.path, table.schema)
        yield table


def _plain(value: Any) -> Any:
    """Returns a value of a table as JSON has it, without keys that are null: an object has the keys of its column."""
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
        value = dict(value) if len(dict(value)) == len(value) else value  # a map, whose items are the only tuples
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return _decoded(value) if isinstance(value, bytes) else value


def _decoded(value: bytes) -> str | bytes:
    """Returns the text of writers that do not mark it as such; other bytes as they are."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _check_column(source: SourceOptions, path: str, schema: pa.Schema) -> None:
    """Refuses a table whose names do not tell its columns apart, or without text in `text_field`."""
    if source.chat is not None:  # the form decides, by all columns
        _refuse_twins(path, schema, "")
        return
    found = _find_column(source.text_field, schema)
    if found is None:
        raise UserError(
            f"{path} has no column {source.text_field!r} (it has: {', '.join(_names_of(schema))}); "
            f"set text_field of source {source.name}"
        )
    if schema.names.count(found[0]) > 1:
        raise UserError(
            f"{path} has {schema.names.count(found[0])} columns named {found[0]!r}; rename one, or set text_field of "
            f"source {source.name}"
        )
    kind = _stored_type(schema.field(found[0]).type)
    for name in found[1:]:
        kind = _stored_type(kind.field(name).type)
    # A column of nulls alone has a type of its own; its rows are bad ones.
    is_text = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
    if not any(getattr(pa.types, f"is_{name}")(kind) for name in is_text):
        inner = _names_of(kind, f"{source.text_field}.") if pa.types.is_struct(kind) else ()
        hint = f", as {source.text_field}.{kind.field(0).name} (it has: {', '.join(inner)})" if inner else ""
        raise UserError(
            f"{path}: column {source.text_field!r} is {kind}, not text; set text_field of source {source.name}{hint}"
        )


def _find_column(text_field: str, schema: pa.Schema) -> tuple[str, ...] | None:
    """Returns the column with this name, or the path to a field in the objects of a column; None if there is none."""
    if text_field in schema.names:
        return (text_field,)
    first, *rest = text_field.split(".")
    if not rest or first not in schema.names:
        return None
    kind = _stored_type(schema.field(schema.names.index(first)).type)
    for name in rest:
        if not pa.types.is_struct(kind) or [field.name for field in kind].count(name) != 1:
            return None
        kind = _stored_type(kind.field(name).type)
    return (first, *rest)


def _names_of(fields: Any, prefix: str = "") -> list[str]:
    """Returns the names of columns, and the paths to the fields of columns of objects."""
    names = []
    for field in fields:
        kind = _stored_type(field.type)
        inner = _names_of(kind, f"{prefix}{field.name}.") if pa.types.is_struct(kind) else []
        names += [f"{prefix}{field.name}", *inner]
    return names[:_MAX_NAMES]


def _refuse_twins(path: str, fields: Any, prefix: str) -> None:
    """Refuses two columns, or two fields of objects, with one name: a record cannot hold both."""
    names = [field.name for field in fields]
    for field in fields:
        if names.count(field.name) > 1:
            raise UserError(f"{path} has {names.count(field.name)} columns named {prefix + field.name!r}; rename one")
        kind = _stored_type(field.type)
        while hasattr(kind, "value_type"):
            kind = _stored_type(kind.value_type)
        if pa.types.is_struct(kind):
            _refuse_twins(path, kind, f"{prefix}{field.name}.")


def _stored_type(kind: Any) -> Any:
    """Returns the type of the values of a column without the layouts around them."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind
