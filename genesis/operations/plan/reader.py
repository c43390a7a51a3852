"""Reads single values of a recipe for a plan."""

from collections.abc import Mapping
from typing import Any

from genesis.base.errors import UserError


class Reader:
    """Reads single values of a recipe by their dotted names."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self._content, self._where = content, where

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value; `default` if it is missing or null."""
        value: Any = self._content
        for key in name.split("."):
            if not isinstance(value, Mapping):
                return default
            value = value.get(key)
        return default if value is None else value

    def count(self, name: str, default: int, least: int = 1) -> int:
        """Returns a whole number of at least `least`; raises UserError for another value."""
        value = self.get(name, default)
        if type(value) is not int or value < least:
            raise UserError(f"{self._where}: {name} is {value!r}: it must be a whole number of at least {least}")
        return value

    def optional_count(self, name: str) -> int | None:
        """Returns a whole number above 0; None if it is missing or -1, which means no limit."""
        value = self.get(name)
        return None if value is None or value == -1 else self.count(name, 1)

    def number(self, name: str, default: float) -> float:
        """Returns a number; raises UserError for another value."""
        value = self.get(name, default)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UserError(f"{self._where}: {name} is {value!r}: it must be a number") from None
