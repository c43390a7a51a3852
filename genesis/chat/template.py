"""A chat template. It is compiled and rendered in a worker process with limits (`genesis.chat.pool`)."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Final, NamedTuple

from blake3 import blake3

from genesis.base.errors import UserError
from genesis.chat.pool import Answer, Request, Steps, ask
from genesis_callbacks.base.json_text import load_json

Message = dict[str, Any]
_DEFAULT: Final = re.compile(r"\{% if (\w+) is not defined %\}\{% set \1 = (.*) %\}\{% endif %\}\n")
_NONE: Final = re.compile(r'("(?:[^"\\]|\\.)*")|\bnone\b')
"""A text, or Jinja's spelling of null outside of texts."""


class ConversationError(UserError):
    """A conversation cannot be rendered with exact labels; other conversations may still work."""


class EndlessTemplateError(UserError):
    """A template exceeds a limit of time, memory or length, as it may do for any other conversation."""


class Span(NamedTuple):
    """A part of a text, in characters."""

    start: int
    end: int


class LaidOut(NamedTuple):
    """The text of a conversation.

    Args:
        text: What the template writes.
        spans: The assistant's turns in the text, or what the template's tags mark.
        left_out: The further keys of messages, such as `name`, that the template does not use.
    """

    text: str
    spans: list[Span]
    left_out: list[str]


class ChatTemplate:
    """A valid template. Deterministic; several threads may render at once.

    Args:
        text: The template.
        name: The template's name in messages, such as the path of its file.
        today: The date for templates that print today's date; None rejects such templates.

    Raises:
        UserError: The text is not a template.
        EndlessTemplateError: Compiling the text exceeds a limit.

    Attributes:
        has_generation_tags: Whether the template marks the assistant's text.
    """

    def __init__(self, text: str, name: str, today: date | None = None) -> None:
        self.text = text
        self.name = name
        self.today = today
        self.has_generation_tags: bool = self._ask("has_generation_tags")

    @property
    def hash(self) -> str:
        """Returns the hash of the template and the date that it prints."""
        return blake3(
            json.dumps([self.text, None if self.today is None else self.today.isoformat()]).encode()
        ).hexdigest()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        has_prompt: bool = False,
    ) -> str:
        """Returns a conversation as text.

        Args:
            messages: The turns.
            tools: The definitions of the tools; None for none.
            variables: Further variables of the template, such as the spellings of bos and eos.
            has_prompt: Whether the beginning of the assistant's next turn follows.

        Raises:
            ConversationError: The template fails on these messages.
            EndlessTemplateError: The template exceeds a limit.
            UserError: The template prints the date, and none is given.
        """
        text: str = self._ask("render", messages, tools, variables, has_prompt=has_prompt)
        return text

    def render_marked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Returns a conversation as text, and the spans between its tags `generation`.

        Raises:
            ConversationError: The template fails on these messages, or changes the text between the tags.
            EndlessTemplateError: The template exceeds a limit.
        """
        text, spans = self._ask("render_marked", messages, tools, variables)
        return text, [Span(*span) for span in spans]

    def lay_out(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        has_spans: bool,
        is_by_turn: bool,
    ) -> Steps[LaidOut]:
        """Steps that return a conversation as text with every part of it, and the exact spans of the assistant's turns.

        Args:
            messages: The turns.
            tools: The definitions of the tools.
            variables: Further variables of the template.
            has_spans: Whether the spans are needed.
            is_by_turn: Whether each of the assistant's messages must have one span.

        Raises:
            ConversationError: The template fails on the conversation, omits a turn's content, reasoning or tool calls,
                or the tools, or no exact spans are known.
            EndlessTemplateError: The template exceeds a limit.
        """
        options = {"has_spans": has_spans, "is_by_turn": is_by_turn}
        text, spans, left_out = self._read((yield self._request("lay_out", messages, tools, variables, **options)))
        return LaidOut(text, [Span(*span) for span in spans], left_out)

    def _ask(self, function: str, *arguments: Any, **options: Any) -> Any:
        return self._read(ask(self._request(function, *arguments, **options)))

    def _request(self, function: str, *arguments: Any, **options: Any) -> Request:
        return Request(self.text, self.name, self.today, function, arguments, options)

    def _read(self, answer: Answer) -> Any:
        if answer.limit is not None:
            raise EndlessTemplateError(f"the chat template {self.name} {answer.limit}; simplify it")
        if answer.mistake is not None:
            raise (ConversationError if answer.is_of_conversation else UserError)(answer.mistake)
        return answer.result


def write_defaults(text: str, variables: Mapping[str, Any]) -> str:
    """Returns a template in which variables that are not given have these values.

    Example:
        >>> write_defaults("{{ x }}", {"x": "a"})
        '{% if x is not defined %}{% set x = "a" %}{% endif %}\\n{{ x }}'
    """
    # A line break right after a block is no text of the template.
    lines = [
        f"{{% if {name} is not defined %}}{{% set {name} = {_spell(value)} %}}{{% endif %}}\n"
        for name, value in variables.items()
    ]
    head = "".join(lines)
    return text if text.startswith(head) else head + text


def read_defaults(text: str) -> list[tuple[str, Any, int]]:
    """Returns the variables that `write_defaults` has put in front of a template: name, value, and where its line ends.

    Example:
        >>> read_defaults(write_defaults("{{ x }}", {"x": [None, "a"]}))
        [('x', [None, 'a'], 62)]
    """
    found: list[tuple[str, Any, int]] = []
    while line := _DEFAULT.match(text, found[-1][2] if found else 0):
        try:
            value = load_json(_NONE.sub(lambda part: part[1] or "null", line[2]))
        except (ValueError, RecursionError):  # a line of the template's own
            break
        found.append((line[1], value, line.end()))
    return found


def _spell(value: Any) -> str:
    """Returns a plain value as Jinja spells it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_spell(str(key))}: {_spell(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_spell, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
