"""Proves a template on short conversations: what its tags mark is what the assistant writes after each prompt.

Without tags, the turns of each conversation are found by rendering its beginnings, which is a proof by itself. Tags
are taken at their word there, so they are compared here with the same rule. Another template than the model's own is
compared with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from genesis.base.errors import UserError
from genesis.chat.template import ChatTemplate, ConversationError, Span
from genesis.chat.training import (
    MAX_SHOWN,
    MODES,
    PROBE_DATE,
    PROBES,
    Probe,
    describe_difference,
    list_words,
    write,
)


def prove_template(
    template: ChatTemplate, own: ChatTemplate | None, variables: Mapping[str, Any], *, is_given: bool
) -> list[str]:
    """Checks a template with which a model is trained, and returns lines of warning.

    Args:
        template: The template: the user's, the model's own, or a training template in its place.
        own: The model's own template; None without one.
        variables: The spellings of bos, eos and other tokens, and the user's variables.
        is_given: Whether the user chose the template.

    Raises:
        UserError: The user's template marks other text than what the assistant writes after its prompts.
    """
    lines: list[str | None] = []
    try:
        lines.append(check_marks(template, variables))
    except UserError as error:
        if is_given:
            raise
        lines.append(str(error))
    if own is not None and is_given:
        lines.append(describe_difference(own, template, variables))
    return [line for line in lines if line is not None]


def check_marks(template: ChatTemplate, variables: Mapping[str, Any]) -> str | None:
    """Checks that the tags of a template mark what the assistant writes after each prompt, and no later text.

    Args:
        template: A template; without tags, there is nothing to check.
        variables: The spellings of bos, eos and other tokens, and the user's variables.

    Returns:
        A line if the tags mark the end of a prompt as well, so that the model also learns text that it is given.

    Raises:
        UserError: A turn is marked otherwise; the message has the turn and the text.
    """
    if not template.has_generation_tags:
        return None
    dated = ChatTemplate(template.text, template.name, template.today or PROBE_DATE)
    asking = [probe for probe in PROBES if probe.messages[-1]["role"] == "assistant"]
    lines = [_check_probe(dated, probe, {**variables, **probe.variables}) for probe in asking]
    return next((line for line in lines if line is not None), None)


def _check_probe(template: ChatTemplate, probe: Probe, variables: Mapping[str, Any]) -> str | None:
    if write(template, probe, variables).text is None:  # conversations of this kind are refused
        return None
    text, spans = template.render_marked(probe.messages, probe.tools, variables)
    numbers = [number for number, message in enumerate(probe.messages) if message["role"] == "assistant"]
    spans = _join(text, spans)
    if len(spans) != len(numbers):  # turns that share their marks cannot be chosen one by one, and are learned together
        return None
    line = None
    for number, span in zip(numbers, spans, strict=True):
        marked = text[span.start : span.end]
        prompts = _write_prompts(template, probe._replace(messages=probe.messages[:number]), variables)
        asked = max((prompt for prompt in prompts if text.startswith(prompt)), key=len, default=None)
        whole = write(template, probe._replace(messages=probe.messages[: number + 1]), variables).text
        if asked is None:
            start = next((at for at, (a, b) in enumerate(zip(text, prompts[0], strict=False)) if a != b), 0)
            _refuse(template, number, text[start:], "the prompt for the turn has", prompts[0][start:])
        if text[: span.start] not in prompts and span.start > min(map(len, prompts)):
            _refuse(template, number, marked, "after its prompt the turn is", text[len(asked) :])
        if whole is not None and not whole.startswith(text[: span.end]):
            _refuse(template, number, marked, "as the last turn it is", whole[span.start :])
        turn = probe._replace(messages=[probe.messages[number]], tools=None)
        missing = next((word for word in list_words(turn) if word not in marked), None)
        if missing is not None and missing in text[span.end :]:
            _refuse(template, number, marked, "the marked text leaves out", missing)
        if text[: span.start] not in prompts:
            line = line or (
                f"the chat template {template.name} marks turn {number + 1} of a conversation as "
                f"{marked[:MAX_SHOWN]!r}, and its prompt ends with {asked[span.start :]!r}: the model also learns text "
                "that it is given; begin the {% generation %} block after the prompt"
            )
    return line


def _write_prompts(template: ChatTemplate, probe: Probe, variables: Mapping[str, Any]) -> list[str]:
    prompts = []
    for mode in MODES:
        try:
            prompts.append(template.render(probe.messages, probe.tools, {**variables, **mode}, has_prompt=True))
        except ConversationError:
            continue
    return prompts


def _join(text: str, spans: Sequence[Span]) -> list[Span]:
    """Returns spans in which those with nothing between them are one."""
    joined: list[Span] = []
    for span in spans:
        if joined and not text[joined[-1].end : span.start]:
            span = Span(joined.pop().start, span.end)
        joined.append(span)
    return joined


def _refuse(template: ChatTemplate, number: int, marked: str, what: str, other: str) -> NoReturn:
    raise UserError(
        f"the chat template {template.name} writes and marks turn {number + 1} of a conversation as "
        f"{marked[:MAX_SHOWN]!r}, and {what} {other[:MAX_SHOWN]!r}, so that the model would learn something else; "
        "mark each turn from the end of its prompt to its closing symbol by {% generation %}"
    )
