"""Reads JSON strictly: an object with a key twice is refused, of which Python's reader keeps the last value alone."""

import json
from collections.abc import Sequence
from typing import Any


def load_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: The text is not JSON, or an object in it has a key twice.
        RecursionError: The text is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:100]!r} is twice in one object")
    return content
