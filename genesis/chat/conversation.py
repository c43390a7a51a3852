"""A conversation, and the forms of records that hold one.

    messages            {"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}, the form of OpenAI
                        and its older one with `function_call` and `functions`
    sharegpt            {"conversations": [{"from": "human", "value": ...}, ...], "system": ..., "tools": ...}
    alpaca              {"instruction": ..., "input": ..., "output": ..., "system": ..., "history": [[...], ...]}
    prompt_completion   {"prompt": ..., "completion": ...}, each a text or a list of messages
    prompt              {"prompt": ...}, a text or a list of messages: nothing to learn from, but to answer

Every form becomes a list of messages for templates: the arguments of a tool's call are an
object, reasoning is `reasoning_content`, a mark is `weight`, and a key without a value is left out.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Final, Literal

from genesis.base.errors import numbered
from genesis.chat.marks import RECORD_MARKS, WEIGHT, apply_record_marks, read_turn_mark, refuse_part_marks
from genesis.chat.template import ConversationError, Message
from genesis_callbacks.base.json_text import load_json

Form = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "prompt"]

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_KEYS: Final = ("role", "content", "reasoning_content", "thinking", "reasoning", "tool_calls")
"""The keys of a message that every template may use, or is checked to write."""

_TURN_FIELDS: Final = ("messages", "conversations", "conversation")
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_SHAREGPT_ROLES: Final = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_MAX_TURNS: Final = 1 << 16
"""A message takes a kilobyte in some copies, however short it is."""
_ALPACA_TEXTS: Final = ("instruction", "input", "output")
_MEDIA: Final = ("image", "images", "video", "videos", "audio", "audios")
_VARIABLES: Final = "chat_template_kwargs"
_FUNCTIONS: Final = "functions"
_TOOL_FIELDS: Final = ("tools", _FUNCTIONS)
_FORM_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "messages": (),
    "sharegpt": (),
    "alpaca": ("instruction", "input", "output", "history"),
    "prompt_completion": ("prompt", "completion"),
    "prompt": ("prompt",),
    "pairs": ("input", "preferred_output", "non_preferred_output", "prompt", "chosen", "rejected"),
}
_SHARED_FIELDS: Final = ("system", *_TOOL_FIELDS, _VARIABLES, *RECORD_MARKS)


@dataclass(frozen=True)
class Conversation:
    """Messages, each with a role, the definitions of tools, and variables of its own for the template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        """Returns the conversation as JSON, the same for equal conversations; `load_conversation` reads it."""
        content: dict[str, Any] = {"messages": list(self.messages)}
        if self.tools is not None:
            content["tools"] = list(self.tools)
        if self.variables:
            content[_VARIABLES] = dict(self.variables)
        return json.dumps(content, ensure_ascii=False, default=str)  # tables have types that JSON lacks

    def plain_text(self) -> str:
        """Returns the text of all turns with their roles, for the filters of `genesis data clean`."""
        return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in self.messages)


def load_conversation(text: str) -> Conversation:
    """Returns the conversation that `Conversation.dump` wrote."""
    content = json.loads(text)
    return Conversation(content["messages"], content.get("tools"), content.get(_VARIABLES, {}))


def read_conversation(
    record: Mapping[str, Any], form: Form | Literal["auto"] = "auto", turn_field: str | None = None
) -> Conversation:
    """Returns the conversation in a record.

    Args:
        record: The fields of the record, in plain types.
        form: The form; `auto` decides by the names of the fields.
        turn_field: The field with the turns of the forms `messages` and `sharegpt`; None for the usual names.

    Raises:
        ConversationError: The record has no conversation in this form, or one that cannot be learned.
    """
    found = find_form(record, turn_field) if form == "auto" else form
    conversation = _READERS[found](record, turn_field)
    if not any(message_text(message).strip() for message in conversation.messages):
        raise ConversationError("the conversation is empty: no turn says anything; remove it")
    return conversation


def find_form(record: Mapping[str, Any], turn_field: str | None = None) -> Form:
    """Returns the form of a record, by the names of its fields and of those of its first turn.

    Raises:
        ConversationError: The record has no conversation.
    """
    name = find_turn_field(record, turn_field)
    if name is not None:
        turns = record[name]
        first = turns[0] if isinstance(turns, Sequence) and turns else {}
        return "sharegpt" if isinstance(first, Mapping) and "from" in first else "messages"
    if {"instruction", "output"} <= record.keys():
        return "alpaca"
    if {"prompt", "completion"} <= record.keys():
        return "prompt_completion"
    if "prompt" in record:
        return "prompt"
    raise ConversationError(
        f"no conversation is in the fields {', '.join(list(record)[:20]) or 'of an empty record'}: it needs messages, "
        "conversations, instruction and output, or prompt; name the field of the turns by text_field"
    )


def find_unused_fields(record: Mapping[str, Any], form: str, turn_field: str | None = None) -> list[str]:
    """Returns the fields of a record that have a value and are not read.

    Args:
        record: A record that holds a conversation, or a pair of answers.
        form: Its form, `auto` or `pairs`.
        turn_field: The field with the turns; None for the usual names.
    """
    found = find_form(record, turn_field) if form == "auto" else form
    used = {*_FORM_FIELDS[found], *_SHARED_FIELDS}
    if found in ("messages", "sharegpt", "pairs"):
        used.add(find_turn_field(record, turn_field) or "")
    return [name for name, value in record.items() if name not in used and value not in (None, "", [], {})]


def leave_out_keys(record: Mapping[str, Any], keys: Sequence[str], turn_field: str | None = None) -> dict[str, Any]:
    """Returns a record without some keys: its own, those of its turns, and those of the parts of their content.

    Args:
        record: The record.
        keys: The keys.
        turn_field: The field with the turns, which may be JSON text; None for the usual names.
    """
    texts = (*_TURN_FIELDS, turn_field)
    kept = {name: value for name, value in record.items() if name not in keys}
    for name, value in kept.items():
        if name in texts and isinstance(value, str) and value.lstrip().startswith("["):
            value = _parse(value, name)
        if name not in _TOOL_FIELDS:
            kept[name] = _leave_out(value, keys)
    return kept


def _leave_out(value: Any, keys: Sequence[str]) -> Any:
    if isinstance(value, list | tuple):
        return [_leave_out(one, keys) for one in value]
    if not isinstance(value, Mapping):
        return value
    kept = {name: inner for name, inner in value.items() if name not in keys}
    return {
        name: _leave_out(inner, keys) if name in (*_TURN_FIELDS, "content") else inner for name, inner in kept.items()
    }


def normalize_messages(messages: Iterable[Any], *, has_empty_turns: bool = False) -> list[Message]:
    """Returns messages in the form that templates expect.

    Args:
        messages: As OpenAI has them.
        has_empty_turns: Whether the assistant may have said nothing: a model may, but nothing is learned from it.

    Raises:
        ConversationError: There are too many, or one has an unknown role, or a part that no template supports.
    """
    given = list(messages)
    if len(given) > _MAX_TURNS:
        raise ConversationError(
            f"the conversation has {numbered(len(given), 'turns')}: at most {_MAX_TURNS:,} are read; divide it"
        )
    normal = [_normalize(message, number) for number, message in enumerate(given, 1)]
    for number, message in enumerate(normal, 1):
        parts = (message.get(key) for key in ("content", "tool_calls", "reasoning_content"))
        if message["role"] == "assistant" and not any(parts) and not has_empty_turns:
            raise ConversationError(f"turn {number} of the assistant is empty; remove it, or the conversation")
        if "content" not in message:
            if message["role"] != "assistant":
                raise ConversationError(
                    f"turn {number} ({message['role']}) has no content; give it, or remove the turn"
                )
            # Templates join the content with other text, and fail without it; beside calls of tools it may be null.
            message["content"] = ""
    return normal


def normalize_tools(tools: Any) -> list[Mapping[str, Any]] | None:
    """Returns the definitions of tools in the form that templates expect, also from JSON text. None for no tools.

    Raises:
        ConversationError: The tools are not a list of definitions.
    """
    tools = _parse(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return None
    if not _is_list_of(tools, Mapping):
        raise ConversationError("tools is not a list of definitions of functions; correct it")
    return [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool} for tool in tools
    ]


def _read_messages(record: Mapping[str, Any], turn_field: str | None) -> Conversation:
    return _build(record, normalize_messages(_turns_of(record, turn_field)))


def _read_sharegpt(record: Mapping[str, Any], turn_field: str | None) -> Conversation:
    return _build(record, normalize_messages(_translate_sharegpt(_turns_of(record, turn_field))))


def _translate_sharegpt(turns: Sequence[Any]) -> list[Message]:
    """Returns turns of the form ShareGPT as messages of OpenAI's form."""
    messages: list[Message] = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or "from" not in turn:
            raise ConversationError(f"turn {number} has no `from`; correct it, or name another form by `chat`")
        role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise ConversationError(
                f"turn {number} has the unknown role {turn['from']!r}; the roles are {', '.join(_SHAREGPT_ROLES)}"
            )
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        message: dict[str, Any] = {**rest, "role": role, "content": turn.get("value")}
        if turn["from"] == "function_call":
            calls = _parse(turn.get("value"), f"the function call of turn {number}")
            calls = calls if isinstance(calls, list) else [calls]
            message |= {"content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}
        messages.append(message)
    return messages


def _read_alpaca(record: Mapping[str, Any], turn_field: str | None) -> Conversation:
    messages: list[Message] = []
    history = record.get("history") or []
    if not _is_list_of(history, list | tuple) or not all(len(pair) == 2 for pair in history):
        raise ConversationError("history is not a list of pairs of instruction and output; correct it")
    texts = {name: record[name] for name in _ALPACA_TEXTS if record.get(name) is not None}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ConversationError(f"{name} is {_describe(value)}, not a text; correct it")
    question = "\n".join(filter(None, (texts.get("instruction"), texts.get("input"))))
    for asked, answered in (*history, (question, texts.get("output"))):
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return _build(record, normalize_messages(messages))


def _read_prompt(record: Mapping[str, Any], turn_field: str | None) -> Conversation:
    return _build(record, _read_side(record, turn_field or "prompt", "user"))


def _read_side(record: Mapping[str, Any], name: str, role: str) -> list[Message]:
    side = record.get(name)
    return normalize_messages(side if isinstance(side, list | tuple) else [{"role": role, "content": side}])


def _read_prompt_completion(record: Mapping[str, Any], turn_field: str | None) -> Conversation:
    _check_is_unrated(record, "label")
    prompt, completion = _read_side(record, "prompt", "user"), _read_side(record, "completion", "assistant")
    given = [{**message, WEIGHT: 0} if message["role"] == "assistant" else message for message in prompt]
    return _build(record, [*given, *completion])


_READERS: Final[dict[Form, Callable[[Mapping[str, Any], str | None], Conversation]]] = {
    "messages": _read_messages,
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
    "prompt_completion": _read_prompt_completion,
    "prompt": _read_prompt,
}


def read_turns(turns: Any, name: str) -> list[Message]:
    """Returns turns of the forms messages or ShareGPT, as templates expect them; `name` is their field, for messages.

    Raises:
        ConversationError: The value is no list of turns, or a turn is invalid.
    """
    turns = _list_turns(turns, name)
    is_sharegpt = bool(turns) and isinstance(turns[0], Mapping) and "from" in turns[0]
    try:
        return normalize_messages(_translate_sharegpt(turns) if is_sharegpt else turns)
    except ConversationError as error:
        raise ConversationError(f"{name}: {error}") from None


def read_variables(record: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]] | None, dict[str, Any]]:
    """Returns the definitions of tools and the variables of the template in a record.

    Raises:
        ConversationError: One of them is invalid, or the record has media.
    """
    media = next((name for name in _MEDIA if record.get(name)), None)
    if media is not None:
        raise ConversationError(f"the record has {media}, and only text can be learned; remove the record")
    variables = record.get(_VARIABLES) or {}
    if not isinstance(variables, Mapping):
        raise ConversationError(f"{_VARIABLES} is not an object; correct it")
    given = [name for name in _TOOL_FIELDS if record.get(name)]
    if len(given) > 1:
        raise ConversationError("the record has both tools and functions, its older name; remove one of them")
    return normalize_tools(record.get(given[0]) if given else None), dict(variables)


def _check_is_unrated(record: Mapping[str, Any], name: str) -> None:
    """Refuses data of KTO, whose records rate their answers: unwanted answers must not be learned."""
    if isinstance(record.get(name), bool):
        raise ConversationError(
            f"{name} is {str(record[name]).lower()}: the record rates its answer, as data of KTO does, and unwanted "
            f"answers must not be learned; keep the records whose {name} is true, and remove the field, or give it as "
            "value_field to an objective that learns from it"
        )


def _build(record: Mapping[str, Any], messages: list[Message]) -> Conversation:
    _check_is_unrated(record, "kto_tag")
    if not messages:
        raise ConversationError("the conversation is empty: it has no turns; remove it")
    return Conversation(
        [*read_system(record, messages), *apply_record_marks(record, messages)], *read_variables(record)
    )


def find_turn_field(record: Mapping[str, Any], turn_field: str | None) -> str | None:
    """Returns the name of the field with the turns of a conversation; None if the record has no such field."""
    names = _TURN_FIELDS if turn_field is None else (turn_field,)
    return next((name for name in names if name in record), None)


def _turns_of(record: Mapping[str, Any], turn_field: str | None) -> Sequence[Any]:
    name = find_turn_field(record, turn_field)
    if name is None:
        raise ConversationError(
            f"no field {turn_field or ' or '.join(_TURN_FIELDS)} is among {', '.join(list(record)[:20]) or 'no fields'}"
            "; name the field of the turns by text_field"
        )
    return _list_turns(record[name], name)


def _list_turns(turns: Any, name: str) -> Sequence[Any]:
    turns = _parse(turns, name) if isinstance(turns, str) else turns
    if isinstance(turns, Mapping) and turns and all(isinstance(column, list | tuple) for column in turns.values()):
        # `datasets` stores a sequence of objects as an object of sequences.
        is_table = len({len(column) for column in turns.values()}) == 1
        turns = [dict(zip(turns, row, strict=True)) for row in zip(*turns.values(), strict=True)] if is_table else turns
    if not isinstance(turns, list | tuple):
        raise ConversationError(f"{name} is {_describe(turns)}, not a list of turns; correct it")
    return turns


def read_system(record: Mapping[str, Any], messages: Sequence[Message]) -> list[Message]:
    """Returns the turn of the system that a record has apart from its messages; an empty list if it has none.

    Raises:
        ConversationError: The messages have another one.
    """
    system = record.get("system")
    if not system or not isinstance(system, str):
        system = _join_parts(system, 0) if system else ""
    if not system.strip():
        return []
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"] == system:
            return []
        raise ConversationError("the record has the field system and a turn of the system; remove one of them")
    return [{"role": "system", "content": system}]


def _normalize(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise ConversationError(
            f"turn {number} is {_describe(message)}, not an object with role and content; correct it"
        )
    found: Message = {key: value for key, value in message.items() if value is not None}
    role = found.get("role")
    if role == "function":  # OpenAI's older name of a tool's answer
        role = found["role"] = "tool"
    if role not in ROLES:
        what = "no role" if role is None else f"the unknown role {role!r}"
        raise ConversationError(f"turn {number} has {what}; the roles are {', '.join(ROLES)}")
    if "content" in found:
        found["content"] = _join_parts(found["content"], number)
    reasoning = next((found[key] for key in _REASONING if key in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    _read_calls(found, number)
    read_turn_mark(found, number)
    return found


def _read_calls(found: Message, number: int) -> None:
    """Gives a turn its calls in the form that templates read, also of JSON text, which a table's column may have."""
    for name in ("tool_calls", "function_call"):
        if found.get(name) and isinstance(found[name], str):
            found[name] = _parse(found[name], f"{name} of turn {number}")
    if not found.get("tool_calls", True):
        del found["tool_calls"]
    call = found.pop("function_call", None)
    if call:
        if "tool_calls" in found:
            raise ConversationError(f"turn {number} has both tool_calls and function_call; remove one of them")
        found["tool_calls"] = [{"type": "function", "function": call}]
    if "tool_calls" in found:
        found["tool_calls"] = _normalize_calls(found["tool_calls"], number)


def _join_parts(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) == len(parts):
            refuse_part_marks(content, f"content of turn {number}")
            return "".join(texts)
    raise ConversationError(
        f"content of turn {number} is {_describe(content)}, not text, the only kind that can be learned; correct it"
    )


def _normalize_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    if not _is_list_of(calls, Mapping):
        raise ConversationError(f"tool_calls of turn {number} is not a list of calls; correct it")
    refuse_part_marks(calls, f"tool_calls of turn {number}")
    found = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConversationError(f"a tool call of turn {number} names no function; correct it")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parse(arguments or "{}", f"the arguments of {function['name']} in turn {number}")
        if not isinstance(arguments, Mapping):
            raise ConversationError(
                f"the arguments of {function['name']} in turn {number} are {_describe(arguments)}, not an object"
            )
        called = {**function, "arguments": arguments}
        found.append({**call, "function": called} if "function" in call else {"type": "function", "function": called})
    return found


def message_text(message: Message) -> str:
    """Returns the text that a message holds: its reasoning, its content and its calls of tools."""
    parts = [message.get("reasoning_content"), message.get("content")]
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join(part for part in (*parts, *calls) if isinstance(part, str) and part)


def _parse(value: Any, name: str) -> Any:
    try:
        return load_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        reason = f" ({error})" if "twice" in str(error) else ""
        raise ConversationError(f"{name} is not JSON: {str(value)[:60]!r}{reason}; correct it") from None


def _is_list_of(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, kind) for one in value)


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}" if value else repr(value)
