"""Mistakes in the name or the type of an option, in plain words: jsonargparse writes the names of Python's types."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Final

from genesis.recipe.imports import find_refusal

_KEY: Final = r'Parser key "(?P<key>[^"]+)": '
_ONE: Final = re.compile(
    _KEY + r"Expected an? (?P<type>(?:<class '[^']+'>|typing\.Literal\[[^\]]*\]))\. Got value: ?(?P<value>.*)"
)
_SEVERAL: Final = re.compile(
    _KEY + r"(?:- Expected a path but .* either not accessible or invalid - )?"
    r"Does not validate against any of the Union subtypes Subtypes: \[(?P<types>.*)\] Errors: .*"
    r"Given value type: <class '(?P<given>[^']+)'> Given value: ?(?P<value>.*)"
)
_CLASS: Final = re.compile(
    _KEY + r"(?:- Expected a path but (?P<path>.*) either not accessible or invalid - )?"
    r"Not a valid subclass of (?P<class>\w+)(?:\. Got value: (?P<value>.*?))? Subclass types expect one of: .*"
)
_FEW_KEYS: Final = 20
_WITHOUT_CLASS: Final = re.compile(r"NestedArg\(key='(?P<key>[^']+)', val=.*\)")
"""An option of a class, where no class is given."""
_NESTED: Final = re.compile(
    r"Problem with given class_path|Import path|is not accepted|Not of type|Parser key .*Parser key"
)
"""A cause in a line that explains more than the types do."""
_NO_FILE: Final = re.compile(
    r"- Expected a path but (?P<path>\S+) either not accessible or invalid - "
    r"(?P<other>Import path does not correspond to a(?= subclass of ))?"
)
"""The text of jsonargparse in front of the cause, because a file with options could stand in the class's place."""
_TAIL: Final = re.compile(r"(?<=[^:\s])(?: - Expected an? <class '[^']+'>)+$")
"""The text of jsonargparse about the other types of an option, behind the reason why the first is refused."""
_ITEM: Final = re.compile(
    r"Parser key \"(?P<outer>[^\"]+)\": Problem with given class_path '[^']+': "
    r"(?:Parser key \"(?P<key>[^\"]+)\": |(?=Option '))"
)
"""An option within an entry of a list, such as a source's."""
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


_UNKNOWN: Final = re.compile(
    r"(?:(?:Subcommand|Group) '[^']*' )?does not accept (?:nested )?(?:option|key) '[^']+'"
    r"|Option '[^']+' is not accepted"
)


def explain_unknown(line: str, key: str) -> str:
    """Returns a parser's line about an option that does not exist, with the plain name of the option. Pure.

    Example:
        >>> explain_unknown("Subcommand 'fit' does not accept option 'data.corpora'", "data.corpora")
        'unknown key data.corpora'
    """
    return _UNKNOWN.sub(f"unknown key {key}", line)


def explain_types(line: str) -> str:
    """Returns a parser's line; if it is about a value's type, the option, the value, and what to give. Pure.

    Example:
        >>> explain_types('Parser key "data.seq_len": Expected a <class \\'int\\'>. Got value: many')
        'data.seq_len is many: give a whole number'
    """
    refusal = find_refusal(line)
    if refusal is not None:
        return refusal
    line = _ITEM.sub(_name_item, _TAIL.sub("", line))
    if _NESTED.search(line):
        return _NO_FILE.sub(lambda found: f"{found['path']} is no" if found["other"] else "", line)
    return _CLASS.sub(_explain_class, _SEVERAL.sub(_explain_several, _ONE.sub(_explain_one, line)))


def explain_value(name: str, value: str, types: Sequence[str]) -> str:
    """Returns what `explain_types` returns for an option's value that none of its types takes."""
    kinds = list(types)
    return _explain(name, value or repr(""), kinds) if len(kinds) == 1 else _explain(name, repr(value), kinds)


def _name_item(found: re.Match[str]) -> str:
    return f"{found['outer']}: " if found["key"] is None else f'Parser key "{found["outer"]}.{found["key"]}": '


def _explain_one(found: re.Match[str]) -> str:
    return _explain(found["key"], found["value"] or repr(""), [found["type"]])


def _explain_several(found: re.Match[str]) -> str:
    without_class = _WITHOUT_CLASS.fullmatch(found["value"])
    if without_class is not None:
        option = f"{found['key']}.{without_class['key']}"
        return f"{option} is an option of a class, and {found['key']} has none: give --{found['key']} CLASS before it"
    value = repr(found["value"]) if found["given"] == "str" else found["value"]
    return _explain(found["key"], value, _split(found["types"]))


def _explain(name: str, value: str, types: Sequence[str]) -> str:
    kinds = dict.fromkeys(map(_describe, types))
    if "a number" in kinds:  # Python's order of the two varies with what was imported before
        kinds.pop("a whole number", None)
    # What an option is without a value comes last.
    words = " or ".join(sorted(kinds, key="null".__eq__))
    return f"{name} is {value}: give {words}{_REMEDIES.get(name, '')}"


def _explain_class(found: re.Match[str]) -> str:
    value = found["value"] or found["path"]
    what = f"the options of {found['class']}, each on a line of its own as 'name: value'"
    return f"{found['key']} is {value}: give {what}" if value else f"{found['key']}: give {what}"


def _describe(kind: str, *, is_plural: bool = False) -> str:
    """Returns the words for a type as Python writes it."""
    name = kind.removeprefix("<class '").removesuffix("'>")
    if name in _WORDS:
        return _WORDS[name][is_plural]
    if name.startswith("typing.Literal["):
        return f"one of {name.removeprefix('typing.Literal[').removesuffix(']').replace(chr(39), '')}"
    inner = _LISTS.fullmatch(name)
    if inner is not None:
        return f"{'lists' if is_plural else 'a list'} of {_describe(inner['inner'], is_plural=True)}"
    inner = _MAPPINGS.fullmatch(name)
    if inner is not None:
        return f"{'mappings' if is_plural else 'a mapping'} of names to {_describe(inner['inner'], is_plural=True)}"
    return f"the options of {name.rpartition('.')[2]}"


def _split(types: str) -> list[str]:
    """Returns the types in a list of types, of which some have commas in brackets."""
    parts, depth = [""], 0
    for character in types:
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def hint_key(wanted: str, known: Sequence[str]) -> str:
    """Returns the key nearest to `wanted`; without a near one, the options of a class if there are only a few."""
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; the options are {', '.join(known)}" if len(known) <= _FEW_KEYS else ""


def known_keys(parser: argparse.ArgumentParser) -> set[str]:
    """Returns every option of `parser` and of its subcommands, as dotted keys."""
    keys: set[str] = set()
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for child in action.choices.values():
                keys |= known_keys(child)
        elif action.dest:
            keys.add(action.dest)
    return keys
