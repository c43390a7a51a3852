"""Reads the fields of a request's JSON body; an error names an unknown, invalid or unsupported field."""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from genesis.serve.errors import ApiError
from genesis_callbacks.base.json_text import RepeatedKeyError, load_json


@dataclass(frozen=True)
class FieldTable:
    """The fields of a kind of request.

    Attributes:
        example: A body, for messages.
        fields: The fields that are read.
        ignored: Fields that have no effect here.
        not_supported: Fields of OpenAI's API that are not supported, with the values that have no effect.
    """

    example: str
    fields: tuple[str, ...]
    ignored: tuple[str, ...]
    not_supported: Mapping[str, tuple[Any, ...]]


def parse_object(body: bytes, table: FieldTable) -> "Fields":
    """Returns the fields of a JSON object.

    Args:
        body: JSON.
        table: The fields that the object may have.

    Raises:
        ApiError: The body is not a JSON object, or a field is unknown or not supported.
    """
    try:
        content = load_json(body, _refuse_constant)
    except ApiError:
        raise
    except RepeatedKeyError as error:
        raise ApiError(f"the body has the field {show(error.key)} twice", param=error.key[:100]) from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ApiError(f"the body is not a JSON object: {table.example}")
    for name in content:
        if name not in (*table.fields, *table.ignored, *table.not_supported):
            near = difflib.get_close_matches(name[:100], table.fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ApiError(f"unknown field {show(name)}{hint}", param=name[:100], code="unknown_field")
    for name, values in table.not_supported.items():
        if not any(content.get(name) == value and not isinstance(content.get(name), bool) for value in values):
            refuse(name, "is not supported: remove it")
    return Fields(content)


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(f"the body contains {name}, which is not JSON")


def refuse(param: str, problem: str) -> NoReturn:
    """Refuses a field.

    Raises:
        ApiError: Always.
    """
    raise ApiError(f"{param} {problem}", param=param)


def show(value: Any) -> str:
    """Returns a value as one short line for a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."


class Fields:
    """Reads the fields of a request by type; null means that a field is not given."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def value(self, name: str) -> Any:
        """Returns the field as it is; None if it is missing."""
        return self._content.get(name)

    def required_text(self, name: str) -> str:
        """Returns a string."""
        value = self.value(name)
        if value is None:
            refuse(name, "is missing")
        if not isinstance(value, str):
            refuse(name, f"is {show(value)}: it must be a string")
        return value

    def flag(self, name: str) -> bool:
        """Returns true or false; false if it is missing."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            refuse(name, f"is {show(value)}: it must be true or false")
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Returns an integer from `low` to `high`; None if it is missing."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            refuse(name, f"is {show(value)}: it must be an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float, of: str | None = None) -> float:
        """Returns a number from `low` to `high`; `of` is the field that this one belongs to."""
        value = self.value(name)
        if value is None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(_to_float(value)) or not low <= value <= high:
            problem = f"is {show(value)}" if of is None else f"has {show(value)} for {show(name)}"
            refuse(of or name, f"{problem}: it must be a number from {low:g} to {high:g}")
        return float(value)


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
