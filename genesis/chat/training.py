"""Training templates for families of models whose template drops text of earlier turns.

A family is recognised by its template's output for conversations of one turn, with tools and with reasoning, and the
prompt for the assistant. A training template that writes the same texts belongs to it.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final, NamedTuple

from genesis.base.errors import UserError
from genesis.chat.stops import PROBE_TOOL
from genesis.chat.template import ChatTemplate, EndlessTemplateError, Message

_CALL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": "\u00e9t\u00e9"}},
}


class _Probe(NamedTuple):
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] | None = None
    has_prompt: bool = False


_SYSTEM: Final[Message] = {"role": "system", "content": "Be brief."}
_USER: Final[Message] = {"role": "user", "content": "What is a \u00e9t\u00e9?"}
_ANSWER: Final[Message] = {"role": "assistant", "content": "A place."}
_REASONED: Final[Message] = {**_ANSWER, "reasoning_content": "It is a word."}
_CALLING: Final[Message] = {"role": "assistant", "content": "", "reasoning_content": "A word.", "tool_calls": [_CALL]}
_RESULT: Final[Message] = {"role": "tool", "content": "a place"}
_PROBES: Final = (
    _Probe([_USER, _ANSWER]),
    _Probe([_SYSTEM, _USER, _REASONED]),
    _Probe([_USER, {"role": "assistant", "content": "<think>\nA word.\n</think>\n\nA place."}]),
    _Probe([_USER, _CALLING], [PROBE_TOOL]),
    _Probe([_SYSTEM, _USER, _CALLING, _RESULT, _RESULT, _REASONED], [PROBE_TOOL]),
    _Probe([_SYSTEM, _USER], [PROBE_TOOL], {}, has_prompt=True),
    _Probe([_USER], None, {"enable_thinking": False}, has_prompt=True),
)


def find_training_template(template: ChatTemplate, variables: Mapping[str, Any]) -> ChatTemplate:
    """Returns the training template for the family of `template`; `template` itself if it has tags or no known family.

    Args:
        template: A model's own template.
        variables: The spellings of bos, eos and other tokens.

    Raises:
        UserError: The template computes without end.
    """
    if template.has_generation_tags:
        return template
    for entry in sorted(files(__package__).joinpath("templates").iterdir(), key=lambda entry: entry.name):
        name = f"{entry.name} (genesis.chat.templates, in place of the model's)"
        ours = ChatTemplate(entry.read_text(encoding="utf-8"), name, template.today)
        if all(_write(template, probe, variables) == _write(ours, probe, variables) for probe in _PROBES):
            return ours
    return template


def _write(template: ChatTemplate, probe: _Probe, variables: Mapping[str, Any]) -> str | None:
    """Returns a template's output for a probe; None if the template rejects the probe or lacks a date."""
    try:
        return template.render(
            probe.messages, probe.tools, {**variables, **(probe.variables or {})}, has_prompt=probe.has_prompt
        )
    except EndlessTemplateError:  # more probes would each take as long
        raise
    except UserError:
        return None
