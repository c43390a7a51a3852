"""Refuses arguments of a wrong type by name, with the value and what is allowed, where Python would fail later."""

import functools
import inspect
import numbers
import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

_Owner = TypeVar("_Owner")
_Given = ParamSpec("_Given")

_MAX_SHOWN = 200
_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    Path: "a path",
    types.NoneType: "None",
}


def checking(initialize: Callable[Concatenate[_Owner, _Given], None]) -> Callable[Concatenate[_Owner, _Given], None]:
    """Makes an `__init__` raise a `TypeError` in one line for an argument that does not have the type of its hint."""

    def checked(self: _Owner, /, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
        check_types(type(self).__name__, initialize, args, kwargs)
        initialize(self, *args, **kwargs)

    functools.update_wrapper(checked, initialize)  # so that signatures and help show the arguments
    return checked


def check_types(owner: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks arguments of a method by its hints; what a hint leaves open is not checked, nor are choices of texts.

    Raises:
        TypeError: An argument has another type.
    """
    names = list(inspect.signature(function).parameters)[1:]
    hints = get_type_hints(function)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        hint = hints.get(name, Any)
        if not _is_allowed(value, hint):
            shown = repr(value)
            shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
            raise TypeError(f"{owner}: {name} is {shown}: give {_describe(hint)}")


def _is_allowed(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_is_allowed(value, each) for each in inner)
    if origin is Literal:
        return isinstance(value, str)
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    if hint is Path:
        return isinstance(value, os.PathLike)
    kind = origin or hint
    if kind is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return not isinstance(kind, type) or isinstance(value, kind)


def _describe(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        *words, last = dict.fromkeys(map(_describe, inner))
        return f"{', '.join(words)} or {last}" if words else last
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is Sequence:
        return f"a list of {'texts' if inner == (str,) else 'values'}"
    if origin in (Mapping, dict):
        return "a mapping"
    if origin is Callable or hint is Callable:
        return "a function"
    return _WORDS.get(hint, f"a {getattr(origin or hint, '__name__', hint)}")
