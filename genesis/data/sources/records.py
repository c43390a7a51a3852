"""Reads the entries of text files, whole or cut at a separator, and of jsonl and json files."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.data.sources.blocks import Delimiter, check_record_bytes, read_blocks, split_records
from genesis.data.sources.entry import Document, Entry, decode, decode_conversation, drop_blank, one_line
from genesis.data.sources.files import READING, Span, compression_of, kind_of
from genesis.data.sources.json_values import split_values
from genesis.data.sources.options import Kind, SourceOptions
from genesis_callbacks.base.json_text import load_json

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_HTML_DOCTYPE: Final = b"<!doctype html"


def find_delimiter(kind: Kind, source: SourceOptions, reading: int = READING) -> Delimiter | None:
    """Returns the delimiter between records; None if a file is a single record, or a JSON array."""
    if kind == "jsonl":
        return Delimiter(b"\n")
    if kind != "text" or source.separator is None:
        return None
    return Delimiter(source.separator.encode()) if reading == 1 else Delimiter.of(source.separator)


def record_entries(source: SourceOptions, span: Span, start: int) -> Iterator[Entry]:
    """Yields the entries of a span, from the entry at `start` on."""
    kind = kind_of(span.file.path, source)
    read = partial(_read_record, source, span, kind)
    delimiter = find_delimiter(kind, source, span.reading)
    if kind == "json":
        records = split_values(span, start)
    elif delimiter is not None:
        records = split_records(span, delimiter, start)
    else:
        if start == 0:
            blocks: list[bytes] = []
            for block, _ in read_blocks(span.file):
                blocks.append(block)
                check_record_bytes(span.file, 0, sum(map(len, blocks)))
            yield Entry(0, 1, partial(read, 0, b"".join(blocks), span.num_bytes), lambda: span.file.path)
        return
    for record in records:
        place = partial(_line, span, record.start)
        yield Entry(record.start, record.end, partial(read, record.start, record.data, record.position), place)


def _read_record(
    source: SourceOptions, span: Span, kind: Kind, offset: int, record: bytes, position: int, is_located: bool
) -> Document:
    if kind == "text":
        text = record.removeprefix(_BYTE_ORDER_MARK) if offset == 0 and span.reading > 1 else record
        place = _place_in_file(span, offset + len(record) - len(text))
        return drop_blank(decode(source, text, position, place), span.reading)
    line = record.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else record
    if not line.strip():
        return Document("", b"", position)
    decoded = decode(source, line, position, _place_in_file(span, offset + len(record) - len(line)))
    shown = offset if is_located else 0
    try:
        # By the rules 1 the last value of a key counts.
        fields = load_json(decoded.text) if span.reading > 1 else json.loads(decoded.text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise UserError(f"{_line(span, shown)} is not JSON ({one_line(error)}); {_explain_no_json(line)}") from None
    if source.chat is not None:
        found = decode_conversation(source, _object_of(span, shown, fields), position, partial(_line, span, shown))
        return found._replace(place=partial(_line, span, offset))
    document = _encode(source, span, shown, _text_of(source, span, shown, fields), position)
    return drop_blank(document._replace(record=fields), span.reading)


def _explain_no_json(line: bytes) -> str:
    if line.lstrip()[: len(_HTML_DOCTYPE)].lower().startswith((_HTML_DOCTYPE, b"<html")):
        return "the file is an HTML page, as a download without permission gives; get the file itself"
    if b"\r" in line.strip():
        return "its lines end in CR alone, as on old Macs; write it with LF: tr '\\r' '\\n' < OLD > NEW"
    return "fix or remove it"


def _object_of(span: Span, offset: int, fields: object) -> dict[str, Any]:
    if not isinstance(fields, dict):
        hint = ", or name the file .json, or set format: json" if isinstance(fields, list) and offset == 0 else ""
        raise UserError(
            f"{_line(span, offset)} is a JSON {type(fields).__name__}, not an object; fix or remove it{hint}"
        )
    return fields


def _text_of(source: SourceOptions, span: Span, offset: int, fields: object) -> str:
    text = _field_of(source, span, offset, _object_of(span, offset, fields))
    if not isinstance(text, str):
        raise UserError(
            f"{_line(span, offset)}: field {source.text_field!r} is {json.dumps(text)[:40]}, not text; "
            f"fix it or set text_field of source {source.name}"
        )
    return text


def _field_of(source: SourceOptions, span: Span, offset: int, fields: dict[str, Any]) -> Any:
    """Returns the value of `text_field`: a field of that name, or a path of names through objects."""
    if source.text_field in fields:
        return fields[source.text_field]
    found: Any = fields
    for name in source.text_field.split("."):
        if not isinstance(found, dict) or name not in found:
            names = ", ".join(list(fields)[:20]) or "none"
            raise UserError(
                f"{_line(span, offset)} has no field {source.text_field!r} (it has: {names}); "
                f"set text_field of source {source.name}{_hint(span, source)}"
            )
        found = found[name]
    return found


def _hint(span: Span, source: SourceOptions) -> str:
    return ", or format: text to learn the file itself" if kind_of(span.file.path, source) == "json" else ""


def _encode(source: SourceOptions, span: Span, offset: int, text: str, position: int) -> Document:
    try:
        return Document(text, text.encode(), position)
    except UnicodeEncodeError as error:  # JSON can contain a lone surrogate, which is not a character
        if source.on_undecodable == "replace":
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return Document(text, text.encode(), position)
        raise UserError(
            f"{_line(span, offset)} has a lone surrogate \\u{ord(text[error.start]):04x} at character {error.start} of "
            f"its text; fix it, or set on_undecodable: replace for source {source.name}"
        ) from None


def _line(span: Span, offset: int) -> str:
    number = 1
    for block, _ in read_blocks(span.file):
        number += block[:offset].count(b"\n")
        offset -= len(block)
        if offset <= 0:
            break
    return f"{span.file.path}, line {number}"


def _place_in_file(span: Span, offset: int) -> Callable[[int], str]:
    def place(index: int) -> str:
        text = " of its decompressed text" if compression_of(span.file.path) is not None else ""
        return f"{span.file.path}, offset {offset + index}{text}"

    return place
