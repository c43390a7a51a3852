"""What the processes that render chat templates are asked, and the limits of an answer.

Limits grow with the size of the request.
"""

import json
import pickle
import struct
from datetime import date
from typing import Any, Final, NamedTuple

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


def ask(request: Request) -> Answer:
    """Returns the answer to a request.

    Raises:
        RunEndedError: A worker cannot run, or the command ends meanwhile.
    """
    try:
        payload = pickle.dumps(request)
    except RecursionError:
        return Answer(mistake="the conversation is nested too deeply; flatten it", is_of_conversation=True)
    seconds = SECONDS * (1 + len(payload) / 1e6)
    if request.function == "lay_out":
        seconds *= 1 + len(request.arguments[0]) / _TURNS_PER_TEXT
    num_bytes = MEMORY_BYTES + _MEMORY_PER_BYTE * len(payload)
    num_chars = NUM_CHARS.pack(MAX_CHARS + _CHARS_PER_BYTE * len(payload))
    try:
        return Answer(*json.loads(POOL.ask(num_chars + payload, seconds, num_bytes)))
    except LimitReachedError as error:
        return Answer(limit=str(error))
