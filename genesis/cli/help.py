"""The help of commands with recipes: types in plain words, and the options of sections that may be left out."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from datetime import timedelta
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from genesis.base.arguments import Bytes, Gigabytes

_WORDS: Final = {
    bool: ("true or false", "true or false"),
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    str: ("text", "texts"),
    Path: ("path", "paths"),
    Bytes: ("size as 5GB", "sizes"),
    Gigabytes: ("number of GB, or size as 512MB", "sizes"),
    timedelta: ("duration", "durations"),
    Any: ("any value", "values"),
    NoneType: ("null", "null"),
}
_DEFAULTS: Final = {"True": "true", "False": "false", "()": "[]", "": "empty"}
_DEFAULT: Final = re.compile(r"default: (True|False|\(\)|)(?=[,)])")
_OF_FILE: Final = re.compile(r"^  --\S+ CONFIG\s+Path to a configuration file\.\n", re.MULTILINE)
_NOT_OURS: Final = re.compile(r"trainer\.(?!strategy$).*|checkpoint\.scope|.*\.help")
"""The options whose sections or classes are Lightning's, or set by Genesis itself."""


class PlainHelp(DefaultHelpFormatter):
    """Prints types as words: path, list of sources, one of a, b."""

    def _get_type_str(self, action: Any) -> str | None:
        hint = getattr(action, "_typehint", action.type)
        return None if hint is None else describe_type(hint)

    def _expand_help(self, action: Any) -> str:
        return _DEFAULT.sub(lambda found: f"default: {_DEFAULTS[found[1]]}", super()._expand_help(action))


class PlainParser(ArgumentParser):
    """A parser whose help has types in plain words, and the options of sections that a recipe may leave out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": PlainHelp, **kwargs})

    def format_help(self) -> str:
        """Returns the help, with the options of all sections."""
        # jsonargparse writes a backspace that a terminal applies.
        return super().format_help().replace("\b", "") + format_sections(self)


def describe_type(hint: Any, *, is_plural: bool = False) -> str:
    """Returns the words for a type. Pure.

    Example:
        >>> describe_type(tuple[Path, ...]), describe_type(Literal["a", "b"] | None), describe_type(dict[str, int])
        ('list of paths', 'one of a, b or null', 'mapping of names to whole numbers')
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint][is_plural]
    if origin in (Union, UnionType):
        choices = tuple(choice for each in inner if get_origin(each) is Literal for choice in get_args(each))
        others = [each for each in inner if get_origin(each) is not Literal]
        merged = [Literal[choices], *others] if choices else others
        kinds = dict.fromkeys(describe_type(each, is_plural=is_plural) for each in merged)
        if _WORDS[float][is_plural] in kinds:
            kinds.pop(_WORDS[int][is_plural], None)
        return " or ".join(sorted(kinds, key="null".__eq__))
    if origin is Literal:
        return f"{'' if is_plural else 'one of '}{', '.join(dict.fromkeys(map(str, inner)))}"
    if origin is None or not inner or origin.__name__ == "Callable":
        return _describe_class(origin or hint, is_plural=is_plural)
    if issubclass(origin, Mapping):
        return f"{'mappings' if is_plural else 'mapping'} of names to {describe_type(inner[1], is_plural=True)}"
    return f"{'lists' if is_plural else 'list'} of {describe_type(inner[0], is_plural=True)}"


def _describe_class(kind: Any, *, is_plural: bool) -> str:
    name = getattr(kind, "__name__", str(kind))
    if name == "Callable":
        return "function by its dotted name"
    if not is_dataclass(kind):
        return f"{name}s" if is_plural else name
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"(Options|Config)$", "", name)).lower()
    return f"{words}s" if is_plural else "section of options"


class Section(NamedTuple):
    """A class whose fields are options: of a section, of a class that a recipe chooses, or of the entries of a list."""

    key: str
    kind: type
    role: Literal["section", "chosen", "entries"]


def format_sections(parser: ArgumentParser) -> str:
    """Returns the help of the options in sections that may be left out, in chosen classes and in entries of lists."""
    return "".join(
        _format_section(section)
        for action in parser._actions
        if not _NOT_OURS.fullmatch(action.dest)
        for section in _find_sections(action.dest, getattr(action, "_typehint", None))
    )


def _find_sections(key: str, hint: Any) -> Iterator[Section]:
    is_list = get_origin(hint) in (list, tuple)
    for kind in get_args(hint) or (hint,):
        if not isinstance(kind, type) or kind.__module__ == "builtins":
            continue
        chosen = sorted(_our_subclasses(kind), key=lambda each: each.__name__)
        if chosen:
            yield from (Section(key, each, "chosen") for each in chosen)
        elif is_dataclass(kind):
            yield Section(key, kind, "entries" if is_list else "section")


def _our_subclasses(kind: type) -> set[type]:
    children: list[type] = kind.__subclasses__()
    below = {each for child in children for each in (child, *_our_subclasses(child))}
    return {each for each in below if each.__module__.startswith("genesis.") and not inspect.isabstract(each)}


def _format_section(section: Section) -> str:
    key, kind, role = section
    parser = ArgumentParser(add_help=False, formatter_class=PlainHelp)
    parser.add_class_arguments(kind, f"{key}.init_args" if role == "chosen" else key)
    _, _, options = _OF_FILE.sub("", parser.format_help()).partition(":\n")
    if not options.strip():
        return ""
    if role == "entries":
        return f"\nFields of each entry of --{key}:\n{options.replace(f'--{key}.', '')}"
    what = f" with class_path {_public_path(kind)}" if role == "chosen" else ""
    return f"\nOptions of --{key}{what}:\n{options}"


def _public_path(kind: type) -> str:
    """Returns the shortest dotted name under which a class can be imported."""
    parts = kind.__module__.split(".")
    places = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next(
        f"{place}.{kind.__name__}" for place in places if getattr(sys.modules[place], kind.__name__, None) is kind
    )
