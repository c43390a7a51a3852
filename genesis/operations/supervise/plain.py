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

from genesis.base.errors import printable
from genesis.data.skipped import Ranges
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import read_file

MAX_BYTES: Final = 1 << 20
_MAX_TEXT: Final = 2000
_MAX_ENTRIES: Final = 4096
_MAX_COUNT: Final = 1 << 62


class Record(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=Record)


def read_record(kind: type[T], path: Path) -> T | None:
    """Returns the dataclass in a small regular file; None without a valid one: it is forged, or of another version."""
    try:
        return decode(kind, load_json(read_file(path, MAX_BYTES)))
    except (OSError, ValueError, RecursionError):
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
    """Returns the dataclass that `asdict` made, with or without JSON; a missing field has its default.

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
    if get_origin(hint) is Mapping and isinstance(value, dict) and len(value) <= _MAX_ENTRIES:
        key = int if inner[0] is int else _text  # JSON has only texts as keys
        return {key(name): _decode_value(inner[1], each) for name, each in value.items()}
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_decode_value(inner[0], each) for each in value)
    raise ValueError(f"not a {hint}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return printable(value[:_MAX_TEXT])


def _count(value: Any) -> int:
    if type(value) is not int or not -_MAX_COUNT < value < _MAX_COUNT:
        raise ValueError("not a whole number of moderate size")
    return value


def _number(value: Any) -> float:
    if type(value) is int:  # a larger one has no float
        return float(_count(value))
    if type(value) is not float or not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _positions(value: Any) -> Ranges:
    """Returns ranges in order and without overlaps; the size of their file limits how many there are."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, list | tuple) and len(each) == 2 for each in value
    ):
        raise ValueError("not a list of ranges")
    ranges = tuple((_count(first), _count(stop)) for first, stop in value)
    flat = [position for each in ranges for position in each]
    if flat != sorted(set(flat)) or (flat and flat[0] < 0):
        raise ValueError("not ranges in order")
    return ranges


_READERS: Final = {int: _count, float: _number, str: _text, bool: _flag, Ranges: _positions}
