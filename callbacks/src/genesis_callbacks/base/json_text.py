"""Reads JSON strictly: an object with a key twice is refused, of which Python's reader keeps the last value alone.

Two readers of such a text, of which one keeps the first value, would see different things.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

__all__ = ["MAX_LIST", "RepeatedKeyError", "find_longest_list", "load_json"]

MAX_COUNT: Final = 1 << 62
MAX_ENTRIES: Final = 24
MAX_LIST: Final = 1 << 16
"""The most values of a list in a model's configuration: of layers, of factors, of ids."""


class RepeatedKeyError(ValueError):
    """An object of a JSON text has a key twice.

    Attributes:
        key: The key.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:100]!r} is twice in one object")
        self.key = key


def load_json(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: The text.
        parse_constant: Gets `NaN`, `Infinity` and `-Infinity`, which are no JSON; without it they are numbers.

    Raises:
        ValueError: The text is not JSON, or an object in it has a key twice.
        RecursionError: The text is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=parse_constant)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise RepeatedKeyError(next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1))
    return content


def find_longest_list(value: Any) -> int:
    """Returns the number of values in the longest list of a value of JSON, at any depth; 0 without a list."""
    longest, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            longest = max(longest, len(one))
        waiting.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
    return longest


def read_count(value: Any) -> int:
    """Returns a whole number from 0 on.

    Raises:
        ValueError: The value is something else, or huge.
    """
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise ValueError("not a count")
    return value


def read_number(value: Any) -> float:
    """Returns a finite number.

    Raises:
        ValueError: The value is something else.
    """
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def read_entries(value: Any) -> list[tuple[Any, Any]]:
    """Returns the entries of a mapping.

    Raises:
        ValueError: The value is not a mapping, or has more than `MAX_ENTRIES` entries.
    """
    if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
        raise ValueError("not a small mapping")
    return list(value.items())
