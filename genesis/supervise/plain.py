"""Small JSON files that anybody may have written, as dataclasses of plain fields.

The annotations of a dataclass say what its file may hold: numbers of moderate size, texts that are safe to print, small
mappings, tuples, ranges of positions and other such dataclasses. Nothing else is taken from a file.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Final, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from genesis.data.skipped import Ranges
from genesis.errors import printable
from genesis_callbacks.files import replace_file
from genesis_callbacks.json_text import load_json
from genesis_callbacks.untrusted import read_file

MAX_BYTES: Final = 1 << 20
_MAX_TEXT: Final = 2000
_MAX_ENTRIES: Final = 4096


class Record(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=Record)


def read_object(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None if there is no regular file of moderate size that holds one."""
    try:
        content = load_json(read_file(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_record(kind: type[T], path: Path) -> T | None:
    """Returns the dataclass in a file; None without a valid one: a forged file, or one of another version."""
    content = read_object(path)
    try:
        return None if content is None else decode(kind, content)
    except ValueError:
        return None


def write_record(path: Path, record: Record, *, has_rivals: bool = False) -> None:
    """Replaces the file of a dataclass, which gets a line for each field, in a directory that is made if needed.

    Raises:
        OSError: It cannot be written.
    """
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(record).items())
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, f"{{\n{lines}\n}}\n".encode(), has_rivals=has_rivals)


def decode(kind: type[T], content: Any) -> T:
    """Returns the dataclass that `asdict` and JSON made; a missing field has its default, an unknown one is ignored.

    Raises:
        ValueError: A value is not of its field's type, or a field without a default is missing.
    """
    if not isinstance(content, dict):
        raise ValueError("not an object")
    hints = _read_hints(kind)
    for field in fields(kind):
        if field.name not in content and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{field.name} is missing")
    return kind(**{name: _decode_value(hint, content[name]) for name, hint in hints.items() if name in content})


@functools.cache
def _read_hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _decode_value(hint: Any, value: Any) -> Any:
    inner = get_args(hint)
    if hint in _READERS:
        return _READERS[hint](value)
    if is_dataclass(hint):
        return decode(hint, value)  # type: ignore[arg-type]
    if NoneType in inner:
        return None if value is None else _decode_value(inner[0], value)
    if get_origin(hint) is Literal and value in inner:
        return value
    if get_origin(hint) is Mapping:
        # JSON has only texts as keys.
        named = entries(value).items()
        return {int(name) if inner[0] is int else name: _decode_value(inner[1], each) for name, each in named}
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_decode_value(inner[0], each) for each in value)
    raise ValueError(f"not a {hint}")


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
    if type(value) not in (int, float) or (type(value) is int and abs(value) >= 1 << 62) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def flag(value: Any) -> bool:
    """Returns a truth value.

    Raises:
        ValueError: The value is not one.
    """
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def entries(value: Any) -> Mapping[str, Any]:
    """Returns a small mapping, with names that are safe to print.

    Raises:
        ValueError: The value is not a small mapping.
    """
    if not isinstance(value, dict) or len(value) > _MAX_ENTRIES:
        raise ValueError("not a small mapping")
    return {text(name): each for name, each in value.items()}


def read_positions(value: Any) -> Ranges:
    """Returns ranges of positions, in order and without overlaps; the size of their file limits how many there are.

    Raises:
        ValueError: The value is not a list of such ranges.
    """
    if not isinstance(value, list):
        raise ValueError("not a list of ranges")
    ranges = tuple((count(first), count(stop)) for first, stop in map(_pair, value))
    flat = [position for each in ranges for position in each]
    if flat != sorted(set(flat)) or (flat and flat[0] < 0):
        raise ValueError("not ranges in order")
    return ranges


def _pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("not a range")
    return value[0], value[1]


_READERS: Final = {int: count, float: number, str: text, bool: flag, Ranges: read_positions}
