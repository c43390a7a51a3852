"""A chat template in a sandbox, as transformers runs it: what a worker of `genesis.chat.pool` renders.

Jinja has the functions of transformers, but a given date. A template may mark the assistant's text by the tags
`{% generation %}` ... `{% endgeneration %}`. To find the marked text, each block is rendered between two marks that no
message contains.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from genesis.base.errors import UserError
from genesis.chat.prefixes import Seen, WatchedMessages, change_template, read_beginnings
from genesis.chat.template import ConversationError, Message, Span

_OPEN, _CLOSE = "\ue000<generation>\ue001", "\ue001</generation>\ue000"
_IS_MARKED: Final = "_generation_is_marked"
_MAX_SHOWN: Final = 160
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class SandboxedTemplate:
    """A compiled template, without limits of its own. Deterministic.

    Args:
        text: The template.
        name: The template's name in messages, such as the path of its file.
        today: The date for templates that print today's date; None rejects such templates.

    Raises:
        UserError: The text is not a template.
    """

    def __init__(self, text: str, name: str, today: date | None = None) -> None:
        self.text = text
        self.name = name
        self.today = today
        self._environment = _build_environment(self._format_today)
        try:
            self._compiled = self._environment.from_string(text)
        except MemoryError:
            raise
        except Exception as error:  # also RecursionError, or what Python refuses of the code that Jinja makes
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise UserError(f"the chat template {name}{line} is not valid Jinja: {_shorten(error)}; fix it") from None

    @cached_property
    def has_generation_tags(self) -> bool:
        """Whether the template marks the assistant's text."""
        tags = self._environment.parse(self.text).find_all(nodes.CallBlock)
        return any(_is_generation(tag) for tag in tags)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        has_prompt: bool = False,
    ) -> str:
        """Returns a conversation as text, as `ChatTemplate.render` describes; there is no limit."""
        return self._write(self._compiled, self._given(messages, tools, variables, has_prompt=has_prompt))

    def render_marked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Returns a conversation and the spans between its tags, as `ChatTemplate.render_marked` describes."""
        marked = self._write(self._compiled, self._given(messages, tools, variables, is_marked=True))
        text, spans = _split_marked(marked)
        if text is None or text != self.render(messages, tools, variables):
            raise ConversationError(
                f"the chat template {self.name} nests its `generation` blocks, or changes their text after them; give "
                "another template"
            )
        return text, spans

    def measure_beginnings(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        text: str,
        *,
        has_prompt: bool = False,
    ) -> dict[int, int]:
        """Returns the lengths of what `render` writes for the first messages, by the number of messages.

        Only those are returned that one rendering shows, and that begin the text of all messages.

        Args:
            messages: The turns.
            tools: The definitions of the tools; None for none.
            variables: Further variables of the template.
            text: The text of all messages.
            has_prompt: Whether the beginning of the assistant's next turn follows.
        """
        if self._changed is None:
            return {}
        seen = Seen()
        given = self._given(messages, tools, variables, has_prompt=has_prompt)
        try:
            marked = self._write(
                self._changed, {**given, "messages": WatchedMessages(messages, seen), **seen.functions()}
            )
        except UserError:
            return {}
        return read_beginnings(marked, seen, text)

    @cached_property
    def _changed(self) -> jinja2.Template | None:
        changed = change_template(lambda: self._environment.parse(self.text))
        return None if changed is None else self._environment.from_string(changed)

    def _given(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        *,
        has_prompt: bool = False,
        is_marked: bool = False,
    ) -> dict[str, Any]:
        return {
            **(variables or {}),
            _IS_MARKED: is_marked,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": has_prompt,
        }

    def _write(self, compiled: jinja2.Template, given: Mapping[str, Any]) -> str:
        try:
            text = compiled.render(given)
        except (UserError, MemoryError):
            raise
        except Exception as error:  # a template may raise anything
            raise ConversationError(f"the chat template {self.name} refuses it: {_shorten(error)}") from None
        if not text.isascii() and _SURROGATE.search(text):  # of JSON such as "\ud800"; no tokenizer takes it
            raise ConversationError("the conversation contains a lone surrogate, which is not a character; remove it")
        return text

    def _format_today(self, pattern: str) -> str:
        if self.today is None:
            raise UserError(
                f"the chat template {self.name} prints today's date, which would make other tokens on another day; "
                "give a date for it, as --chat.date 2026-01-31"
            )
        return self.today.strftime(pattern)


def _shorten(error: Exception) -> str:
    """Returns the message of an error in one line of limited length; the name of its class if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


class _Generation(Extension):
    """The tags `generation` and `endgeneration`, whose text is rendered between marks if these are asked for."""

    tags = {"generation"}  # noqa: RUF012  # the attribute's name and form are Jinja's

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [nodes.Name(_IS_MARKED, "load")])
        block = nodes.CallBlock(call, [], [], body)
        block.set_lineno(line)
        return block

    def _mark(self, is_marked: bool, caller: Callable[[], str]) -> str:  # called by a template
        return f"{_OPEN}{caller()}{_CLOSE}" if is_marked is True else caller()


def _is_generation(block: nodes.CallBlock) -> bool:
    method = block.call.node
    return isinstance(method, nodes.ExtensionAttribute) and method.identifier == _Generation.identifier


class _SafeNamespace(Namespace):
    """Jinja's namespace without attributes that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        given = dict(*rest, **kwargs)
        for name in given:
            _check_attribute(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


class _SafeDict:
    """The value of `dict` in a template: only the function, without the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # the name of the argument in templates
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _build_environment(format_today: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    # Unoptimized: what a template computes of constants would else be written into its code, in five times the memory.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.pop("lipsum")  # random text
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=format_today, dict=_SafeDict(), namespace=_SafeNamespace
    )
    return environment


def _split_marked(marked: str) -> tuple[str | None, list[Span]]:
    """Returns the text without marks, and the spans between two marks; None if the marks are not in pairs."""
    head, *rest = marked.split(_OPEN)
    parts, spans, length = [head], [], len(head)
    for part in rest:
        inner, *after = part.split(_CLOSE)
        if len(after) != 1 or _CLOSE in head:
            return None, []
        spans.append(Span(length, length + len(inner)))
        parts += [inner, after[0]]
        length += len(inner) + len(after[0])
    return ("".join(parts), spans) if _CLOSE not in head else (None, [])
