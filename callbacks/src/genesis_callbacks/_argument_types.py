"""Refuses arguments of a wrong type or choice by name, with the value and what is allowed."""

import difflib
import functools
import inspect
import numbers
import os
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
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

_NAMED = "left out: checkpoints are named step-XXXXXXXX"
_SMALLER_OR_LARGER = ("min", "max")
_Ours = dict[str, Any]
"""Our arguments, by name."""


def checking(initialize: Callable[Concatenate[_Owner, _Given], None]) -> Callable[Concatenate[_Owner, _Given], None]:
    """Makes an `__init__` raise a `TypeError` in one line for an argument that does not have the type of its hint."""

    def checked(self: _Owner, /, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
        check_types(type(self).__name__, initialize, args, kwargs)
        initialize(self, *args, **kwargs)

    functools.update_wrapper(checked, initialize)  # so that signatures and help show the arguments
    return checked


def check_types(owner: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks arguments of a method by its hints; what a hint leaves open is not checked.

    Raises:
        TypeError: An argument has another type.
        ValueError: A text is none of the choices of its hint.
    """
    names = list(inspect.signature(function).parameters)[1:]
    hints = get_type_hints(function)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        hint = hints.get(name, Any)
        if not _is_allowed(value, hint):
            shown = repr(value)
            shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
            raise TypeError(f"{owner}: {name} is {shown}: give {_describe(hint)}")
        choices = [text for each in (hint, *get_args(hint)) if get_origin(each) is Literal for text in get_args(each)]
        if choices and isinstance(value, str) and value not in choices:
            raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")


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


def _keep_best(value: Any, given: Mapping[str, Any]) -> _Ours:
    if value == -1:
        return {"keep_last": None}
    return {"keep_best": value} if given.get("monitor") is not None else {"keep_last": value}


def _minutes(value: Any, given: Mapping[str, Any]) -> _Ours:
    return {"every_n_minutes": value.total_seconds() / 60.0 if isinstance(value, timedelta) else value}


def _renamed(name: str) -> Callable[[Any, Mapping[str, Any]], _Ours]:
    return lambda value, given: {name: value}


_THEIRS: dict[str, Callable[[Any, Mapping[str, Any]], _Ours] | str] = {
    "dirpath": _renamed("run_dir"),
    "filename": _NAMED,
    "verbose": "left out: each save is an event in run_dir/events",
    "save_last": "left out: the newest are kept by keep_last, and ckpt_path='last' takes the newest",
    "save_top_k": _keep_best,
    "save_weights_only": lambda value, given: {"save_optimizer": not value},
    "mode": _renamed("monitor_mode"),
    "auto_insert_metric_name": _NAMED,
    "every_n_train_steps": _renamed("every_n_steps"),
    "train_time_interval": _minutes,
    "save_on_train_epoch_end": "left out: every_n_epochs saves after the last step of an epoch",
    "enable_version_counter": _NAMED,
}
"""An argument of `ModelCheckpoint` that is not ours, and what it becomes, or why it has no counterpart."""


def _is_theirs(name: str, value: Any) -> bool:
    # Our `mode` says who writes a checkpoint.
    return name in _THEIRS and (name != "mode" or value in _SMALLER_OR_LARGER)


def explain(owner: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> str | None:
    """Returns the message for arguments that are not `owner`'s, with the line to write instead; None if all are.

    Args:
        owner: Name of the class.
        given: The arguments by name.
        known: The names that `owner` has.
    """
    theirs = {name: value for name, value in given.items() if _is_theirs(name, value)}
    unknown = [name for name in given if name not in known and name not in theirs]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its arguments are {', '.join(known)}"
        return f"{owner} has no argument {unknown[0]!r}: {hint}"
    if not theirs:
        return None
    # `keep_best` needs a monitor, so what one argument becomes may depend on the others.
    ours: _Ours = {name: value for name, value in given.items() if name not in theirs}
    rows = []
    for name, value in theirs.items():
        rule = _THEIRS[name]
        became = {} if isinstance(rule, str) else rule(value, given)
        ours |= became
        text = rule if isinstance(rule, str) else ", ".join(f"{key}={item!r}" for key, item in became.items())
        rows.append((f"{name}={value!r}", text))
    if ours.get("keep_last") == 0:
        return f"save_top_k=0 saves nothing: leave {owner} out of the callbacks"
    ours = {"run_dir": "runs/mine", **ours}  # which has to be given
    width = max(len(left) for left, _ in rows)
    table = "".join(f"\n  {left:<{width}}  ->  {right}" for left, right in rows)
    line = ", ".join(f"{key}={value!r}" for key, value in ours.items())
    return f"these are arguments of Lightning's ModelCheckpoint; in {owner} they are:{table}\nwrite: {owner}({line})"


def explaining(
    initialize: Callable[Concatenate[_Owner, _Given], None],
) -> Callable[Concatenate[_Owner, _Given], None]:
    """Makes an `__init__` with keyword arguments alone raise a `TypeError` that explains what it does not have."""
    known = {name: None for name in inspect.signature(initialize).parameters if name != "self"}
    initialize_checked = checking(initialize)

    def explained(self: _Owner, /, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
        owner = type(self).__name__
        if args:
            raise TypeError(f"{owner} takes its arguments by name: {owner}(run_dir={args[0]!r}, ...)")
        message = explain(owner, kwargs, known)
        if message is not None:
            raise TypeError(message)
        initialize_checked(self, *args, **kwargs)

    functools.update_wrapper(explained, initialize)
    return explained
