"""Messages of jsonargparse in plain words: they have the names of the types of Python, and of its own parts.

Most mistakes in recipes are refused before (`genesis.cli.option_names`). This is for what only the real parser can
judge, and for the options of `genesis data` and `genesis tokenizer`.
"""

import argparse
import re
from collections.abc import Collection
from typing import Final

from genesis.recipe.imports import find_refusal
from genesis.recipe.options import hint_key
from genesis.recipe.values import explain_value

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
_UNKNOWN: Final = re.compile(
    r"(?:Subcommand '[^']*' |Group '(?P<group>[^']*)' )?does not accept (?:nested )?(?:option|key) '(?P<key>[^']+)'"
    r"|Option '(?P<option>[^']+)' is not accepted"
)
_UNRECOGNIZED: Final = re.compile(r"[Uu]nrecognized arguments: --(?P<option>[^=\s]+)")
_OPTIONAL: Final = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: (?:(?!Errors: ).)*"
    r"Errors: - Expected a <class '(?:NoneType|str)'> - "
    r"(?P<reason>(?!Expected a )(?:(?!Errors: ).)+?) Given value type: .*"
)
"""The text around the error of an optional section, such as model.objective, or of a class that may be given by its
name alone, such as trainer.strategy."""
_REQUIRED: Final = re.compile(r"(?<=arguments are required: ).*")
_SUBCOMMAND: Final = re.compile(r"(?:^|(?<=, ))(?:fit|validate)\.")
"""The prefix that jsonargparse writes before the name of a missing option; no user writes it."""


def explain_error(line: str, known: Collection[str]) -> str:
    """Returns a parser's line in plain words, with the nearest key where an option does not exist. Pure.

    Args:
        line: The line.
        known: The dotted names of the options.

    Example:
        >>> explain_error("Subcommand 'fit' does not accept option 'data.sede'", ["data.seed"])
        "unknown key data.sede; did you mean 'data.seed'?"
    """
    found = _UNKNOWN.search(line) or _UNRECOGNIZED.search(line)
    line = explain_types(_REQUIRED.sub(lambda missing: _SUBCOMMAND.sub("", missing[0]), line))
    if found is None:
        return line
    parts = found.groupdict()
    key = ".".join(part for part in (parts.get("group"), parts.get("key") or parts.get("option")) if part)
    return _UNKNOWN.sub(f"unknown key {key}", line) + hint_key(key, sorted(known))


def explain_types(line: str) -> str:
    """Returns a parser's line; if it is about a value's type, the option, the value, and what to give. Pure.

    Example:
        >>> explain_types('Parser key "data.seq_len": Expected a <class \\'int\\'>. Got value: many')
        'data.seq_len is many: give a whole number'
    """
    refusal = find_refusal(line)
    if refusal is not None:
        return refusal
    line = _ITEM.sub(_name_item, _TAIL.sub("", _OPTIONAL.sub(r"\g<reason>", line)))
    if _NESTED.search(line):
        return _NO_FILE.sub(lambda found: f"{found['path']} is no" if found["other"] else "", line)
    return _CLASS.sub(_explain_class, _SEVERAL.sub(_explain_several, _ONE.sub(_explain_one, line)))


def _name_item(found: re.Match[str]) -> str:
    return f"{found['outer']}: " if found["key"] is None else f'Parser key "{found["outer"]}.{found["key"]}": '


def _explain_one(found: re.Match[str]) -> str:
    return explain_value(found["key"], found["value"] or repr(""), [found["type"]])


def _explain_several(found: re.Match[str]) -> str:
    without_class = _WITHOUT_CLASS.fullmatch(found["value"])
    if without_class is not None:
        option = f"{found['key']}.{without_class['key']}"
        return f"{option} is an option of a class, and {found['key']} has none: give --{found['key']} CLASS before it"
    value = repr(found["value"]) if found["given"] == "str" else found["value"]
    return explain_value(found["key"], value, _split(found["types"]))


def _explain_class(found: re.Match[str]) -> str:
    value = found["value"] or found["path"]
    what = f"the options of {found['class']}, each on a line of its own as 'name: value'"
    return f"{found['key']} is {value}: give {what}" if value else f"{found['key']}: give {what}"


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
