"""Conversations of a source as tokens with labels: rendered, cut to a length, and counted.

A conversation is a document: whatever keeps documents whole or apart keeps conversations whole or apart. Its document
is what the chat template writes, without bos and eos around it. A pair of answers is two documents, one after the
other: the prompt with the chosen answer, and the prompt with the rejected one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genesis.base.errors import UserError, numbered
from genesis.base.run_directory import CHAT_TEMPLATE_NAME
from genesis.chat.conversation import Conversation, find_unused_fields, load_conversation
from genesis.chat.learned import find_recorded
from genesis.chat.marks import UnclearMarkError
from genesis.chat.options import ChatOptions
from genesis.chat.pair import load_pair
from genesis.chat.pool import Steps, run_steps
from genesis.chat.proof import prove_template
from genesis.chat.render import ChatRenderer, RenderedChat, open_renderer
from genesis.chat.stops import check_ends
from genesis.chat.template import ChatTemplate, ConversationError, EndlessTemplateError
from genesis.data.manifest import MANIFEST_NAME, ChatRecord
from genesis.data.row_notes import MAX_REFUSED, RefusedRow, RowNotes, SkippedCounter, count_all, strip_place
from genesis.data.shards import MAX_VALUE, EncodedDocuments, mark_labels
from genesis.data.sources import BadRow, Document, SourceOptions
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import read_file

_GROUP_DOCUMENTS: Final = 64
_GROUP_BYTES: Final = 1 << 17


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
        return ConversationCounts(*map(add, vars(self).values(), vars(other).values()))

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
    has_values: bool = False

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
            has_values=self.has_values,
        )

    def build(self, tokenizer: Tokenizer, source: SourceOptions) -> "ConversationEncoder":
        """Returns what encodes the conversations of a source."""
        template = ChatTemplate(self.template, self.name, self.options.today)
        renderer = ChatRenderer(tokenizer, template, self.options.variables)
        return ConversationEncoder(renderer, self.options, source, is_paired=self.is_paired)


def open_chat_setup(
    options: ChatOptions,
    tokenizer: Tokenizer,
    tokenizer_path: Path,
    *,
    is_paired: bool = False,
    has_values: bool = False,
    warn: Callable[[str], None],
) -> ChatSetup:
    """Returns what workers need, with the template of the options or of the tokenizer, which is proved.

    Args:
        options: The options.
        tokenizer: The tokenizer.
        tokenizer_path: The directory of the tokenizer, which may hold a template that was learned.
        is_paired: Whether each record has two answers.
        has_values: Whether each conversation has a value.
        warn: Gets a line for each doubt about the template.

    Raises:
        UserError: The tokenizer or the template cannot be used for conversations.
    """
    try:
        renderer = open_renderer(tokenizer, options, learned=find_recorded(tokenizer_path))
        check_ends(renderer.template, tokenizer, options.variables)
        own = None
        if tokenizer.chat_template is not None:
            own = ChatTemplate(tokenizer.chat_template, "of the tokenizer", options.today)
        variables = {**tokenizer.named_tokens, **options.variables}
        for line in prove_template(renderer.template, own, variables, is_given=options.template is not None):
            warn(line)
    except UserError as error:
        raise UserError(f"{tokenizer_path}: {error}") from None
    return ChatSetup(renderer.template.text, renderer.template.name, options, renderer.hash, is_paired, has_values)


def limit_conversations(chat: ChatOptions, seq_len: int | None, recorded: Path | None) -> ChatOptions:
    """Returns the options of conversations, of which one is long if the packing would cut it.

    Args:
        chat: The options as given.
        seq_len: The length of the packing that is planned with the corpus; None without one.
        recorded: The plan of an earlier attempt. A corpus that it finished keeps its limit, so that it can get a
            packing of another length; None for an attempt that starts again.

    Raises:
        UserError: Long conversations are to be cut or dropped, and no length is given.
    """
    if chat.max_tokens is not None:
        return chat
    if chat.on_long != "error" and seq_len is None:
        raise UserError(
            f"chat.on_long is {chat.on_long}, and no length is given: give chat.max_tokens, the data.seq_len of the "
            "training"
        )
    if recorded is not None and recorded.exists() and (recorded.parents[1] / MANIFEST_NAME).exists():
        seq_len = (load_json(read_file(recorded)).get("chat") or {}).get("max_tokens")
    return replace(chat, max_tokens=seq_len)


Rendered = tuple[RenderedChat, ...]
"""The documents of a record: one conversation, or the two of a pair."""


class EncodedChats(NamedTuple):
    """Conversations with their documents, the counts and notes of a batch, and the first rows that stop the command."""

    chats: list[tuple[Document, Rendered]]
    counts: ConversationCounts
    notes: RowNotes
    refused: list[RefusedRow]


class _LongConversationError(UserError):
    """A conversation is long, and the options say to stop there."""


class ConversationEncoder:
    """Turns documents of conversations into tokens with labels.

    Args:
        renderer: Renders a conversation.
        options: What is learned, and what to do with long and bad ones.
        source: The source of the conversations.
        is_paired: Whether each document is a pair of answers.
    """

    def __init__(
        self, renderer: ChatRenderer, options: ChatOptions, source: SourceOptions, *, is_paired: bool = False
    ) -> None:
        self._renderer = renderer
        self._options = options
        self._source = source
        self._skips_bad = "skip" in (options.on_bad_row, source.on_bad_row)
        self._is_paired = is_paired

    def encode(self, documents: Sequence[Document | BadRow]) -> EncodedChats:
        """Returns the tokens of conversations, what is cut or left out, and the first rows that stop the command.

        Such rows are bad or long where the options say to stop there, or have a mark whose meaning is unknown.

        Raises:
            UserError: The template cannot be used at all, or exceeds a limit on a record, which each further one would
                take as long to show.
        """
        chats: list[tuple[Document, Rendered]] = []
        counts, skipped = ConversationCounts(), SkippedCounter()
        refused: list[RefusedRow] = []
        found_each = chain.from_iterable(run_steps(list(map(self._try, group))) for group in _group(documents))
        for document, found in zip(documents, found_each, strict=True):
            if isinstance(found, tuple):
                rendered, of_document = found
                counts += of_document
                if rendered:
                    assert isinstance(document, Document)
                    chats.append((document, rendered))
            elif isinstance(found, ConversationError) and self._skips_bad:
                counts += ConversationCounts(num_bad=1)
                skipped.add(str(found), partial(_place, document))
            elif len(refused) < MAX_REFUSED:
                refused.append(RefusedRow(_place(document), str(found), isinstance(found, ConversationError)))
        return EncodedChats(chats, counts, self._note(chats, skipped), refused)

    def _try(self, document: Document | BadRow) -> "Steps[tuple[Rendered, ConversationCounts] | UserError]":
        """Steps that return what those of `_encode` return, or why the row is skipped or refused."""
        try:
            return (yield from self._encode(document))
        except EndlessTemplateError as error:
            raise UserError(f"source {self._source.name}: {_place(document)}: {error}") from None
        except RecursionError:
            return ConversationError("the conversation is nested too deeply; flatten it")
        except (ConversationError, UnclearMarkError, _LongConversationError) as error:
            return error

    def _note(self, chats: Sequence[tuple[Document, Rendered]], skipped: SkippedCounter) -> RowNotes:
        form, turn_field = str(self._source.chat), self._source.turn_field
        records = (document.record for document, _ in chats if document.record is not None)
        ignored = (*self._source.ignored_keys, self._source.value_field)
        fields = (
            [name for name in find_unused_fields(record, form, turn_field) if name not in ignored] for record in records
        )
        return RowNotes(
            skipped.rows, count_all(fields), count_all(chat.left_out for _, rendered in chats for chat in rendered[:1])
        )

    def _encode(self, document: Document | BadRow) -> Steps[tuple[Rendered, ConversationCounts]]:
        """Steps that return the documents of a record, none if it is dropped, and its counts."""
        if isinstance(document, BadRow):
            raise ConversationError(strip_place(document.explain(), document.place()))
        options = self._options
        rendered: Rendered
        if self._is_paired:
            rendered = yield from self._render_pair(document)
        else:
            rendered = ((yield from self._render(load_conversation(document.text))),)
        num_tokens, limit = max(len(chat.ids) for chat in rendered), options.max_tokens
        is_cut = False
        if limit is not None and num_tokens > limit:
            if options.on_long == "error":
                what = (
                    "the longer answer of the pair has, with its prompt," if self._is_paired else "the conversation has"
                )
                raise _LongConversationError(
                    f"{what} {numbered(num_tokens, 'tokens')}, chat.max_tokens is {limit:,}; raise it, or set "
                    "chat.on_long to cut or drop"
                )
            if options.on_long == "drop":
                return (), ConversationCounts(num_long=1)
            rendered = tuple(replace(chat, ids=chat.ids[:limit], trained=chat.trained[:limit]) for chat in rendered)
            is_cut = True
        # Nothing comes before the first token. Of a pair, what is cut off may have been the difference.
        is_same = len(rendered) > 1 and np.array_equal(rendered[0].ids, rendered[1].ids)
        if is_same or not all(chat.trained[1:].any() for chat in rendered):
            return (), ConversationCounts(num_unlearned=1)
        if self._source.value_field is not None:
            value = _read_value(document, self._source.value_field, is_paired=self._is_paired)
            rendered = tuple(replace(chat, trained=mark_labels(chat.trained, value)) for chat in rendered)
        return rendered, ConversationCounts(num_written=1, num_cut=int(is_cut))

    def _render(self, conversation: Conversation) -> Steps[RenderedChat]:
        messages, tools, variables = conversation.messages, conversation.tools, conversation.variables
        return self._renderer.begin(messages, tools, labels=self._options.labels, variables=variables)

    def _render_pair(self, document: Document) -> Steps[Rendered]:
        pair = load_pair(document.text)
        rendered = (
            (yield from self._render_answer("chosen", pair.chosen)),
            (yield from self._render_answer("rejected", pair.rejected)),
        )
        asked, again = (chat.ids[: int(chat.trained.argmax())] for chat in rendered)
        if not np.array_equal(asked, again):
            raise ConversationError(
                f"the chat template {self._renderer.template.name} writes the prompt of the pair in two ways, so that "
                "its answers cannot be compared; give a template whose text before an answer does not depend on it "
                "and ends with a control symbol or a line break, which no token joins with the answer's first word"
            )
        return rendered

    def _render_answer(self, name: str, conversation: Conversation) -> Steps[RenderedChat]:
        try:
            return (yield from self._render(conversation))
        except ConversationError as error:
            raise ConversationError(f"the {name} answer: {error}") from None


def _group(documents: Sequence[Document | BadRow]) -> Iterator[list[Document | BadRow]]:
    """Yields documents that are asked for in one message: few, and of few bytes unless it is one."""
    group: list[Document | BadRow] = []
    size = 0
    for document in documents:
        if group and (len(group) == _GROUP_DOCUMENTS or size + len(document.utf8) > _GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(document)
        size += len(document.utf8)
    if group:
        yield group


def join_rendered(chats: Sequence[RenderedChat], token_num_bytes: NDArray[np.int32]) -> EncodedDocuments:
    """Returns conversations as documents for a shard."""
    tokens = np.concatenate([chat.ids for chat in chats])
    trained = np.concatenate([chat.trained for chat in chats])
    return EncodedDocuments(
        tokens=tokens,
        lengths=np.array([len(chat.ids) for chat in chats], np.int64),
        num_text_bytes=int(token_num_bytes[tokens].sum(dtype=np.int64)),
        has_label=None if trained.dtype == np.bool_ and trained.all() else trained,
    )


def _read_value(document: Document, name: str, *, is_paired: bool) -> int:
    value = (document.record or {}).get(name)
    if isinstance(value, float) and value.is_integer():  # as a column of margins has it
        value = int(value)
    if not isinstance(value, int | np.bool_ | np.integer) or not 0 <= value <= MAX_VALUE:
        remedy = "; give a margin in hundredths, and train with margin_scale 0.01" if is_paired else ""
        raise ConversationError(
            f"{name}, the value_field, is {value!r}: it must be true, false or a whole number from 0 to {MAX_VALUE}"
            f"{remedy}"
        )
    return int(value)


def _place(document: Document | BadRow) -> str:
    assert document.place is not None, "a document of a source of conversations"
    return document.place()
