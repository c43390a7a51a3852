"""Marks: the keys by which data sets mark whether a turn of the assistant is learned.

    weight                      0 or 1       OpenAI, Mistral
    train, training, trainable  true, false  open-instruct, axolotl, verl
    loss                        true, false  ms-swift
    loss_mask, loss_weight, loss_scale       1 is learned: verl, LLaMA-Factory, ms-swift
    mask, masked                true is NOT learned: torchtune

Each of them becomes `weight`. A mark of a record is one for all of its turns, or a list with one for each. A value
between 0 and 1, a mark on a part of a turn and a mark of tokens cannot be honoured, and are refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from genesis.base.errors import UserError, numbered
from genesis.chat.template import ConversationError, Message

WEIGHT: Final = "weight"
"""The key of a message whose value 0 means that the message is not learned."""
ASKED: Final = "train"
"""The key of a message, true where the data ask that a turn of another role than the assistant is learned."""

_HIDING: Final = ("mask", "masked")
MARKS: Final = (
    *(WEIGHT, ASKED, "training", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale"),
    *_HIDING,
)
_OF_PARTS: Final = ("train_detail", "training_detail")
_OF_TOKENS: Final = ("assistant_masks", "assistant_mask", "assistant_tokens_mask", "completion_mask")
_OF_INPUT: Final = ("train_on_input", "train_on_inputs")
RECORD_MARKS: Final = (*MARKS, *_OF_PARTS, *_OF_TOKENS, *_OF_INPUT)
_IGNORE: Final = "or list it in `ignored_keys` of the source if it is no mark"


class UnclearMarkError(UserError):
    """A key looks like a mark and has no known meaning: no choice to skip bad records may decide what it means."""


def read_turn_mark(message: Message, number: int) -> None:
    """Replaces the marks of a turn by `weight`, or by `train` if a turn of another role is to be learned.

    Raises:
        ConversationError: A mark is not one of a whole turn, or two of them contradict each other.
    """
    turn = f"turn {number}"
    _refuse(
        message, _OF_PARTS, f"{turn} has {{}}, a mark on parts of a turn, and turns are learned whole or not at all"
    )
    is_learned = _read(message, turn)
    is_assistant = message["role"] == "assistant"
    # `weight` is defined for the assistant's turns alone, and 1 is what a turn has without it.
    is_asked = not is_assistant and any(key in message for key in MARKS if key != WEIGHT)
    for key in MARKS:
        message.pop(key, None)
    if is_learned is None:
        return
    if is_learned and is_asked:
        message[ASKED] = True
    elif is_assistant or not is_learned:
        message[WEIGHT] = int(is_learned)


def apply_record_marks(record: Mapping[str, Any], messages: Sequence[Message]) -> list[Message]:
    """Returns the messages of a record with the marks that the record has for all of them.

    Raises:
        ConversationError: A mark has no value or list that can be honoured, or contradicts that of a turn.
    """
    _refuse(
        record, _OF_TOKENS, "the record has {}, a mask for the tokens of one tokenizer; remove the field, " + _IGNORE
    )
    _refuse(record, _OF_PARTS, "the record has {}, a mark on parts of turns, and turns are learned whole or not at all")
    inputs = [name for name in _OF_INPUT if record.get(name)]
    if inputs:
        raise ConversationError(
            f"the record has {inputs[0]} {show_value(record[inputs[0]])}: only chat.labels all learns what is asked; "
            f"remove the field, {_IGNORE}"
        )
    lists = {name: record[name] for name in MARKS if isinstance(record.get(name), list | tuple)}
    marked = [dict(message) for message in messages]
    for name, values in lists.items():
        if len(values) != len(marked):
            raise ConversationError(
                f"the record has {name} with {numbered(len(values), 'values')} for {numbered(len(marked), 'turns')}; "
                f"give one for each turn, {_IGNORE}"
            )
        for number, (message, value) in enumerate(zip(marked, values, strict=True), 1):
            if value is not None:
                _add(message, name, value, f"turn {number}")
    whole = {name: value for name, value in record.items() if name in MARKS and name not in lists}
    if str(whole.get("mask")).lower() in ("user", "human"):
        del whole["mask"]  # NeMo's name of the role that is not learned
    is_learned = _read(whole, "the record")
    if is_learned is False:
        for message in marked:
            message.pop(ASKED, None)
            message[WEIGHT] = 0
    return marked


def _add(message: Message, name: str, value: Any, owner: str) -> None:
    """Adds a mark of a record's list to its turn; in such lists, 1 has no meaning at turns of others."""
    is_learned = _learned(name, value, owner)
    if message["role"] == "assistant" or not is_learned:
        _read({WEIGHT: message.get(WEIGHT), name: value} if name != WEIGHT else {name: value}, owner)
        message[WEIGHT] = int(is_learned)


def _read(owner: Mapping[str, Any], name: str) -> bool | None:
    """Returns whether the owner of marks is learned; None if it has no mark."""
    found = {key: _learned(key, owner[key], name) for key in MARKS if owner.get(key) is not None}
    if len(set(found.values())) > 1:
        shown = " and ".join(f"{key} {show_value(owner[key])}" for key in found)
        raise ConversationError(f"{name} has {shown}, which contradict each other; remove one")
    return next(iter(found.values()), None)


def _learned(key: str, value: Any, owner: str) -> bool:
    if isinstance(value, bool):
        return value != (key in _HIDING)
    if key in _HIDING:
        raise ConversationError(
            f"{owner} has {key} {show_value(value)}; write true (not learned) or false, or loss_mask with 0 (not "
            f"learned) or 1, {_IGNORE}"
        )
    if not isinstance(value, int | float) or value not in (0, 1):
        raise ConversationError(
            f"{owner} has {key} {show_value(value)}; a {key} is 0 or false (not learned), or 1 or true; correct it, "
            f"{_IGNORE}"
        )
    return bool(value)


def _refuse(owner: Mapping[str, Any], names: Sequence[str], reason: str) -> None:
    found = next((name for name in names if owner.get(name) is not None), None)
    if found is not None:
        raise ConversationError(f"{reason.format(found)}")


def refuse_part_marks(parts: Sequence[Any], what: str) -> None:
    """Refuses marks on parts of a turn: its texts, or its calls of tools.

    Raises:
        ConversationError: A part has one.
    """
    for part in parts:
        key = next((key for key in MARKS if isinstance(part, Mapping) and part.get(key) is not None), None)
        if key is not None:
            raise ConversationError(
                f"{what} has a part with {key} {show_value(part[key])}, and turns are learned whole or not at all; "
                "remove it, or make turns of the parts"
            )


def refuse_likely_marks(messages: Sequence[Message], left_out: Sequence[str], template: str) -> None:
    """Refuses keys that the template does not use and whose values are like those of marks; all are named.

    Args:
        messages: The turns.
        left_out: The keys of messages that the template does not use.
        template: The name of the template.

    Raises:
        UnclearMarkError: A turn has such a key.
    """
    found: dict[str, str] = {}
    for number, message in enumerate(messages, 1):
        for key in left_out:
            if key not in found and _is_like_mark(message.get(key)):
                found[key] = f"turn {number} has {key} {show_value(message[key])}"
    if found:
        raise UnclearMarkError(
            f"{', '.join(found.values())}, which the chat template {template} does not use and which may be a mark on "
            "whether the turn is learned; call it `train` or `weight` if it is one, or list it in `ignored_keys` of "
            f"the source if it has no meaning for training: ignored_keys: [{', '.join(found)}]"
        )


def _is_like_mark(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(key in MARKS for key in value)
    if isinstance(value, str):
        return value.lower() in ("true", "false")
    values: Iterator[Any] = iter(value if isinstance(value, list | tuple) and value else [value])
    return all(isinstance(one, bool | int | float) for one in values)


def show_value(value: Any) -> str:
    """Returns a value of a record as JSON writes it, shortened."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
