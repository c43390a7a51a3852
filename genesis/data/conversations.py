"""Conversations of a source as tokens with labels: rendered, cut to a length, and counted.

A conversation is a document: whatever keeps documents whole or apart keeps conversations whole or apart. Its document
is what the chat template writes, without bos and eos around it. A pair of answers is two documents, one after the
other: the prompt with the chosen answer, and the prompt with the rejected one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genesis.chat.conversation import Conversation, load_conversation
from genesis.chat.learned import find_recorded
from genesis.chat.options import ChatOptions, OnBadRow
from genesis.chat.pair import load_pair
from genesis.chat.render import ChatRenderer, RenderedChat, open_renderer
from genesis.chat.stops import check_ends
from genesis.chat.template import ChatTemplate, ConversationError
from genesis.data.manifest import ChatRecord
from genesis.data.shards import EncodedDocuments
from genesis.data.sources import Document, Entry, SourceOptions, Span, read_entries
from genesis.errors import UserError
from genesis.run_directory import CHAT_TEMPLATE_NAME
from genesis.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ConversationCounts:
    """What became of the conversations of a source; if it has pairs, each of them counts once.

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
    is_paired: bool = False

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
            is_paired=self.is_paired,
        )

    def build(self, tokenizer: Tokenizer) -> "ConversationEncoder":
        """Returns what encodes conversations."""
        template = ChatTemplate(self.template, self.name, self.options.today)
        renderer = ChatRenderer(tokenizer, template, self.options.variables)
        return ConversationEncoder(renderer, self.options, is_paired=self.is_paired)


def open_chat_setup(
    options: ChatOptions, tokenizer: Tokenizer, tokenizer_path: Path, *, is_paired: bool = False
) -> ChatSetup:
    """Returns what workers need, with the template of the options or of the tokenizer.

    Raises:
        UserError: The tokenizer or the template cannot be used for conversations.
    """
    try:
        renderer = open_renderer(tokenizer, options, learned=find_recorded(tokenizer_path))
        check_ends(renderer.template, tokenizer, options.variables)
    except UserError as error:
        raise UserError(f"{tokenizer_path}: {error}") from None
    return ChatSetup(renderer.template.text, renderer.template.name, options, renderer.hash, is_paired)


class BadRecord(NamedTuple):
    """A record that is skipped, and a function that says why and where; it may read the file up to the record."""

    position: int
    explain: Callable[[], str]
    utf8: bytes = b""


Rendered = tuple[RenderedChat, ...]
"""The documents of a record: one conversation, or the two of a pair."""


class EncodedChats(NamedTuple):
    """Conversations with their documents, the counts of a batch, and the line about its first bad record, if any."""

    chats: list[tuple[Document, Rendered]]
    counts: ConversationCounts
    fault: str


class ConversationEncoder:
    """Turns documents of conversations into tokens with labels.

    Args:
        renderer: Renders a conversation.
        options: What is learned, and what to do with long and bad ones.
        is_paired: Whether each document is a pair of answers.
    """

    def __init__(self, renderer: ChatRenderer, options: ChatOptions, *, is_paired: bool = False) -> None:
        self._renderer = renderer
        self._options = options
        self._is_paired = is_paired

    def encode(self, documents: Sequence[Document | BadRecord]) -> EncodedChats:
        """Returns the tokens of conversations, and the counts of those that are cut or left out.

        Raises:
            UserError: A conversation is bad or long, and the options say to stop there; or the template cannot be used
                at all. The line names the file and the line in it.
        """
        chats: list[tuple[Document, Rendered]] = []
        counts, fault = ConversationCounts(), ""
        for document in documents:
            rendered: Rendered = ()
            try:
                rendered, of_document = self._encode(document)
                counts += of_document
            except ConversationError as error:
                if self._options.on_bad_row == "error":
                    raise UserError(f"{error}; or set chat.on_bad_row: skip, which counts such records") from None
                counts, fault = counts + ConversationCounts(num_bad=1), fault or str(error)
            if rendered:
                assert isinstance(document, Document)
                chats.append((document, rendered))
        return EncodedChats(chats, counts, fault)

    def _encode(self, document: Document | BadRecord) -> tuple[Rendered, ConversationCounts]:
        """Returns the documents of a record, none if it is dropped, and its counts."""
        if isinstance(document, BadRecord):
            raise ConversationError(document.explain())
        options = self._options
        try:
            rendered = self._render_pair(document) if self._is_paired else (self._render(document.text),)
        except ConversationError as error:
            raise ConversationError(f"{_place(document)}: {error}") from None
        num_tokens, limit = max(len(chat.ids) for chat in rendered), options.max_tokens
        is_cut = False
        if limit is not None and num_tokens > limit:
            if options.on_long == "error":
                what = (
                    "the longer answer of the pair has, with its prompt," if self._is_paired else "the conversation has"
                )
                raise UserError(
                    f"{_place(document)}: {what} {num_tokens:,} tokens, chat.max_tokens is {limit:,}; raise it, or set "
                    "chat.on_long to cut or drop"
                )
            if options.on_long == "drop":
                return (), ConversationCounts(num_long=1)
            rendered, is_cut = tuple(RenderedChat(chat.ids[:limit], chat.trained[:limit]) for chat in rendered), True
        # Nothing comes before the first token. Of a pair, what is cut off may have been the difference.
        is_same = len(rendered) > 1 and np.array_equal(rendered[0].ids, rendered[1].ids)
        if is_same or not all(chat.trained[1:].any() for chat in rendered):
            return (), ConversationCounts(num_unlearned=1)
        return rendered, ConversationCounts(num_written=1, num_cut=int(is_cut))

    def _render(self, text: str) -> RenderedChat:
        return self._renderer.render_conversation(load_conversation(text), self._options.labels)

    def _render_pair(self, document: Document) -> Rendered:
        pair = load_pair(document.text)
        rendered = tuple(self._render_answer(name, vars(pair)[name]) for name in ("chosen", "rejected"))
        asked, again = (chat.ids[: int(chat.trained.argmax())] for chat in rendered)
        if not np.array_equal(asked, again):
            raise ConversationError(
                f"the chat template {self._renderer.template.name} writes the prompt of the pair in two ways, so that "
                "its answers cannot be compared; give a template whose text before an answer does not depend on it "
                "and ends with a control symbol or a line break, which no token joins with the answer's first word"
            )
        return rendered

    def _render_answer(self, name: str, conversation: Conversation) -> RenderedChat:
        try:
            return self._renderer.render_conversation(conversation, self._options.labels)
        except ConversationError as error:
            raise ConversationError(f"the {name} answer: {error}") from None


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


def join_rendered(chats: Sequence[RenderedChat], token_num_bytes: NDArray[np.int32]) -> EncodedDocuments:
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
