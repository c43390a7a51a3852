"""Lays out a conversation: its text, and the exact spans of the assistant's turns in it, or an error.

A worker runs this (`genesis.chat.worker`), because it renders the conversation many times.

A template with `generation` tags marks the turns. For any other template, turn i is the text that rendering i + 1
messages adds to rendering the i messages before it with the prompt for the assistant. This is exact if each of these
texts begins the text of the whole conversation, which is checked for every conversation.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from genesis.base.errors import numbered
from genesis.chat.conversation import TEMPLATE_KEYS
from genesis.chat.sandbox import SandboxedTemplate
from genesis.chat.template import ConversationError, LaidOut, Message, Span

Tools = Sequence[Mapping[str, Any]]

_MANY_TURNS: Final = 3
"""From so many turns of the assistant on, it is quicker to measure all beginnings of a conversation at once."""
_PART_MARK: Final = re.compile("\ue000([0-9]+) ([a-z_]+)\ue001")


def lay_out(
    template: SandboxedTemplate,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Mapping[str, Any],
    *,
    has_spans: bool,
    is_by_turn: bool,
) -> LaidOut:
    """Returns what `ChatTemplate.lay_out` returns."""
    spans: list[Span] = []
    if not has_spans:
        text = template.render(messages, tools, variables)
    elif template.has_generation_tags:
        text, spans = _find_marked_turns(template, messages, tools, variables, is_by_turn=is_by_turn)
    else:
        text, spans = _find_turns(template, messages, tools, variables)
    _check_nothing_dropped(template, text, messages, tools, variables)
    return LaidOut(text, spans, _find_left_out(template, text, messages, tools, variables))


def _find_turns(
    template: SandboxedTemplate, messages: Sequence[Message], tools: Tools | None, variables: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    text = template.render(messages, tools, variables)
    spans = []
    wholes, prompts = {len(messages): len(text)}, {}
    if sum(message["role"] == "assistant" for message in messages) >= _MANY_TURNS:
        wholes |= template.measure_beginnings(messages, tools, variables, text)
        prompts = template.measure_beginnings(messages, tools, variables, text, has_prompt=True)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end = prompts.get(number), wholes.get(number + 1)
        if number and start is not None and end is not None and start <= end:
            spans.append(Span(start, end))
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
        spans.append(Span(len(prompt), len(whole)))
    return text, spans


def _check_nothing_dropped(
    template: SandboxedTemplate,
    text: str,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Mapping[str, Any],
) -> None:
    # Whether a text occurs says nothing: "a" occurs in every text. A mark after each part is found only if the part is.
    shown: set[tuple[int, str]] = set()
    for keys in (("content", "reasoning_content", "tool_calls"), ("content", "reasoning_content")):
        marked = [_add_marks(message, number, keys) for number, message in enumerate(messages)]
        with contextlib.suppress(ConversationError):  # a template may know the names of functions
            text_with_marks = template.render(marked, tools, variables)
            shown = {(int(number), key) for number, key in _PART_MARK.findall(text_with_marks)}
            break
    for number, message in enumerate(messages):
        for key in ("content", "reasoning_content", "tool_calls"):
            value = message.get(key)
            if not value or (isinstance(value, str) and not value.strip()) or (number, key) in shown:
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


def _find_left_out(
    template: SandboxedTemplate,
    text: str,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Mapping[str, Any],
) -> list[str]:
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


def _add_marks(message: Message, number: int, keys: Sequence[str]) -> Message:
    """Returns the message with a mark after its content, its reasoning and the names of the functions that it calls."""
    marked = dict(message)
    for key in keys:
        for name in (key, *_ALIASES.get(key, ())):
            value, mark = marked.get(name), _part_mark(number, key)
            if isinstance(value, str) and value.strip():
                marked[name] = value + mark
            elif key == "tool_calls" and value:
                marked[name] = [_mark_call(call, mark) for call in value]
    return marked


def _mark_call(call: Any, mark: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return call
    return {**call, "function": {**function, "name": function["name"] + mark}}


def _is_unchanged(render: Callable[[], str], text: str) -> bool:
    try:
        return render() == text
    except ConversationError:  # the template reads this part, because it fails without it
        return False


def _find_marked_turns(
    template: SandboxedTemplate,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Mapping[str, Any],
    *,
    is_by_turn: bool,
) -> tuple[str, list[Span]]:
    text, spans = template.render_marked(messages, tools, variables)
    num_turns = sum(message["role"] == "assistant" for message in messages)
    if not spans or (is_by_turn and len(spans) != num_turns):
        raise ConversationError(
            f"the chat template {template.name} marks {numbered(len(spans), 'parts')} of the text by "
            f"{{% generation %}}, and the "
            f"conversation has {numbered(num_turns, 'turns')} of the assistant, so that single turns cannot be "
            "chosen; give a "
            "template that marks each turn once"
        )
    return text, spans
