"""Entries and documents: a record of a file before and after it is parsed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from genesis.base.errors import UserError
from genesis.chat.conversation import leave_out_keys, read_conversation
from genesis.chat.pair import is_pair, read_pair
from genesis.chat.template import ConversationError
from genesis.data.sources.binary import guess_encodings
from genesis.data.sources.options import SourceOptions


class DamagedFileError(UserError):
    """A file is truncated or damaged: the rest of its span cannot be read."""


class Document(NamedTuple):
    """One text, its UTF-8 form, and the number of bytes of the span's file that were read up to its end.

    A document that is only white space is dropped: it has no text, and `is_blank`.

    The text of a conversation is `genesis.chat.conversation.Conversation.dump`, that of a pair of answers
    `genesis.chat.pair.Pair.dump`. Such a document has `place`, which returns the record's position, for messages. The
    `record` has the fields of a record; beside the text of a table those that were asked for.
    """

    text: str
    utf8: bytes
    position: int
    record: Mapping[str, Any] | None = None
    place: Callable[[], str] | None = None
    is_blank: bool = False


class Entry(NamedTuple):
    """One record of a span before it is parsed: start, start of the next record, and functions to parse and place it.

    `read(True)` raises `UserError` with the exact position of a bad record. `read(False)` may report a wrong line
    number, which saves a pass over the file to count lines. A record without text, such as a blank line, gives an
    empty document.
    """

    start: int
    end: int
    read: Callable[[bool], Document]
    place: Callable[[], str]


class BadRow(NamedTuple):
    """An entry without a document: its position, as that of a document, where it is, and what is wrong with it.

    `explain` and `place` may read the file up to the entry.
    """

    position: int
    place: Callable[[], str]
    explain: Callable[[], str]
    utf8: bytes = b""


def decode(source: SourceOptions, data: bytes, position: int, place: Callable[[int], str]) -> Document:
    """Returns the document of UTF-8 `data`; `place(index)` describes the position of byte `index` in the file.

    Raises:
        UserError: The data are not UTF-8, and the source does not replace such bytes.
    """
    try:
        return Document(data.decode(), data, position)
    except UnicodeDecodeError as error:
        if source.on_undecodable == "replace":
            text = data.decode(errors="replace")
            return Document(text, text.encode(), position)
        raise UserError(
            f"{place(error.start)}: byte 0x{data[error.start]:02x} is not UTF-8; {guess_encodings(data)}, or set "
            f"on_undecodable: replace for source {source.name}, which puts U+FFFD in the place of each such byte"
        ) from None


def drop_blank(document: Document, reading: int) -> Document:
    """Returns a document, without its text if that is only white space; by the rules 1 such a document is kept."""
    is_blank = reading > 1 and (not document.text or document.text.isspace())
    return Document("", b"", document.position, is_blank=True) if is_blank else document


def decode_conversation(
    source: SourceOptions, record: Mapping[str, Any], position: int, place: Callable[[], str]
) -> Document:
    """Returns the document of a record that holds a conversation, or a pair of answers.

    Raises:
        UserError: It holds none; the line begins with `place()`.
    """
    assert source.chat is not None, "a source of conversations"
    try:
        found = record
        if source.ignored_keys:
            found = leave_out_keys(record, source.ignored_keys, source.turn_field)
        if source.chat == "pairs":
            text = read_pair(found, source.turn_field).dump()
        else:
            text = read_conversation(found, source.chat, source.turn_field).dump()
        return Document(text, text.encode(), position, record, place)
    except ConversationError as error:
        is_meant = source.chat == "auto" and is_pair(record)
        hint = "; the record has a pair of answers, which chat: pairs reads" if is_meant else ""
        raise UserError(f"{place()}: {error}{hint}") from None
    except UnicodeEncodeError as error:  # JSON can contain a lone surrogate, which is not a character
        raise UserError(
            f"{place()} has a lone surrogate \\u{ord(text[error.start]):04x} in its conversation; fix or remove it"
        ) from None


def one_line(error: Exception) -> str:
    """Returns another library's error message in one line, for use within a message of this package."""
    return " ".join(str(error).split())
