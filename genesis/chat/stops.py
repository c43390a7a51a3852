"""The control symbols with which a chat template closes the assistant's turns: where a model that learned it stops.

The template renders a few short conversations that end with the assistant. What it writes after the answer's last word
closes the turn. A model need not have the symbol as its eos: base models carry a template and end their texts by
another one, and some families close a call of a tool by a symbol of its own.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Final, NamedTuple

from genesis.base.errors import UserError
from genesis.chat.template import ChatTemplate, ConversationError, Message
from genesis.tokenizer.tokenizer import Tokenizer

_WORD: Final = "Regenbogen"
"""The last word of the answers; no template writes it by itself."""
_MAX_SHOWN: Final = 40


class _Probe(NamedTuple):
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None


_SYSTEM: Final[Message] = {"role": "system", "content": "Be brief."}
_USER: Final[Message] = {"role": "user", "content": "What is bright?"}
_ANSWER: Final[Message] = {"role": "assistant", "content": f"The {_WORD}"}
PROBE_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
"""The definition of a tool with which templates are tried."""
_ANSWERED: Final = (
    _Probe([_USER, _ANSWER]),
    _Probe([_SYSTEM, _USER, _ANSWER]),
    _Probe([_USER, _ANSWER, _USER, _ANSWER]),
)


def _call(arguments: object) -> _Probe:
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return _Probe([_USER, {"role": "assistant", "content": "", "tool_calls": [call]}], [PROBE_TOOL])


_CALLED: Final = (_call({"word": _WORD}), _call(json.dumps({"word": _WORD})))
"""Templates take the arguments of a call as an object, or as JSON."""


class TurnEnds(NamedTuple):
    """How a template closes the assistant's turns.

    Args:
        ids: The control symbols that close a turn: none if the template closes turns by text, or not at all.
        text: What the template writes after an answer; None if it refuses all conversations that were tried.
        is_learned: Whether the symbols are in the text that the template marks for training, if it marks any.
    """

    ids: tuple[int, ...]
    text: str | None
    is_learned: bool = True


def find_turn_ends(
    template: ChatTemplate, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None
) -> TurnEnds:
    """Returns the control symbols with which a template closes the assistant's turns.

    Args:
        template: The template.
        tokenizer: The tokenizer, which defines the control symbols.
        variables: Further variables of the template.

    Raises:
        UserError: The template computes without end.
    """
    dated = template if template.today is not None else ChatTemplate(template.text, template.name, date.today())
    given = {**tokenizer.named_tokens, **(variables or {})}
    closing = next((text for probe in _ANSWERED if (text := _write_close(dated, probe, given)) is not None), None)
    if closing is None:
        return TurnEnds((), None)
    controls, is_alone = _list_controls(tokenizer, closing)
    # The model stops at the first symbol; a second one at the very end of the text closes the turn as well.
    ends = dict.fromkeys([*controls[:1], *(controls[-1:] if is_alone else [])])
    called = next((text for probe in _CALLED if (text := _write_close(dated, probe, given)) is not None), "")
    after_call, is_alone = _list_controls(tokenizer, called)
    ends |= dict.fromkeys(after_call[-1:] if is_alone and ends else [])
    return TurnEnds(tuple(ends), closing, _are_marked(dated, given, tokenizer, frozenset(ends)))


def can_end_turn(tokenizer: Tokenizer, token: int) -> bool:
    """Returns whether a token may close a turn: a control symbol, or a stop that is text to its tokenizer."""
    return tokenizer.is_control(token) or token in tokenizer.stop_ids


def describe_ends(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Returns symbols with their ids, as `<|im_end|> (2)`."""
    return " or ".join(f"{tokenizer.pieces[token]} ({token})" for token in ids)


def check_ends(template: ChatTemplate, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> None:
    """Checks that a model can learn from the template where its turns end.

    Raises:
        UserError: The template closes no turn by a control symbol, leaves the symbol out of what it marks for training,
            or computes without end.
    """
    ends = find_turn_ends(template, tokenizer, variables)
    if ends.text is not None and not ends.ids:
        shown = repr(ends.text[-_MAX_SHOWN:]) if ends.text.strip() else "nothing"
        raise UserError(
            f"the chat template {template.name} never closes the assistant's turns: it writes {shown} after an answer, "
            "and no control symbol of the tokenizer, so that a model would not learn to stop; give a template that "
            "ends turns with one (`genesis model add-tokens` adds a missing symbol to a model)"
        )
    if not ends.is_learned:
        raise UserError(
            f"the chat template {template.name} closes the assistant's turns by {describe_ends(ends.ids, tokenizer)} "
            "outside of its {% generation %} block, so that a model would not learn to stop; move the symbol into the "
            "block"
        )


def _write_close(template: ChatTemplate, probe: _Probe, variables: Mapping[str, Any]) -> str | None:
    """Returns what a template writes after the last word of a probe; None if it refuses the probe or has no such word.

    Raises:
        EndlessTemplateError: The template exceeds a limit.
    """
    try:
        text = template.render(probe.messages, probe.tools, variables)
    except ConversationError:
        return None
    place = text.rfind(_WORD)
    return None if place < 0 else text[place + len(_WORD) :]


def _list_controls(tokenizer: Tokenizer, closing: str) -> tuple[list[int], bool]:
    """Returns the control symbols in a text, and whether nothing but white space stands after the last of them."""
    encoded, offsets = tokenizer.encode_with_offsets(closing)
    ids = encoded.tolist()
    places = [place for place, token in enumerate(ids) if can_end_turn(tokenizer, token)]
    is_last = bool(places) and not closing[offsets[places[-1]][1] :].strip()
    return [ids[place] for place in places], is_last


def _are_marked(
    template: ChatTemplate, variables: Mapping[str, Any], tokenizer: Tokenizer, ends: frozenset[int]
) -> bool:
    """Returns whether a turn that the template marks holds one of the symbols; True for a template without marks."""
    if not template.has_generation_tags:
        return True
    for probe in _ANSWERED:
        try:
            text, spans = template.render_marked(probe.messages, probe.tools, variables)
        except ConversationError:
            continue
        if spans:
            return bool(ends.intersection(tokenizer.encode_with_controls(text[spans[-1].start : spans[-1].end])))
    return True
