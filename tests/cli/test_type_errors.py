"""What the parser writes about types becomes the option, its value and what to give."""

from pathlib import Path
from typing import Any, Literal

import pytest

from genesis.base.arguments import Bytes
from genesis.cli.help import describe_type
from genesis.cli.type_errors import explain_types
from genesis.data.sources import SourceOptions

_CLASS_TAIL = "Subclass types expect one of: - a class path (str) - a dict with class_path entry"


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("Parser key \"a\": Expected a <class 'tuple'>. Got value: 5", "a is 5: give a list"),
        ("Parser key \"a\": Expected a typing.Literal['x', 'y']. Got value: z", "a is z: give one of x, y"),
        (
            'genesis data prepare: Parser key "a.b": Does not validate against any of the Union subtypes Subtypes: '
            "[<class 'NoneType'>, dict[str, list[int]], typing.Literal['x']] Errors: - Expected a <class "
            "'NoneType'> Given value type: <class 'str'> Given value: z",
            "genesis data prepare: a.b is 'z': give a mapping of names to lists of whole numbers or one of x or null",
        ),
        *(
            (
                f'Parser key "a": Does not validate against any of the Union subtypes Subtypes: [{types}] Errors: - '
                "Expected a <class 'int'> Given value type: <class 'str'> Given value: z",
                "a is 'z': give a number or null",
            )
            for types in (
                "<class 'NoneType'>, <class 'int'>, <class 'float'>",
                "<class 'float'>, <class 'int'>, <class 'NoneType'>",
            )
        ),
        (
            f'Parser key "a": - Expected a path but [5] either not accessible or invalid - Not a valid subclass of '
            f"Big. Got value: 5 {_CLASS_TAIL}",
            "a is 5: give the options of Big, each on a line of its own as 'name: value'",
        ),
        (
            f'Parser key "a": Not a valid subclass of Big {_CLASS_TAIL}',
            "a: give the options of Big, each on a line of its own as 'name: value'",
        ),
        (
            'Parser key "sources": Problem with given class_path \'a.B\': Parser key "paths": '
            "Expected a <class 'tuple'>. Got value: text",
            "sources.paths is text: give a list",
        ),
        (
            "Parser key \"sources\": Problem with given class_path 'a.B': Option 'pahts' is not accepted",
            "sources: Option 'pahts' is not accepted",
        ),
        (
            'Parser key "a": - Expected a path but b.C either not accessible or invalid - Import path does not '
            "correspond to a subclass of Big",
            'Parser key "a": b.C is no subclass of Big',
        ),
        (
            'Parser key "a": - Expected a path but b.C either not accessible or invalid - Problem with given '
            "class_path 'b.C': module 'b' has no attribute 'C'",
            "Parser key \"a\": Problem with given class_path 'b.C': module 'b' has no attribute 'C'",
        ),
    ],
)
def test_a_type_is_written_in_words(line: str, plain: str) -> None:
    assert explain_types(line) == plain


@pytest.mark.parametrize(
    "line",
    [
        "the following arguments are required: data.seq_len",
        "Parser key \"trainer.strategy\": Problem with given class_path 'nowhere.X': No module named 'nowhere'",
        'Parser key "a": Parser key "b": Expected a <class \'int\'>. Got value: x',
    ],
)
def test_another_line_is_not_changed(line: str) -> None:
    assert explain_types(line) == line


def test_a_reason_is_not_followed_by_the_types_of_python() -> None:
    tail = " - Expected a <class 'collections.abc.Iterable'> - Expected a <class 'bool'>"
    assert explain_types(f"the logger is not installed{tail}") == "the logger is not installed"


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Path, "path"),
        (tuple[Path, ...] | None, "list of paths or null"),
        (tuple[SourceOptions, ...], "list of sources"),
        (Literal["a", "b"] | Literal["c"] | None, "one of a, b, c or null"),
        (dict[str, int] | None, "mapping of names to whole numbers or null"),
        (list[list[int]], "list of lists of whole numbers"),
        (int | float, "number"),
        (Bytes, "size as 5GB"),
    ],
)
def test_the_type_of_an_option_is_described_in_words(hint: Any, words: str) -> None:
    assert describe_type(hint) == words
