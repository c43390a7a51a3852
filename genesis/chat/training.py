"""Training templates: each writes what the template of a family of models writes, keeps all turns, and marks them.

A family is recognised by its template's output alone: a training template belongs to a model if both write the same for
every probe below. So a model whose template was changed gets none. A probe compares what the two have in common: a
family may drop the reasoning of earlier turns, begin a turn otherwise than its prompt, or have no form for reasoning.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

from genesis.base.errors import UserError
from genesis.chat.stops import PROBE_TOOL
from genesis.chat.template import (
    ChatTemplate,
    ConversationError,
    EndlessTemplateError,
    Message,
    read_defaults,
    write_defaults,
)

VARIANTS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "chatml.jinja": ({}, {"has_tools": False}),
    "deepseek_r1.jinja": ({}, {"opens_thinking": False}),
    "deepseek_v3_1.jinja": ({}, {"has_enable_thinking": True}),
    "gemma.jinja": ({}, {"has_system": False}),
    "glm4.jinja": ({}, {"is_compact": True}),
    "llama3_1.jinja": ({}, {"prints_today": True}),
    "mistral.jinja": ({}, {"has_ids": True}),
    "olmo2.jinja": ({}, {"has_bos": False}),
    "phi4.jinja": ({}, {"is_mini": True}),
    "qwen3_5.jinja": ({}, {"thinks": False}, {"has_json_values": True}, {"thinks": False, "has_json_values": True}),
    "smollm3.jinja": ({}, {"has_date": False, "closes_system": True}),
}
"""The variables by which models of one family differ, with a value for each kind; {} for the family's first models."""
MAX_SHOWN: Final = 60
MODES: Final[Sequence[Mapping[str, Any]]] = (
    *({}, {"enable_thinking": True}, {"enable_thinking": False}),
    {"thinking": True},  # of DeepSeek-V3.1
)
_SLOTS: Final = ("default_system", "default_system_with_tools")
"""The variables of a training template that hold what a model writes in place of a missing system turn."""
_SLOT_MARK: Final = "\ue020"
PROBE_DATE: Final = date(2026, 1, 31)
"""For templates that print the date, so that they can be compared before one is given."""


class Probe(NamedTuple):
    """A conversation with which two templates are compared.

    Args:
        messages: The turns.
        tools: The definitions of tools.
        variables: Further variables of the templates.
        after: The word after which the texts are compared, because a family may drop what stands before it; None to
            compare whole texts.
        has_prompt: Whether the prompt for the assistant follows.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = {}
    after: str | None = None
    has_prompt: bool = False


def _call(name: str, word: str, number: int) -> dict[str, Any]:
    arguments = {"word": word, "limit": 3, "exact": True, "tags": ["\u00e9 t"]}
    return {"id": f"a1b2c3d4{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(content: str, number: int) -> Message:
    return {"role": "tool", "name": "look_up", "tool_call_id": f"a1b2c3d4{number}", "content": content}


_SYSTEM: Final[Message] = {"role": "system", "content": " Be brief. "}
_USER: Final[Message] = {"role": "user", "content": "What is a \u00e9t\u00e9?"}
_AGAIN: Final[Message] = {"role": "user", "content": " Where? "}
_ANSWER: Final[Message] = {"role": "assistant", "content": "A place."}
_REASONING: Final = {"reasoning_content": "It is a word.", "thinking": "It is a word."}
_REASONED: Final[Message] = {**_ANSWER, **_REASONING}
_CALLING: Final[Message] = {"role": "assistant", "content": "", "tool_calls": [_call("look_up", "\u00e9t\u00e9", 1)]}
_TWICE: Final[Message] = {
    **_CALLING,
    "content": "I look.",
    "tool_calls": [_call("look_up", "sunlight", 1), _call("look_up", "rainfall", 2)],
}
_TOOLS: Final = [PROBE_TOOL]
_WITHOUT_SYSTEM: Final = (Probe([_USER], has_prompt=True), Probe([_USER], _TOOLS, has_prompt=True))
PROBES: Final = (
    *_WITHOUT_SYSTEM,
    Probe([_USER, _ANSWER]),
    Probe([_SYSTEM, _USER], has_prompt=True),
    Probe([_SYSTEM, _USER, _REASONED]),
    Probe([_USER], variables={"enable_thinking": False}, has_prompt=True),
    Probe([_SYSTEM, _USER], variables={"enable_thinking": True}, has_prompt=True),
    Probe([_USER, {"role": "assistant", "content": "<think>\nA word.\n</think>\n\nA place."}]),
    Probe([_USER, _ANSWER, _AGAIN], after="A place.", has_prompt=True),
    Probe([_SYSTEM, _USER, _ANSWER, _AGAIN, {**_ANSWER, "content": " It is 1. "}], after="A place."),
    Probe([{**_USER, "name": "Ada"}], has_prompt=True),
    Probe([_SYSTEM, _USER], _TOOLS, has_prompt=True),
    Probe([_USER, _CALLING], _TOOLS),
    Probe([_USER, {**_CALLING, **_REASONING}], _TOOLS),
    Probe([_USER, {**_CALLING, "content": "I look."}], _TOOLS),
    Probe([_USER, _TWICE], _TOOLS),
    Probe([_USER, _CALLING, _result("a place", 1)], _TOOLS, after="\u00e9t\u00e9", has_prompt=True),
    Probe([_SYSTEM, _USER, _TWICE, _result("warm", 1), _result("wet", 2), _ANSWER], _TOOLS, after="warm"),
    Probe([_SYSTEM, _USER, _TWICE, _result("warm", 1), _result("wet", 2), _REASONED], _TOOLS, after="warm"),
)


class Output(NamedTuple):
    """What a template writes for a probe.

    Args:
        text: The text; None if the template refuses the probe or leaves out a part of it.
        lacks_only_reasoning: Whether the template leaves out the reasoning, and nothing else.
    """

    text: str | None
    lacks_only_reasoning: bool = False


def find_training_template(template: ChatTemplate, variables: Mapping[str, Any]) -> ChatTemplate:
    """Returns the training template for the family of `template`; `template` itself if no family is recognised.

    Args:
        template: A model's own template.
        variables: The spellings of bos, eos and other tokens, and the user's variables.

    Raises:
        UserError: The template computes without end.
    """
    if template.today is None and _prints_date(template, variables):
        return template  # which asks for a date as soon as a conversation needs it
    own = ChatTemplate(template.text, template.name, template.today or PROBE_DATE)
    for name, body in _read_bodies().items():
        defaults = _find_defaults(own, name, body, variables)
        if defaults is not None:
            shown = "".join(f", {key}={value}" for key, value in defaults.items() if key not in _SLOTS)
            shown = f"{name}{shown} (genesis.chat.templates, in place of the model's)"
            return ChatTemplate(write_defaults(body, defaults), shown, template.today)
    return template


def find_trained_end(text: str, own: ChatTemplate, variables: Mapping[str, Any]) -> str | None:
    """Returns the end of a text that is the training template for the family of `own`; None if there is none.

    Args:
        text: A template that was learned, which may begin with values of variables: those of the user, with which the
            training template was found, and then its own.
        own: A model's own template, with a date.
        variables: The spellings of bos, eos and other tokens.
    """
    for name, body in _read_bodies().items():
        if not text.endswith(body):
            continue
        is_found, given, start = False, dict(variables), 0
        for key, value, end in [*read_defaults(text), ("", None, 0)]:
            defaults = _find_defaults(own, name, body, given)
            if defaults is not None and write_defaults(body, defaults) == text[start:]:
                return text[start:]
            is_found = is_found or defaults is not None
            given[key], start = value, end
        return body if is_found else None  # a default may have had another date
    return None


def describe_difference(own: ChatTemplate, other: ChatTemplate, variables: Mapping[str, Any]) -> str | None:
    """Returns a line with the first turn that two templates write differently, and the text; None if there is none.

    Args:
        own: A model's own template.
        other: A template to be used in its place.
        variables: The spellings of bos, eos and other tokens, and the user's variables.
    """
    own, other = (ChatTemplate(one.text, one.name, one.today or PROBE_DATE) for one in (own, other))
    for probe in PROBES:
        if agree(own, other, probe, variables, variables):
            continue
        numbers = range(1, len(probe.messages))
        for part in [
            *(probe._replace(messages=probe.messages[:number], has_prompt=False) for number in numbers),
            probe,
        ]:
            texts = [write(own, part, variables).text, write(other, part, variables).text]
            if texts[0] != texts[1]:
                shown = ["refuses it" if text is None else f"writes {_cut(text, texts)!r}" for text in texts]
                after = " with the prompt after it" if part.has_prompt else ""
                turn = f"turn {len(part.messages)} ({part.messages[-1]['role']}){after} of a conversation"
                return f"at {turn}, the chat template {own.name} {shown[0]}, and {other.name} {shown[1]}"
    return None


def _cut(text: str, texts: Sequence[str | None]) -> str:
    """Returns the beginning of the part of a text that the other text does not have."""
    one, other = (part or "" for part in texts)
    start = next((at for at, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b), 0)
    return text[start : start + MAX_SHOWN]


@cache
def _read_bodies() -> Mapping[str, str]:
    """Returns the texts of the training templates by the names of their files."""
    entries = sorted(files(__package__).joinpath("templates").iterdir(), key=lambda entry: entry.name)
    return {entry.name: entry.read_text(encoding="utf-8") for entry in entries}


def _prints_date(template: ChatTemplate, variables: Mapping[str, Any]) -> bool:
    for probe in _WITHOUT_SYSTEM:
        try:
            template.render(probe.messages, probe.tools, variables)
        except (ConversationError, EndlessTemplateError):
            continue
        except UserError:
            return True
    return False


def _find_defaults(own: ChatTemplate, name: str, body: str, variables: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the values of variables with which a training template writes what `own` writes; None without any."""
    ours = ChatTemplate(body, name, own.today)
    for variant in VARIANTS.get(name, ({},)):
        slots = _read_slots(own, ours, {**variant, **variables})
        for defaults in [{**variant}, {**variant, **slots}] if slots else [{**variant}]:
            given = {**defaults, **variables}
            if all(agree(own, ours, probe, variables, given) for probe in PROBES):
                return defaults
    return None


def _read_slots(own: ChatTemplate, ours: ChatTemplate, variables: Mapping[str, Any]) -> dict[str, str]:
    """Returns what `own` writes in place of missing system turns, for the training templates that have places for it.

    These texts are long and differ from model to model; their place in the format is what a family shares.
    """
    found: dict[str, str] = {}
    for slot, probe in zip(_SLOTS, _WITHOUT_SYSTEM, strict=True):
        if re.search(rf"\b{slot}\b", ours.text):
            text = write(own, probe, variables).text or ""
            before, _, after = (write(ours, probe, {**variables, slot: _SLOT_MARK}).text or "").partition(_SLOT_MARK)
            if text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after):
                found[slot] = text[len(before) : len(text) - len(after)]
    return found


def agree(
    own: ChatTemplate, ours: ChatTemplate, probe: Probe, variables: Mapping[str, Any], given: Mapping[str, Any]
) -> bool:
    """Returns whether two templates write the same for a probe, as far as the model's own can be a measure."""
    theirs, found = write(own, probe, variables), write(ours, probe, given)
    if theirs.lacks_only_reasoning:
        return True  # a training template may add a form for it
    if theirs.text is None or found.text is None:
        return theirs.text is found.text
    text, measure = found.text, theirs.text
    if probe.after is not None:
        text, measure = (whole.rpartition(probe.after)[2] for whole in (text, measure))
    if probe.has_prompt:
        return text == measure
    # A turn may get the symbol of the next one as its end, and one that begins otherwise than its prompt is no measure.
    is_same = text.startswith(measure) and re.fullmatch(r"(<\|\w+\|>)?", text[len(measure) :]) is not None
    return is_same or not _is_asked(own, probe, theirs.text, variables)


def _is_asked(own: ChatTemplate, probe: Probe, text: str, variables: Mapping[str, Any]) -> bool:
    """Returns whether a text begins with one of the prompts for its last turn."""
    asking = probe._replace(messages=probe.messages[:-1], has_prompt=True)
    prompts = [write(own, asking, {**variables, **more}).text for more in MODES]
    return any(prompt is not None and text.startswith(prompt) for prompt in prompts)


def write(template: ChatTemplate, probe: Probe, variables: Mapping[str, Any]) -> Output:
    """Returns a template's output for a probe.

    Raises:
        EndlessTemplateError: The template exceeds a limit.
    """
    given = {**variables, **probe.variables}
    try:
        text = template.render(probe.messages, probe.tools, given, has_prompt=probe.has_prompt)
    except EndlessTemplateError:  # more probes would each take as long
        raise
    except UserError:
        return Output(None)
    if not all(word in text for word in list_words(probe)):
        return Output(None)
    last = probe.messages[-1]
    within = last.get("content", "").rpartition("</think>")[0].removeprefix("<think>").strip()
    lacks_reasoning = last.get("reasoning_content", "") not in text or within not in text
    return Output(None, lacks_only_reasoning=True) if lacks_reasoning else Output(text)


def list_words(probe: Probe) -> list[str]:
    """Returns the texts of a probe that every template must show: all but reasoning."""
    words = [tool["function"]["description"] for tool in probe.tools or ()]
    for message in probe.messages:
        words.append(message.get("content", "").rpartition("</think>")[2].strip())
        for call in message.get("tool_calls", ()):
            words += [call["function"]["name"], call["function"]["arguments"]["word"]]
    return words
