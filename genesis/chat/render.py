"""Renders conversations: ids, and which of them are learned.

Ids equal those of transformers' `apply_chat_template`: the text of the template, in which the spelling of a control
symbol is that symbol, without anything before or after it. What a message or a tool spells is text, though, as with
transformers' `split_special_tokens`: else a user could end its turn and write the assistant's.

A token is learned if it stands in a turn of the assistant, including the token that closes the turn. If the end of a
turn is within a token, the token belongs to the turn, as in transformers. If its start is, as where an answer begins
with white space, the prompt is encoded by itself: a model is asked with the prompt's own ids.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from genesis.base.errors import UserError
from genesis.chat.conversation import Conversation, normalize_messages, normalize_tools
from genesis.chat.marks import ASKED, WEIGHT, refuse_likely_marks
from genesis.chat.options import ChatOptions, Labels
from genesis.chat.pool import Steps, run_steps
from genesis.chat.stops import can_end_turn
from genesis.chat.template import ChatTemplate, ConversationError, Message, Span
from genesis.chat.training import find_training_template
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.untrusted import read_text


@dataclass(frozen=True)
class RenderedChat:
    """The ids of a conversation, and whether each is learned as the label of the id before it.

    `left_out` has the keys of messages that the template does not use, once for each turn that has one.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_] | NDArray[np.uint8]
    left_out: tuple[str, ...] = ()


class ChatRenderer:
    """Renders the conversations of one template and tokenizer. Deterministic; several threads may render at once.

    Args:
        tokenizer: Turns text into ids.
        template: Writes conversations as text.
        variables: Further variables of the template.

    Raises:
        UserError: The tokenizer has no eos.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, variables: Mapping[str, Any] | None = None
    ) -> None:
        if tokenizer.eos_id is None:
            raise UserError(
                "the tokenizer has no eos, so that no turn can end; name one by `eos_token` in its "
                "tokenizer_config.json, or take the tokenizer of an instruction model"
            )
        self.tokenizer = tokenizer
        self.template = template
        self._variables = {**tokenizer.named_tokens, **(variables or {})}
        self._given = dict(variables or {})

    @property
    def hash(self) -> str:
        """Returns the identity of the renderer: the template's hash, the date that it prints, and its variables."""
        return blake3(f"{self.template.hash}{sorted(self._given.items())!r}".encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        labels: Labels = "assistant",
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Returns the ids of a conversation, and which of them are learned.

        Raises:
            ConversationError: As in `begin`.
            UnclearMarkError: As in `begin`.
        """
        return run_steps([self.begin(messages, tools, labels=labels, variables=variables)])[0]

    def begin(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        labels: Labels = "assistant",
        variables: Mapping[str, Any] | None = None,
    ) -> Steps[RenderedChat]:
        """Steps that return the ids of a conversation, and which of them are learned.

        Args:
            messages: Messages in OpenAI's form; a turn with `weight: 0`, or another mark of `genesis.chat.marks`, is
                not learned.
            tools: The definitions of the tools; None for none.
            labels: The turns of the assistant, its last turn, or all tokens.
            variables: Further variables of the template, for this conversation.

        Raises:
            ConversationError: The template refuses the conversation, leaves out a part of it, never closes a turn, or
                renders turns differently once others follow, so that the labels cannot be exact.
            UnclearMarkError: A key that the template does not use may be a mark on what is learned.
        """
        normal = self._normalize(messages)
        weights = [message.pop(WEIGHT, 1) for message in normal]
        _check_asked(normal, labels)
        definitions, merged = self._hide(normalize_tools(tools)), {**self._variables, **(variables or {})}
        is_assistant = [message["role"] == "assistant" for message in normal]
        if not normal or (labels != "all" and not any(is_assistant)):
            raise ConversationError("the conversation has no turn of the assistant to learn; remove it")
        if labels == "all":
            _check_weights(normal, weights)
        has_spans, is_by_turn = labels != "all" or not all(weights), labels == "last" or not all(weights)
        text, spans, left_out = yield from self.template.lay_out(
            normal, definitions, merged, has_spans=has_spans, is_by_turn=is_by_turn
        )
        refuse_likely_marks(normal, left_out, self.template.name)
        ids, offsets = self._encode(text, spans)
        if not len(ids):
            raise ConversationError(f"the chat template {self.template.name} writes no text for the conversation")
        of_turns = [weight for weight, is_turn in zip(weights, is_assistant, strict=True) if is_turn]
        if not self.template.has_generation_tags:
            numbers = [number for number, is_turn in enumerate(is_assistant, 1) if is_turn]
            spans = self._close(text, spans, numbers, ids, offsets)
        # If turns do not have one span each, no turn has weight 0.
        by_span = of_turns if len(of_turns) == len(spans) else [1] * len(spans)
        trained = _mark(offsets, labels, spans, by_span)
        if not any(weights):
            trained[:] = False  # of a whole record that is not learned
        counted = tuple(key for message in normal for key in left_out if key in message)
        return RenderedChat(ids, trained, counted)

    def _encode(self, text: str, spans: Sequence[Span]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the ids of a text and their places in it, with no token across the start of a span.

        White space at the beginning of an answer may be one token with the line break before it, but a model is asked
        with that line break alone. The text before such an answer is therefore encoded by itself, as it is asked.
        """
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        starts = np.array([span.start for span in spans], np.int64)
        firsts, ends = offsets[:, 0], offsets[:, 1]
        if not _is_sorted(firsts):
            order = np.argsort(firsts, kind="stable")
            firsts, ends = firsts[order], ends[order]
        num_before = np.searchsorted(firsts, starts)
        reach = np.maximum.accumulate([ends[a:b].max(initial=0) for a, b in itertools.pairwise([0, *num_before])])
        is_across = reach > starts
        if not is_across.any():
            return ids, offsets
        cuts = [0, *starts[is_across].tolist(), len(text)]
        parts = [self.tokenizer.encode_with_offsets(text[start:end]) for start, end in itertools.pairwise(cuts)]
        joined = np.concatenate([part for part, _ in parts])
        found = np.concatenate([within + start for start, (_, within) in zip(cuts, parts, strict=False)])
        if self.tokenizer.decode(joined.tolist()) != self.tokenizer.decode(ids.tolist()):
            raise ConversationError(
                "the white space at the beginning of an answer is one token with the end of its prompt, and the "
                "tokenizer does not encode them apart; remove that white space"
            )
        return joined, found

    def _close(
        self,
        text: str,
        spans: Sequence[Span],
        numbers: Sequence[int],
        ids: NDArray[np.int32],
        offsets: NDArray[np.int32],
    ) -> list[Span]:
        """Returns each turn up to its last control symbol, so that a model that learns the turn stops there."""
        ends = [token for token in np.unique(ids).tolist() if can_end_turn(self.tokenizer, token)]
        closing: list[list[int]] = offsets[np.isin(ids, ends)].tolist()
        starts = [first for first, _ in closing]
        closed = []
        for (start, end), number in zip(spans, numbers, strict=False):
            num_before = bisect.bisect_left(starts, end)
            has_symbol = num_before > 0 and starts[num_before - 1] >= start
            last = min(closing[num_before - 1][1], end) if has_symbol else start
            if not has_symbol or text[last:end].strip():
                raise ConversationError(
                    f"the chat template {self.template.name} never closes turn {number}: no control symbol of the "
                    f"tokenizer stands at its end ({text[last:end][-40:]!r}), so that a model would not learn to stop; "
                    "give a template that ends turns with one"
                )
            closed.append(Span(start, last))
        return closed

    def render_conversation(self, conversation: Conversation, labels: Labels = "assistant") -> RenderedChat:
        """Returns the result of `render` for a conversation that was read from a record."""
        return self.render(conversation.messages, conversation.tools, labels=labels, variables=conversation.variables)

    def render_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the ids after which a model writes the assistant's next turn.

        Raises:
            ConversationError: The template refuses the conversation.
        """
        return self.tokenizer.encode_with_controls(self.write_prompt(messages, tools, variables=variables))

    def write_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        continues_last: bool = False,
    ) -> str:
        """Returns the text after which a model generates, for `encode_with_controls`.

        Control symbols that messages or tools spell are hidden in it, as `genesis.tokenizer.literal` describes.

        Args:
            messages: Messages in OpenAI's form.
            tools: The definitions of the tools; None for none.
            variables: Further variables of the template, for this conversation.
            continues_last: Whether the model continues the last message instead of starting a turn of the assistant.

        Raises:
            ConversationError: The template refuses the conversation, or changes its last message.
        """
        text, normal = self._write(messages, tools, variables, has_prompt=not continues_last)
        if not continues_last:
            return text
        content = str(normal[-1].get("content", ""))
        start = text.rfind(content.strip())
        if start < 0:
            raise ConversationError(
                f"the chat template {self.template.name} changes the last message, which is to go on"
            )
        # Templates may strip a message, and then the continued text is stripped as well.
        whole = content.lstrip()
        return text[: start + len(whole if text[start:].startswith(whole) else content.strip())]

    def write_whole(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of a whole conversation, for `encode_with_controls`; otherwise as `write_prompt`.

        Raises:
            ConversationError: The template refuses the conversation.
        """
        return self._write(messages, tools, variables, has_prompt=False)[0]

    def _write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        *,
        has_prompt: bool,
    ) -> tuple[str, list[Message]]:
        """Returns the text of a conversation, and its messages as the template gets them."""
        try:
            normal = self._normalize(messages, has_empty_turns=True)
            offered = self._hide(normalize_tools(tools))
        except RecursionError:
            raise ConversationError("the conversation is nested too deeply; flatten it") from None
        for message in normal:
            for mark in (WEIGHT, ASKED):
                message.pop(mark, None)
        merged = {**self._variables, **(variables or {})}
        return self.template.render(normal, offered, merged, has_prompt=has_prompt), normal

    def _normalize(self, messages: Sequence[Mapping[str, Any]], *, has_empty_turns: bool = False) -> list[Message]:
        normal = normalize_messages(messages, has_empty_turns=has_empty_turns)
        # Templates put a role between the marks of a control symbol, as `<|user|>`, so roles stay as they are.
        return [{**self._hide(message), "role": message["role"]} for message in normal]

    def _hide(self, value: Any) -> Any:
        """Returns messages or tools in which what spells a control symbol will be encoded as text."""
        return self.tokenizer.literal.hide(value)


def open_renderer(
    tokenizer: Tokenizer, options: ChatOptions, *, is_training: bool = True, learned: Path | None = None
) -> ChatRenderer:
    """Returns the renderer for options, with the template of `open_template`.

    Args:
        tokenizer: The tokenizer.
        options: The options.
        is_training: Whether the training template of the family replaces a model's own.
        learned: The file of the template that the model has learned; None if it has not learned one.

    Raises:
        UserError: There is no template, or it is invalid.
    """
    template = open_template(tokenizer, options, learned)
    # A file with tags of its own is kept: the user's, or what the model has learned.
    is_own = options.template is None and learned is None
    if is_training and (is_own or not template.has_generation_tags):
        template = find_training_template(template, {**tokenizer.named_tokens, **options.variables})
    return ChatRenderer(tokenizer, template, options.variables)


def open_template(tokenizer: Tokenizer, options: ChatOptions, learned: Path | None = None) -> ChatTemplate:
    """Returns the template of the file that the options name, or the learned one, or the tokenizer's own.

    Raises:
        UserError: The tokenizer has no template, or the file cannot be read.
    """
    file = learned if options.template is None else options.template
    if file is not None:
        return read_template(file, options.today)
    if tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template; give one by --chat.template FILE, or take the tokenizer of an "
            "instruction model"
        )
    return ChatTemplate(tokenizer.chat_template, "of the tokenizer", options.today)


def read_template(path: Path, today: date | None = None) -> ChatTemplate:
    """Returns the template in a file.

    Args:
        path: The file.
        today: The date that the template prints if it asks for today's.

    Raises:
        UserError: The file cannot be read, or is not a template.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"cannot read the chat template {path} ({reason}); correct its path") from None
    return ChatTemplate(text, str(path), today)


def _check_asked(messages: Sequence[Message], labels: Labels) -> None:
    """Refuses the wish to learn a turn of another role than the assistant, unless all tokens are learned."""
    for number, message in enumerate(messages, 1):
        if message.pop(ASKED, False) and labels != "all":
            raise ConversationError(
                f"turn {number} ({message['role']}) is marked as one to learn, and with chat.labels {labels} only "
                "turns of the assistant are; remove the mark, or set chat.labels to all"
            )


def _check_weights(messages: Sequence[Message], weights: Sequence[int]) -> None:
    """Refuses a weight without effect: where all tokens are learned, only the assistant's turns have spans."""
    for number, (message, weight) in enumerate(zip(messages, weights, strict=True), 1):
        if any(weights) and not weight and message["role"] != "assistant":
            raise ConversationError(
                f"turn {number} ({message['role']}) has weight 0, and with chat.labels all only turns of the assistant "
                "can be left out; remove the weight, or choose other labels"
            )


def _is_sorted(values: NDArray[np.int32]) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _mark(
    offsets: NDArray[np.int32], labels: Labels, spans: Sequence[Span], weights: Sequence[int]
) -> NDArray[np.bool_]:
    """Returns whether each token is learned; `spans` are the assistant's turns, `weights` 0 where one is not."""
    trained = np.full(len(offsets), labels == "all")
    # A token may have no characters of its own, such as the space that a tokenizer adds before a text.
    starts, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    # Tokens stand in the order of the text, and only those about a span are compared with it.
    least = starts if _is_sorted(starts) else np.minimum.accumulate(starts[::-1])[::-1]
    most = ends if _is_sorted(ends) else np.maximum.accumulate(ends)
    firsts = np.searchsorted(most, [span.start for span in spans], "right")
    lasts = np.searchsorted(least, [span.end for span in spans])
    for number, (span, weight, first, last) in enumerate(
        zip(spans, weights, firsts.tolist(), lasts.tolist(), strict=True)
    ):
        is_wanted = bool(weight) and (labels == "assistant" or number + 1 == len(spans))
        if labels != "all" and not is_wanted:
            continue
        near = slice(first, last)
        trained[near][(starts[near] < span.end) & (ends[near] > span.start)] = bool(weight)
    return trained
