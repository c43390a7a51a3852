"""Finds the exact spans of the assistant's turns in a rendered conversation, or raises an error.

A template with `generation` tags marks the turns. For any other template, turn i is the text that rendering i + 1
messages adds to rendering the i messages before it with the prompt for the assistant. This is exact if each of these
texts begins the text of the whole conversation, which is checked for every conversation. The turn ends with the last
control symbol that the template writes in it, so that a model that learns it stops there.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from genesis.chat.conversation import TEMPLATE_KEYS
from genesis.chat.stops import can_end_turn
from genesis.chat.template import ChatTemplate, ConversationError, Message, Span
from genesis.tokenizer.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]


class RenderedTurns(NamedTuple):
    """The text of a conversation, and the spans of the assistant's turns in it."""

    text: str
    spans: list[Span]


def find_turns(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Mapping[str, Any],
    *,
    is_by_turn: bool,
) -> RenderedTurns:
    """Returns the text of a conversation and the spans of the assistant's turns in it.

    Args:
        template: The template that renders the conversation.
        tokenizer: The tokenizer, which defines the control symbols.
        messages: The turns.
        tools: The definitions of the tools.
        variables: Further variables of the template.
        is_by_turn: Whether each of the assistant's messages must have one span.

    Raises:
        ConversationError: The template fails on the conversation, never closes a turn, or no exact spans are known.
    """
    if template.has_generation_tags:
        return _find_marked_turns(template, messages, tools, variables, is_by_turn=is_by_turn)
    text = template.render(messages, tools, variables)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages[:number], tools, variables, has_prompt=True) if number else ""
        whole = text if number + 1 == len(messages) else template.render(messages[: number + 1], tools, variables)
        if not number:
            raise ConversationError(
                "the conversation begins with a turn of the assistant, which no prompt asks for; put a turn of the "
                "user or of the system before it, remove it, or give a template with {% generation %} tags"
            )
        if not whole.startswith(prompt):
            raise ConversationError(
                f"turn {number + 1} does not begin with the prompt that the chat template {template.name} gives the "
                "assistant there, so that what it learns would not be what it is asked; give a template with "
                "{% generation %} tags"
            )
        if not text.startswith(whole):
            raise ConversationError(
                f"the chat template {template.name} writes turn {number + 1} otherwise once other turns follow (as "
                "templates that drop earlier reasoning do), so that its labels cannot be exact; give a template with "
                "{% generation %} tags that keeps the text of all turns"
            )
        spans.append(Span(len(prompt), len(prompt) + _find_close(template, tokenizer, whole[len(prompt) :], number)))
    return RenderedTurns(text, spans)


def check_nothing_dropped(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Mapping[str, Any],
) -> None:
    """Checks that the rendered text contains every part of the conversation.

    Raises:
        ConversationError: The template omits a turn's content, reasoning or tool calls, or the tools.
    """
    # Whether a text occurs says nothing: "a" occurs in every text. A mark after each part is found only if the part is.
    try:
        shown = template.render(
            [_add_marks(message, number) for number, message in enumerate(messages)], tools, variables
        )
    except ConversationError:
        shown = ""
    for number, message in enumerate(messages):
        for key in ("content", "reasoning_content", "tool_calls"):
            value = message.get(key)
            if not value or (isinstance(value, str) and (not value.strip() or _part_mark(number, key) in shown)):
                continue
            others = [dict(other) for other in messages]
            others[number] = _without(message, key)
            if _is_unchanged(partial(template.render, others, tools, variables), text):
                raise ConversationError(
                    f"the chat template {template.name} leaves out the {key} of turn {number + 1} ({message['role']}); "
                    "give a template that writes it, or remove it"
                )
    if tools and _is_unchanged(partial(template.render, messages, None, variables), text):
        raise ConversationError(
            f"the chat template {template.name} leaves out the tools; give a template that writes them, or remove them"
        )


def find_left_out(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Mapping[str, Any],
) -> list[str]:
    """Returns the further keys of messages, such as `name`, that the template does not use."""
    keys = list(dict.fromkeys(key for message in messages for key in message if key not in TEMPLATE_KEYS))
    if not keys:
        return []

    def is_unused(names: Sequence[str]) -> bool:
        rest = [{key: value for key, value in message.items() if key not in names} for message in messages]
        return _is_unchanged(partial(template.render, rest, tools, variables), text)

    return keys if is_unused(keys) else [key for key in keys if is_unused([key])]


def _without(message: Message, key: str) -> Message:
    """Returns the message with another content, or without one of its other parts."""
    if key == "content":
        return {**message, "content": message["content"] + " and more"}
    return {name: value for name, value in message.items() if name not in (key, *_ALIASES.get(key, ()))}


_ALIASES = {"reasoning_content": ("thinking", "reasoning")}


def _part_mark(number: int, key: str) -> str:
    return f"\ue000{number} {key}\ue001"


def _add_marks(message: Message, number: int) -> Message:
    """Returns the message with a mark after its content and after its reasoning."""
    marked = dict(message)
    for key in ("content", "reasoning_content"):
        for name in (key, *_ALIASES.get(key, ())):
            value = marked.get(name)
            if isinstance(value, str) and value.strip():
                marked[name] = value + _part_mark(number, key)
    return marked


def _is_unchanged(render: Callable[[], str], text: str) -> bool:
    try:
        return render() == text
    except ConversationError:  # the template reads this part, because it fails without it
        return False


def _find_marked_turns(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Mapping[str, Any],
    *,
    is_by_turn: bool,
) -> RenderedTurns:
    text, spans = template.render_marked(messages, tools, variables)
    num_turns = sum(message["role"] == "assistant" for message in messages)
    if not spans or (is_by_turn and len(spans) != num_turns):
        raise ConversationError(
            f"the chat template {template.name} marks {len(spans)} parts of the text by {{% generation %}}, and the "
            f"conversation has {num_turns} turns of the assistant, so that single turns cannot be chosen; give a "
            "template that marks each turn once"
        )
    return RenderedTurns(text, spans)


def _find_close(template: ChatTemplate, tokenizer: Tokenizer, turn: str, number: int) -> int:
    """Returns the end of the last control symbol of a turn's text."""
    ids, offsets = tokenizer.encode_with_offsets(turn)
    last = max((place for place, token in enumerate(ids) if can_end_turn(tokenizer, token)), default=None)
    if last is None or turn[offsets[last][1] :].strip():
        shown = turn[-40:] if last is None else turn[offsets[last][1] :][-40:]
        raise ConversationError(
            f"the chat template {template.name} never closes turn {number + 1}: no control symbol of the tokenizer "
            f"stands at its end ({shown!r}), so that a model would not learn to stop; give a template that ends turns "
            "with one"
        )
    return offsets[last][1]
