"""Compares the recipes of runs."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from genesis.operations.report.collect import Run, parse_recipe_text
from genesis_callbacks.base.errors import printable

_MAX_ROWS: Final = 60
_MAX_VALUE: Final = 80
_NOT_COMPARED: Final = ("run_dir",)


def compare_recipes(runs: Sequence[Run]) -> list[list[str]]:
    """Returns a row for each setting whose value is not the same in all recipes: its name, and the values."""
    settings = [_flatten(run) for run in runs]
    names = sorted({name for each in settings for name in each})
    rows = [[name, *(each.get(name, "") for each in settings)] for name in names if name not in _NOT_COMPARED]
    return [row for row in rows if len(set(row[1:])) > 1][:_MAX_ROWS]


def _flatten(run: Run) -> dict[str, str]:
    content = parse_recipe_text(run.recipe)  # the page shows the text of a file that cannot be parsed
    return {} if content is None else dict(_list_settings(content, ""))


def _list_settings(content: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(content, dict) and content:
        for name, value in content.items():
            yield from _list_settings(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield printable(prefix)[:_MAX_VALUE], printable(str(content))[:_MAX_VALUE]
