"""A number and its noun agree, as `numbered` writes them: no message has "1 steps"."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOTS = [Path(__file__).parents[1] / name for name in ("genesis", "callbacks/src/genesis_callbacks")]
NOUN = re.compile(r" (?:[a-z]+ )?([a-z]+s)\b(?!/)")
UNITS = {"bytes", "times"}
NO_NOUNS = {"is", "has", "was", "does", "as", "its", "across", "needs", "lists", "reads", "this", "and", "of", "in"}
CALLS = re.compile(r"(len|sum|min|max)\(.*\)")
NAMES = re.compile(r"(.*\W)?(_?(num|count|total)(_\w+)?|\w+_(steps|ranks|rows|texts|size|count))\W*")


def find_counts(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the words of each number in an f-string that is followed by a noun in the plural."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for field, following in zip(node.values, node.values[1:], strict=False):
            if not isinstance(field, ast.FormattedValue) or not isinstance(following, ast.Constant):
                continue
            noun = NOUN.match(following.value)
            form = "" if field.format_spec is None else ast.unparse(field.format_spec)
            value = ast.unparse(field.value)
            is_count = form == "f','" or (not form and any(rule.fullmatch(value) for rule in (CALLS, NAMES)))
            is_constant = value.isupper()
            if noun and is_count and not is_constant and not (UNITS | NO_NOUNS) & set(noun[0].split()):
                yield field.lineno, f"{value}{noun[0]}"


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.name)
def test_no_message_has_a_plural_behind_a_count_that_may_be_one(root: Path) -> None:
    found = [
        f"{path.relative_to(root)}:{line}: {what}"
        for path in sorted(root.rglob("*.py"))
        for line, what in find_counts(path.read_text())
    ]
    assert not found, "write numbered(count, 'nouns') of genesis.base.errors:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("f'{len(ranks)} ranks'", True),
        ("f'{number:,} other files'", True),
        ("f'{found.num_rows} rows are left'", True),
        ("f'{world_size} ranks'", True),
        ("f'{numbered(number, \"files\")}'", False),
        ("f'{rate:,.0f} tokens/s'", False),
        ("f'{num_bytes} bytes'", False),
        ("f'{MAX_RUNS} runs'", False),
        ("f'{name} holds'", False),
        ("f'train/{name}_steps'", False),
        ("f'{num_layers} is less'", False),
    ],
)
def test_what_is_a_count_with_its_noun(code: str, *, is_found: bool) -> None:
    assert bool(list(find_counts(code))) == is_found
