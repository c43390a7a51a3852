"""What the processes that render chat templates are asked, and the limits of an answer.

Limits grow with the size of the request.
"""

import contextlib
import json
import pickle
import struct
from collections.abc import Generator, Sequence
from datetime import date
from typing import Any, Final, NamedTuple, TypeVar

from genesis.base.limited_workers import LimitedWorkers, LimitReachedError

SECONDS = 2.0
"""Processor time for one answer, and for each megabyte of its request. An ordinary text takes about a millisecond."""
MEMORY_BYTES = 64 << 20
"""Memory for one answer, beyond what an idle worker has. An ordinary text takes less than one megabyte."""
MAX_CHARS = 1_000_000
"""Characters that a template may write by itself."""
_MEMORY_PER_BYTE: Final = 32
_CHARS_PER_BYTE: Final = 16
_TURNS_PER_TEXT: Final = 100
"""To lay out a conversation, it is rendered again for each turn; so many turns get the time of one answer."""
_NUM_WORKERS: Final = 4

NUM_CHARS: Final = struct.Struct("q")
"""What precedes a request: the most characters of a text."""
POOL: Final = LimitedWorkers("genesis.chat.worker", _NUM_WORKERS)
"""The processes that render for this process."""


class Request(NamedTuple):
    """A function of `genesis.chat.worker`, the template that it gets, and its further arguments."""

    template: str
    name: str
    today: date | None
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Answer(NamedTuple):
    """What a function returned, or why there is no result.

    Args:
        result: The result, in the types of JSON.
        mistake: The message of a `UserError`; None for a result.
        is_of_conversation: Whether the mistake concerns one conversation.
        limit: What the template does that it may not; None within the limits.
    """

    result: Any = None
    mistake: str | None = None
    is_of_conversation: bool = False
    limit: str | None = None


_Result = TypeVar("_Result")
Steps = Generator[Request, Answer, _Result]
"""Work that yields requests, gets their answers, and returns a result."""


def run_steps(works: Sequence[Steps[_Result]]) -> list[_Result]:
    """Returns the results of some works; one request of each is answered at a time, by one message.

    A message costs a tenth of a millisecond, and more where all processors are busy.

    Raises:
        RunEndedError: A worker cannot run, or the command ends meanwhile.
    """
    results: dict[int, _Result] = {}
    answers: dict[int, Answer | None] = dict.fromkeys(range(len(works)))
    while answers:
        requests: dict[int, Request] = {}
        for number, answer in answers.items():
            try:
                requests[number] = next(works[number]) if answer is None else works[number].send(answer)
            except StopIteration as end:
                results[number] = end.value
        answers = dict(zip(requests, _ask_all([*requests.values()]), strict=True))
    return [results[number] for number in range(len(works))]


def ask(request: Request) -> Answer:
    """Returns the answer to a request.

    Raises:
        RunEndedError: A worker cannot run, or the command ends meanwhile.
    """
    try:
        return _exchange([request])[0]
    except RecursionError:
        return Answer(mistake="the conversation is nested too deeply; flatten it", is_of_conversation=True)
    except LimitReachedError as error:
        return Answer(limit=str(error))


def _ask_all(requests: Sequence[Request]) -> list[Answer]:
    """Returns the answers to requests, which have the limits of one together; beyond them, each is asked by itself."""
    answers: Sequence[Answer | None] = [None] * len(requests)
    if len(requests) > 1:
        with contextlib.suppress(RecursionError, LimitReachedError):
            answers = _exchange(requests)
    return [
        ask(request) if answer is None or answer.limit is not None else answer
        for request, answer in zip(requests, answers, strict=True)
    ]


def _exchange(requests: Sequence[Request]) -> list[Answer]:
    payload = pickle.dumps(requests)
    seconds, chars = SECONDS * (1 + len(payload) / 1e6), MAX_CHARS
    if len(requests) == 1:
        chars += _CHARS_PER_BYTE * len(payload)
        if requests[0].function == "lay_out":
            seconds *= 1 + len(requests[0].arguments[0]) / _TURNS_PER_TEXT
    num_bytes = MEMORY_BYTES + _MEMORY_PER_BYTE * len(payload)
    return [Answer(*one) for one in json.loads(POOL.ask(NUM_CHARS.pack(chars) + payload, seconds, num_bytes))]
