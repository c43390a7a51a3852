"""Values of JSON that anybody may have written: counts, numbers and small mappings. Imports no torch."""

import math
from typing import Any, Final

MAX_COUNT: Final = 1 << 62
MAX_ENTRIES: Final = 24


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
