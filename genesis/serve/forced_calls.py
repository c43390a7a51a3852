"""Grammars of calls whose arguments are no JSON: in tags, as Qwen3-Coder and GLM write them, or as Python.

A value in tags is JSON of its schema, or a text up to the next tag where the schema asks for a string. A value of
Python is a literal. Arguments come in the order of the tool's schema. What a form cannot hold to is refused by name.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from genesis.chat.tools import ToolForm, Tools, find_symbols
from genesis.generate.grammar import write_schema, write_words
from genesis.serve.fields import refuse
from genesis.tokenizer.tokenizer import Tokenizer

CallWriter = Callable[[int, str, Mapping[str, Any]], list[str]]
"""The rules of a call without its signs, of which one is `body_INDEX`, from a tool's index, name, and schema."""

_NOTES: Final = {"title", "description", "default", "examples", "$schema", "deprecated"}
_LITERALS: Final = {
    "integer": r"/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
    "string": r'/"([^"\\\x00-\x1f]|\\["\\nrt])*"/',
    "boolean": '("True" | "False" | "true" | "false")',
    "null": '("None" | "null")',
}
_KEYS: Final[Mapping[Any, Sequence[str]]] = {
    **dict.fromkeys(_LITERALS, ()),
    "array": ("items",),
    "object": ("properties", "required", "additionalProperties"),
}
"""The types of values, and what a schema may have beside them."""
_MAX_DEPTH: Final = 8
_LINE: Final = "\n"


def write_function_tags(index: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Returns the rules of `<function=NAME>` with `<parameter=KEY>`, as Qwen3-Coder and Qwen3.5 write it."""
    call, rules = _write_tags(index, name, schema, "<parameter={}>\n", "\n", "</parameter>")
    return [" ".join([f"body_{index}:", _quote(f"\n<function={name}>\n"), *call, _quote("</function>\n")]), *rules]


def write_keyed_tags(index: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Returns the rules of a name before `<arg_key>` and `<arg_value>`, as GLM writes it."""
    call, rules = _write_tags(index, name, schema, "<arg_key>{}</arg_key>\n<arg_value>", "", "</arg_value>")
    return [" ".join([f"body_{index}:", _quote(f"{name}\n"), *call]), *rules]


def write_python(index: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Returns the rules of a call of Python with names of arguments, as OLMo 3 writes it."""
    values = _PythonValues(f"value_{index}")
    parts = []
    for key, of_key, is_required in _list_properties(name, schema):
        if not key.isidentifier():
            _refuse(name, key, "whose name is no name of Python")
        parts.append((_quote(f"{key}="), values.add(name, key, of_key), is_required))
    first = f"first_{index}_0" if parts else ""
    return [f'body_{index}: {_quote(name + "(")} {first} ")"', *_list_joins(str(index), parts), *values.rules]


def write_python_list(index: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Returns the rules of a list of one call of Python, as LFM2 writes it."""
    first, *others = write_python(index, name, schema)
    rule, _, body = first.partition(": ")
    return [f'{rule}: "[" {body} "]"', *others]


def _write_tags(
    index: int, name: str, schema: Mapping[str, Any], before: str, lead: str, close: str
) -> tuple[list[str], list[str]]:
    """Returns the parts of a call in which each argument stands between its own signs, and the rules of its values."""
    call, rules = list[str](), list[str]()
    for number, (key, of_key, is_required) in enumerate(_list_properties(name, schema)):
        rule = f"value_{index}_{number}"
        choices = _list_choices(name, key, of_key)
        if choices and all(isinstance(one, str) for one in choices):
            rules.append(f"{rule}: {write_words([one + lead + close for one in choices])}")
        elif of_key.get("type") == "string":
            _check_keys(name, key, of_key, {"type"})
            rules.append(f"{rule}[suffix={json.dumps(close)}]: /(?s:.*)/")
        else:
            rules.append(f"{rule}: {rule}_json {_quote(lead + close)}")
            rules.append(f"{rule}_json: {write_schema(of_key)}")
        part = f"{_quote(before.replace('{}', key))} {rule} {_quote(_LINE)}"
        call.append(part if is_required else f"({part})?")
    return call, rules


def _list_properties(name: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yields the name, the schema, and whether it is required, of each argument."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not (isinstance(properties, Mapping) and isinstance(required, list)):
        refuse("tools", f"has parameters of {name} that are no JSON schema: properties are an object, required a list")
    unknown = schema.keys() - _NOTES - {"type", "properties", "required", "additionalProperties"}
    missing = [key for key in required if key not in properties]
    if unknown or missing:
        shown = ", ".join(map(str, sorted(unknown) or missing))
        refuse("tools", f"has {shown} in the parameters of {name}, which calls of this model's form cannot be held to")
    for key, of_key in properties.items():
        yield key, of_key if isinstance(of_key, Mapping) else {}, key in required


def _check_keys(name: str, key: str, schema: Mapping[str, Any], known: set[str]) -> None:
    unknown = schema.keys() - _NOTES - known
    if unknown:
        _refuse(name, key, f"with {', '.join(sorted(unknown))}")


def _list_choices(name: str, key: str, schema: Mapping[str, Any]) -> list[Any]:
    """Returns the values that a schema lists; none if it lists none."""
    return [schema["const"]] if "const" in schema else _read_list(name, key, schema["enum"]) if "enum" in schema else []


def _read_list(name: str, key: str, value: Any) -> list[Any]:
    return value if isinstance(value, list) and value else _refuse(name, key, "with an empty list or none")


def _refuse(name: str, key: str, problem: str) -> NoReturn:
    refuse("tools", f"has the argument {key} of {name} {problem}, to which this model's form of calls cannot be held")


def _list_joins(name: str, parts: Sequence[tuple[str, str, bool]]) -> list[str]:
    """Returns rules for the arguments from each one on: `first` where none has come, `next` with a comma before it.

    Args:
        name: What the names of the rules have behind `first` or `next`, and before the number of an argument.
        parts: The key, the rule of the value, and whether it is required, of each argument.
    """
    rules = []
    for number, (key, value, is_required) in enumerate(parts):
        last = number + 1 == len(parts)
        follow = "" if last else f" next_{name}_{number + 1}"
        skip = '""' if last else f"first_{name}_{number + 1}"
        rules.append(f"first_{name}_{number}: {key} {value}{follow}" + ("" if is_required else f" | {skip}"))
        if number:
            skip = '""' if last else f"next_{name}_{number + 1}"
            rules.append(f'next_{name}_{number}: ", " {key} {value}{follow}' + ("" if is_required else f" | {skip}"))
    return rules


class _PythonValues:
    """Rules of literals of Python.

    Args:
        prefix: With what the names of the rules begin.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.rules: list[str] = []

    def add(self, name: str, key: str, schema: Mapping[str, Any], depth: int = 0) -> str:
        """Returns the name of a rule for values of a schema, after adding it.

        Raises:
            ApiError: The schema has what a literal cannot be held to.
        """
        if depth > _MAX_DEPTH:
            _refuse(name, key, f"with more than {_MAX_DEPTH} levels")
        rule = f"{self._prefix}_{len(self.rules)}"
        place = len(self.rules)
        self.rules.append("")
        self.rules[place] = f"{rule}: {self._write_body(name, key, schema, depth)}"
        return rule

    def _write_body(self, name: str, key: str, schema: Mapping[str, Any], depth: int) -> str:
        kind = schema.get("type")
        choices = _list_choices(name, key, schema)
        if choices:
            _check_keys(name, key, schema, {"type", "enum", "const"})
            return write_words([_write_literal(one) for one in choices])
        inner = partial(self._add_inner, name, key, depth=depth + 1)
        if "anyOf" in schema:
            _check_keys(name, key, schema, {"anyOf"})
            return " | ".join(map(inner, _read_list(name, key, schema["anyOf"])))
        if isinstance(kind, list):
            return " | ".join(inner({**schema, "type": one}) for one in _read_list(name, key, kind))
        if not isinstance(kind, str) or kind not in _KEYS:
            _refuse(name, key, "without a known type")
        _check_keys(name, key, schema, {"type", *_KEYS[kind]})
        if kind == "array":
            item = inner(schema.get("items"))
            return f'"[" ({item} (", " {item})*)? "]"'
        if kind == "object":
            return self._write_object(name, key, schema, inner)
        return _LITERALS[kind]

    def _write_object(self, name: str, key: str, schema: Mapping[str, Any], inner: Callable[[Any], str]) -> str:
        given, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(given, Mapping) or not (given or schema.get("additionalProperties") is False):
            _refuse(name, key, "with an object without properties")
        if not isinstance(required, list) or any(one not in given for one in required):
            _refuse(name, key, "with required properties that it does not have")
        parts = [(_quote(_write_literal(one) + ": "), inner(of), one in required) for one, of in given.items()]
        if not parts:
            return '"{}"'
        joins = f"{self._prefix}_{len(self.rules)}"
        self.rules += _list_joins(joins, parts)
        return f'"{{" first_{joins}_0 "}}"'

    def _add_inner(self, name: str, key: str, schema: Any, *, depth: int) -> str:
        return self.add(name, key, schema if isinstance(schema, Mapping) else {}, depth)


def _write_literal(value: Any) -> str:
    """Returns a value as Python and as JSON has it; strings in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_WRITERS: Final[Mapping[str, CallWriter]] = {
    "function_tags": write_function_tags,
    "keyed_tags": write_keyed_tags,
    "python": write_python,
    "python_list": write_python_list,
}
"""By the names in `genesis.chat.tools`."""


def write_choice(form: ToolForm, tools: Tools, tokenizer: Tokenizer | None) -> str:
    """Returns a grammar of one call of one of the tools, as the family writes it.

    Args:
        form: How the model writes calls.
        tools: The tools that may be called.
        tokenizer: The tokenizer of the model, which may have control symbols for the signs of the form.

    Raises:
        ApiError: The arguments of a tool have what the form cannot be held to.
    """
    ids = {piece: token for token, piece in find_symbols(form, tokenizer).items()}
    begin, end = ("", "") if form.is_bare else (form.begin, form.end or "")
    lines = ["start: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, (name, schema) in enumerate(tools.items()):
        if isinstance(form.forced, str):
            lines += [f"call_{index}: {_write_text(begin, ids)} body_{index} {_write_text(end, ids)}"]
            lines += _WRITERS[form.forced](index, name, schema)
            continue
        before, behind = form.forced
        opening = begin + before.replace("NAME", json.dumps(name, ensure_ascii=False)[1:-1])
        lines += [f"call_{index}: {_write_text(opening, ids)} given_{index} {_write_text(behind + end, ids)}"]
        lines += [f"given_{index}: {write_schema(schema)}"]
    return "\n".join(lines)


def _write_text(text: str, ids: Mapping[str, int]) -> str:
    """Returns a text as a part of a grammar, in which control symbols stand by their ids."""
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    written = [f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False) for part in parts if part]
    return " ".join(written)
