"""Conversations of a source as tokens with labels: rendered, cut to a length, and counted.

A conversation is a document: whatever keeps documents whole or apart keeps conversations whole or apart. Its document
is what the chat template writes, without bos and eos around it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genesis.chat.conversation import load_conversation
from genesis.chat.options import ChatOptions, OnBadRow
from genesis.chat.render import ChatRenderer, RenderedChat, open_renderer
from genesis.chat.template import ChatTemplate, ConversationError
from genesis.data.manifest import ChatRecord
from genesis.data.shards import EncodedDocuments
from genesis.data.sources import Document, Entry, SourceOptions, Span, read_entries
from genesis.errors import UserError
from genesis.tokenizer.tokenizer import Tokenizer

CHAT_TEMPLATE_NAME: Final = "chat/template.jinja"
"""The file of a corpus with the template of its conversations: no file of the tokenizer, which may have another."""


@dataclass(frozen=True)
class ConversationCounts:
    """What became of the conversations of a source.

    Args:
        num_written: Conversations in the corpus.
        num_cut: Those among them whose end was cut off.
        num_long: Conversations that were dropped because they are long.
        num_unlearned: Conversations that were dropped because no token of them is learned.
        num_bad: Records that were skipped.
    """

    num_written: int = 0
    num_cut: int = 0
    num_long: int = 0
    num_unlearned: int = 0
    num_bad: int = 0

    def __add__(self, other: "ConversationCounts") -> "ConversationCounts":
        return ConversationCounts(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(ConversationCounts))
        )

    def describe_missing(self) -> str:
        """Returns a line about what is cut or not in the corpus; empty if nothing is."""
        parts = {
            "cut at chat.max_tokens": self.num_cut,
            "dropped as longer than chat.max_tokens": self.num_long,
            "dropped without a token to learn": self.num_unlearned,
            "skipped as bad": self.num_bad,
        }
        return ", ".join(f"{count:,} {what}" for what, count in parts.items() if count)


@dataclass(frozen=True)
class ChatSetup:
    """What a worker needs to render conversations: the template's text, its name, the options, and their identity."""

    template: str
    name: str
    options: ChatOptions
    hash: str

    def describe(self) -> dict[str, Any]:
        """Returns what decides the tokens of conversations; the template counts by its text, not by its path."""
        options = asdict(self.options)
        return {
            "template": self.hash,
            **{key: options[key] for key in ("labels", "max_tokens", "on_long", "on_bad_row")},
        }

    def record(self, counts: Mapping[str, ConversationCounts]) -> ChatRecord:
        """Returns the entry of a manifest, with the counts of each source."""
        return ChatRecord(
            template=CHAT_TEMPLATE_NAME,
            template_name=self.name,
            hash=self.hash,
            date=self.options.date,
            labels=self.options.labels,
            sources={name: asdict(of_source) for name, of_source in counts.items()},
        )

    def build(self, tokenizer: Tokenizer) -> "ConversationEncoder":
        """Returns what encodes conversations."""
        template = ChatTemplate(self.template, self.name, self.options.today)
        return ConversationEncoder(ChatRenderer(tokenizer, template, self.options.variables), self.options)


def open_chat_setup(options: ChatOptions, tokenizer: Tokenizer, tokenizer_path: Path) -> ChatSetup:
    """Returns what workers need, with the template of the options or of the tokenizer.

    Raises:
        UserError: The tokenizer or the template cannot be used for conversations.
    """
    try:
        renderer = open_renderer(tokenizer, options)
    except UserError as error:
        raise UserError(f"{tokenizer_path}: {error}") from None
    return ChatSetup(renderer.template.text, renderer.template.name, options, renderer.hash)


class BadRecord(NamedTuple):
    """A record that is skipped, and a function that says why and where; it may read the file up to the record."""

    position: int
    explain: Callable[[], str]
    utf8: bytes = b""


class EncodedChats(NamedTuple):
    """Conversations with their documents, the counts of a batch, and the line about its first bad record, if any."""

    chats: list[tuple[Document, RenderedChat]]
    counts: ConversationCounts
    fault: str


class ConversationEncoder:
    """Turns documents of conversations into tokens with labels.

    Args:
        renderer: Renders a conversation.
        options: What is learned, and what to do with long and bad ones.
    """

    def __init__(self, renderer: ChatRenderer, options: ChatOptions) -> None:
        self._renderer = renderer
        self._options = options

    def encode(self, documents: Sequence[Document | BadRecord]) -> EncodedChats:
        """Returns the tokens of conversations, and the counts of those that are cut or left out.

        Raises:
            UserError: A conversation is bad or long, and the options say to stop there; or the template cannot be used
                at all. The line names the file and the line in it.
        """
        chats: list[tuple[Document, RenderedChat]] = []
        counts, fault = ConversationCounts(), ""
        for document in documents:
            try:
                rendered, of_document = self._encode(document)
                counts += of_document
            except ConversationError as error:
                if self._options.on_bad_row == "error":
                    raise UserError(f"{error}; or set chat.on_bad_row: skip, which counts such records") from None
                counts, fault, rendered = counts + ConversationCounts(num_bad=1), fault or str(error), None
            if rendered is not None:
                assert isinstance(document, Document)
                chats.append((document, rendered))
        return EncodedChats(chats, counts, fault)

    def _encode(self, document: Document | BadRecord) -> tuple[RenderedChat | None, ConversationCounts]:
        if isinstance(document, BadRecord):
            raise ConversationError(document.explain())
        options = self._options
        try:
            rendered = self._renderer.render_conversation(load_conversation(document.text), options.labels)
        except ConversationError as error:
            raise ConversationError(f"{_place(document)}: {error}") from None
        num_tokens, limit = len(rendered.ids), options.max_tokens
        is_cut = False
        if limit is not None and num_tokens > limit:
            if options.on_long == "error":
                raise UserError(
                    f"{_place(document)}: the conversation has {num_tokens:,} tokens, chat.max_tokens is {limit:,}; "
                    "raise it, or set chat.on_long to cut or drop"
                )
            if options.on_long == "drop":
                return None, ConversationCounts(num_long=1)
            rendered, is_cut = RenderedChat(rendered.ids[:limit], rendered.trained[:limit]), True
        if not rendered.trained[1:].any():  # nothing comes before the first token
            return None, ConversationCounts(num_unlearned=1)
        return rendered, ConversationCounts(num_written=1, num_cut=int(is_cut))


def read_conversations(source: SourceOptions, span: Span, on_bad_row: OnBadRow) -> Iterator[Document | BadRecord]:
    """Yields the conversations of a span in order, and records that are none where these are to be skipped.

    Raises:
        UserError: The file has changed or is damaged, or a record is no conversation and the options say to stop there.
    """
    position = 0
    for entry in read_entries(source, span):
        try:
            document = entry.read(on_bad_row == "error")
        except UserError as error:
            if on_bad_row == "error":
                raise UserError(f"{error}; or set chat.on_bad_row: skip, which counts such records") from None
            yield BadRecord(position, partial(_explain, entry))
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


def join_rendered(chats: list[RenderedChat], token_num_bytes: NDArray[np.int32]) -> EncodedDocuments:
    """Returns conversations as documents for a shard."""
    tokens = np.concatenate([chat.ids for chat in chats])
    trained = np.concatenate([chat.trained for chat in chats])
    return EncodedDocuments(
        tokens=tokens,
        lengths=np.array([len(chat.ids) for chat in chats], np.int64),
        num_text_bytes=int(token_num_bytes[tokens].sum(dtype=np.int64)),
        has_label=None if trained.all() else trained,
    )


def _place(document: Document) -> str:
    assert document.place is not None, "a document of a source of conversations"
    return document.place()
