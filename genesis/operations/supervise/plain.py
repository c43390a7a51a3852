"""Reads small JSON files that anybody may have written, and turns their values into dataclasses of plain fields."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import printable
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import read_file

MAX_BYTES: Final = 1 << 20
_MAX_TEXT: Final = 2000
_MAX_ENTRIES: Final = 4096


def read_object(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None if there is no regular file of moderate size that holds one."""
    try:
        content = load_json(read_file(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def text(value: Any) -> str:
    """Returns a text that is safe to print.

    Raises:
        ValueError: The value is not a text.
    """
    if not isinstance(value, str):
        raise ValueError("not a text")
    return printable(value[:_MAX_TEXT])


def count(value: Any) -> int:
    """Returns a whole number.

    Raises:
        ValueError: The value is not a whole number of moderate size.
    """
    if type(value) is not int or not -(1 << 62) < value < 1 << 62:
        raise ValueError("not a whole number")
    return value


def number(value: Any) -> float:
    """Returns a finite number.

    Raises:
        ValueError: The value is not a finite number.
    """
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def entries(value: Any) -> Mapping[str, Any]:
    """Returns a small mapping, with names that are safe to print.

    Raises:
        ValueError: The value is not a small mapping.
    """
    if not isinstance(value, dict) or len(value) > _MAX_ENTRIES:
        raise ValueError("not a small mapping")
    return {text(name): each for name, each in value.items()}


def read_positions(value: Any) -> tuple[tuple[int, int], ...]:
    """Returns ranges of positions, in order and without overlaps; the size of their file limits how many there are.

    Raises:
        ValueError: The value is not a list of such ranges.
    """
    if not isinstance(value, list):
        raise ValueError("not a list of ranges")
    ranges = tuple((count(first), count(stop)) for first, stop in value)
    flat = [position for each in ranges for position in each]
    if flat != sorted(set(flat)) or (flat and flat[0] < 0):
        raise ValueError("not ranges in order")
    return ranges
