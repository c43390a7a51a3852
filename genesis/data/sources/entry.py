"""Entries and documents: a record of a file before and after it is understood."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from genesis.chat.conversation import read_conversation
from genesis.chat.template import ConversationError
from genesis.data.sources.options import SourceOptions
from genesis.errors import UserError


class DamagedFileError(UserError):
    """A file is truncated or damaged: the rest of its span cannot be read."""


class Document(NamedTuple):
    """One text, its UTF-8 form, and how many bytes of the span's file were read when it came.

    The text of a conversation is `genesis.chat.conversation.Conversation.dump`. Such a document has its `record`, with
    all fields, and `place`, which returns where the record stands, for messages.
    """

    text: str
    utf8: bytes
    position: int
    record: Mapping[str, Any] | None = None
    place: Callable[[], str] | None = None


class Entry(NamedTuple):
    """One record of a span, not understood yet: where it begins, where the next one does, and how to read it.

    `read(True)` raises `UserError` with the record's place if it is bad; `read(False)` may name a wrong line, which
    saves the pass over the file that counts them. A record without text, as a blank line, gives an empty document.
    """

    start: int
    end: int
    read: Callable[[bool], Document]


def decode(source: SourceOptions, data: bytes, position: int, place: Callable[[int], str]) -> Document:
    """Returns the document of UTF-8 `data`; `place(index)` names where its byte `index` stands.

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
            f"{place(error.start)}: byte 0x{data[error.start]:02x} is not UTF-8; "
            f"fix it, or set on_undecodable: replace for source {source.name}"
        ) from None


def decode_conversation(
    source: SourceOptions, record: Mapping[str, Any], position: int, place: Callable[[], str]
) -> Document:
    """Returns the document of a record that holds a conversation.

    Raises:
        UserError: It holds no conversation; the line begins with `place()`.
    """
    assert source.chat is not None, "a source of conversations"
    try:
        text = read_conversation(record, source.chat, source.turn_field).dump()
        return Document(text, text.encode(), position, record, place)
    except ConversationError as error:
        raise UserError(f"{place()}: {error}") from None
    except UnicodeEncodeError as error:  # JSON can contain a lone surrogate, which is not a character
        raise UserError(
            f"{place()} has a lone surrogate \\u{ord(text[error.start]):04x} in its conversation; fix or remove it"
        ) from None


def one_line(error: Exception) -> str:
    """Returns another library's error message in one line, as a part of our message."""
    return " ".join(str(error).split())
