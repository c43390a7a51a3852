"""A pair of answers to one prompt, of which one is preferred, and the forms of records that hold one.

    OpenAI      {"input": {"messages": [...], "tools": [...]}, "preferred_output": [...], "non_preferred_output": [...]}
    TRL         {"prompt": [...], "chosen": [...], "rejected": [...]}, lists of messages or texts
    implicit    {"chosen": [...], "rejected": [...]}: the messages with which both begin are the prompt
    ShareGPT    {"conversations": [...], "chosen": {...}, "rejected": {...}}, turns with `from` and `value`

A text is one turn: a prompt that of the user, an answer that of the assistant.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from genesis.chat.conversation import (
    Conversation,
    find_turn_field,
    load_conversation,
    message_text,
    read_system,
    read_turns,
    read_variables,
)
from genesis.chat.marks import WEIGHT, apply_record_marks
from genesis.chat.template import ConversationError, Message

_OPENAI: Final = ("input", "preferred_output", "non_preferred_output")
_CHOSEN, _REJECTED, _PROMPT = "chosen", "rejected", "prompt"


@dataclass(frozen=True)
class Pair:
    """Two conversations that begin with the same prompt; only the turns of the answers are learned."""

    chosen: Conversation
    rejected: Conversation

    def dump(self) -> str:
        """Returns the pair as JSON, the same for equal pairs; `load_pair` reads it."""
        return json.dumps([self.chosen.dump(), self.rejected.dump()], ensure_ascii=False)


def load_pair(text: str) -> Pair:
    """Returns the pair that `Pair.dump` wrote."""
    chosen, rejected = json.loads(text)
    return Pair(load_conversation(chosen), load_conversation(rejected))


def is_pair(record: Mapping[str, Any]) -> bool:
    """Returns whether a record has the fields of a pair."""
    return set(_OPENAI[1:]) <= record.keys() or {_CHOSEN, _REJECTED} <= record.keys()


def read_pair(record: Mapping[str, Any], turn_field: str | None = None) -> Pair:
    """Returns the pair in a record, whose form the names of its fields decide.

    Args:
        record: The fields of the record, in plain types.
        turn_field: The field with the turns of the prompt, in the form ShareGPT; None for the usual names.

    Raises:
        ConversationError: The record has no pair, or one from which nothing can be learned.
    """
    given: Mapping[str, Any] = record
    if set(_OPENAI[1:]) <= record.keys():
        names: tuple[str, str] = _OPENAI[1:]
        given = record.get("input") or {}
        if not isinstance(given, Mapping) or "messages" not in given:
            raise ConversationError("input is no object with messages, the prompt of the pair; correct it")
        prompt, answers = _read_prompt(given, "messages"), _read_answers(record, names)
    elif {_CHOSEN, _REJECTED} <= record.keys():
        names = (_CHOSEN, _REJECTED)
        prompt, answers = _read_chosen_rejected(record, turn_field)
    else:
        raise ConversationError(
            f"no pair is in the fields {', '.join(list(record)[:20]) or 'of an empty record'}: it needs prompt, chosen "
            "and rejected, or input, preferred_output and non_preferred_output"
        )
    _check_prompt(prompt)
    for name, answer in zip(names, answers, strict=True):
        _check_answer(name, answer)
    if answers[0] == answers[1]:
        raise ConversationError(f"{names[0]} and {names[1]} are the same answer; remove the pair")
    # No turn of the prompt is learned, also where the assistant has spoken in it.
    asked = [
        *read_system(record, prompt),
        *({**message, WEIGHT: 0} if message["role"] == "assistant" else message for message in prompt),
    ]
    tools, variables = read_variables({**given, **record})
    chosen, rejected = (
        Conversation(apply_record_marks(record, [*asked, *answer]), tools, variables) for answer in answers
    )
    return Pair(chosen, rejected)


def _read_chosen_rejected(
    record: Mapping[str, Any], turn_field: str | None
) -> tuple[list[Message], tuple[list[Message], list[Message]]]:
    answers = _read_answers(record, (_CHOSEN, _REJECTED))
    turns = find_turn_field(record, turn_field)
    prompt = record.get(_PROMPT)
    is_whole = isinstance(record[_CHOSEN], list | tuple) and answers[0][0]["role"] != "assistant"
    if is_whole and turns is None and (prompt is None or isinstance(prompt, str)):
        return _split_prompt(*answers)  # a prompt in text beside whole conversations repeats their first turn
    if prompt is None and turns is None:
        raise ConversationError(
            "the pair has no prompt: give the field prompt, or lists of messages in chosen and rejected that begin "
            "with it"
        )
    return _read_prompt(record, _PROMPT if prompt is not None else str(turns)), answers


def _split_prompt(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], tuple[list[Message], list[Message]]]:
    """Returns the messages with which both conversations begin, and the rest of each."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):
        raise ConversationError("chosen and rejected are the same answer; remove the pair")
    for name, messages in ((_CHOSEN, chosen), (_REJECTED, rejected)):
        # Answers that begin alike share turns of the assistant, which are taken back from the prompt below.
        if shared < len(messages) and messages[shared]["role"] not in ("assistant", "tool"):
            raise ConversationError(
                f"the prompts of chosen and rejected differ: turn {shared + 1} of {name} is of the "
                f"{messages[shared]['role']} and not the same in both; correct the pair"
            )
    while shared and chosen[shared - 1]["role"] in ("assistant", "tool"):
        shared -= 1
    return chosen[:shared], (chosen[shared:], rejected[shared:])


def _read_prompt(record: Mapping[str, Any], name: str) -> list[Message]:
    if isinstance(record[name], str) and name == _PROMPT:
        return read_turns([{"role": "user", "content": record[name]}], name)
    return read_turns(record[name], name)


def _read_answers(record: Mapping[str, Any], names: tuple[str, str]) -> tuple[list[Message], list[Message]]:
    first, second = (_read_answer(record[name], name) for name in names)
    return first, second


def _read_answer(value: Any, name: str) -> list[Message]:
    if not value or (isinstance(value, str) and not value.strip()):
        raise ConversationError(f"{name} is empty; give an answer, or remove the pair")
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    return read_turns([value] if isinstance(value, Mapping) else value, name)


def _check_prompt(prompt: Sequence[Message]) -> None:
    asked = [message for message in prompt if message["role"] not in ("system", "developer")]
    if not any(message_text(message).strip() for message in asked):
        raise ConversationError("the prompt of the pair is empty: no turn of the user is in it; remove the pair")
    if prompt[-1]["role"] == "assistant":
        raise ConversationError("the prompt of the pair ends with a turn of the assistant; end it with the user's turn")


def _check_answer(name: str, answer: Sequence[Message]) -> None:
    if not any(message_text(message).strip() for message in answer):
        raise ConversationError(f"{name} is empty; give an answer, or remove the pair")
    for message in answer:
        if message["role"] not in ("assistant", "tool"):
            raise ConversationError(
                f"{name} has a turn of the {message['role']}, and an answer has turns of the assistant (and of tools "
                "that it calls); correct the pair"
            )
        if not message.get(WEIGHT, 1):
            raise ConversationError(
                f"{name} has a turn with weight 0, and an answer is learned whole: remove the weight"
            )
    if answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
        raise ConversationError(f"{name} does not begin and end with a turn of the assistant; correct the pair")
