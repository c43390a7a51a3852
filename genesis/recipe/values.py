"""Judges the value of an option by its types, and describes in plain words what the types take."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

_LITERAL: Final = "typing.Literal["
_WORD: Final = re.compile(r"'([^']*)'|([^,\s]+)")
_WORDS: Final = {
    "NoneType": ("null", "null"),
    "int": ("a whole number", "whole numbers"),
    "float": ("a number", "numbers"),
    "str": ("a text", "texts"),
    "bool": ("true or false", "true or false"),
    "list": ("a list", "lists"),
    "tuple": ("a list", "lists"),
    "collections.abc.Sequence": ("a list", "lists"),
    "collections.abc.Iterable": ("a list", "lists"),
    "dict": ("a mapping", "mappings"),
    "pathlib.Path": ("a path", "paths"),
}
_REMEDIES: Final = {"data.max_epochs": "; for all sources alike, give data.num_epochs"}
"""The option that a user may have meant, by the one with a value of another type."""
_LISTS: Final = re.compile(r"(?:list|tuple|collections\.abc\.(?:Sequence|Iterable))\[(?P<inner>.*?)(?:, \.\.\.)?\]")
_MAPPINGS: Final = re.compile(r"dict\[[^,]+, (?P<inner>.*)\]")


def _is_number(text: str) -> bool:
    try:
        float(text.removeprefix("+").removeprefix("-").removeprefix(".") if "inf" in text or "nan" in text else text)
    except ValueError:
        return re.fullmatch(r"[+-]?0[xob][0-9a-f_]+", text) is not None
    return True


_FITS: Final[dict[str, Callable[[str], bool]]] = {
    "<class 'int'>": _is_number,  # the real parser also takes some numbers with a point or an exponent
    "<class 'float'>": _is_number,
    "<class 'bool'>": lambda text: text in ("true", "false", "yes", "no", "on", "off", "y", "n", "1", "0"),
    "NoneType": lambda text: text in ("null", "none", "~", ""),
}


def fits(value: Any, types: Sequence[str]) -> bool:
    """Returns whether one of an option's types may take a value; only numbers, words, true, false and null are judged.

    Args:
        value: The value, or the text as it is written.
        types: The types as Python writes them.

    Example:
        >>> fits("many", ["<class 'int'>"]), fits("many", ["<class 'int'>", "<class 'str'>"]), fits(None, ["NoneType"])
        (False, True, True)
    """
    if not all(kind in _FITS or kind.startswith(_LITERAL) for kind in types):
        return True
    return not isinstance(value, list | dict) and any(_fits(write_plain(value), kind) for kind in types)


def _fits(text: str, kind: str) -> bool:
    if kind.startswith(_LITERAL):
        words = [quoted or bare for quoted, bare in _WORD.findall(kind.removeprefix(_LITERAL).removesuffix("]"))]
        return text in words
    return _FITS[kind](text.strip().lower())


def write_plain(value: Any) -> str:
    """Returns a plain value as a recipe writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def explain_value(name: str, value: str, types: Sequence[str]) -> str:
    """Returns the line about an option's value that none of its types takes.

    Args:
        name: The option.
        value: The value as it is written; a text among several types has its quotes.
        types: The types as Python writes them.

    Example:
        >>> explain_value("data.seq_len", "many", ["<class 'int'>"])
        'data.seq_len is many: give a whole number'
    """
    kinds = dict.fromkeys(map(_describe, types))
    if "a number" in kinds:  # Python's order of the two varies with what was imported before
        kinds.pop("a whole number", None)
    # What an option is without a value comes last.
    words = " or ".join(sorted(kinds, key="null".__eq__))
    return f"{name} is {value}: give {words}{_REMEDIES.get(name, '')}"


def explain_text(name: str, text: str, types: Sequence[str]) -> str:
    """Returns what `explain_value` returns for a value as it is written, without quotes."""
    return explain_value(name, text or repr("") if len(types) == 1 else repr(text), types)


def _describe(kind: str, *, is_plural: bool = False) -> str:
    """Returns the words for a type as Python writes it."""
    name = kind.removeprefix("<class '").removesuffix("'>")
    if name in _WORDS:
        return _WORDS[name][is_plural]
    if name.startswith(_LITERAL):
        return f"one of {name.removeprefix(_LITERAL).removesuffix(']').replace(chr(39), '')}"
    inner = _LISTS.fullmatch(name)
    if inner is not None:
        return f"{'lists' if is_plural else 'a list'} of {_describe(inner['inner'], is_plural=True)}"
    inner = _MAPPINGS.fullmatch(name)
    if inner is not None:
        return f"{'mappings' if is_plural else 'a mapping'} of names to {_describe(inner['inner'], is_plural=True)}"
    return f"the options of {name.rpartition('.')[2]}"
