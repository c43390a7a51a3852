"""Explains arguments of Lightning's `ModelCheckpoint` that `AsyncProcessCheckpoint` is given: what to write instead."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

from ._argument_types import check_types

_Owner = TypeVar("_Owner")
_Given = ParamSpec("_Given")

_NAMED = "left out: checkpoints are named step-XXXXXXXX"
_SMALLER_OR_LARGER = ("min", "max")

_Ours = dict[str, Any]
"""Our arguments, by name."""


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

    def checked(self: _Owner, /, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
        owner = type(self).__name__
        if args:
            raise TypeError(f"{owner} takes its arguments by name: {owner}(run_dir={args[0]!r}, ...)")
        message = explain(owner, kwargs, known)
        if message is not None:
            raise TypeError(message)
        check_types(owner, initialize, args, kwargs)
        initialize(self, *args, **kwargs)

    functools.update_wrapper(checked, initialize)  # so that signatures and help show the arguments
    return checked
