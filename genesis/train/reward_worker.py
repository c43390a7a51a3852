"""The process that runs a user's reward functions, one answer at a time: a `PipedWorker` of `genesis.train.reward`.

It receives its `sys.path` and the names of the functions, imports them, and answers with None or what is wrong. Then it
receives a function's number with the arguments of each call, and answers with a float or what is wrong. It imports
neither torch nor Lightning, unless the functions do.
"""

import importlib
import importlib.util
import io
import math
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from typing import Any, Final, NamedTuple

from genesis.base.processes import serve_pipe

_MAX_REASON: Final = 300
_MAX_VALUE: Final = 60
_LARGEST: Final = 3e38
"""Rewards are summed in float32 for the log."""


class Fault(NamedTuple):
    """What is wrong, as words of a message: before the place of the answer, and behind it."""

    what: str
    rest: str = ""


def load_function(name: str, *, kind: str = "function", what: str = "reward function") -> Callable[..., Any] | Fault:
    """Returns the function `module:function` or `file.py:function`, or why there is none. Runs its module.

    Args:
        name: The name.
        kind: What is looked for: a function, or a class.
        what: What it is for, for messages.
    """
    place, _, own_name = name.rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # of the user's code
        return Fault(f"the module of the {what} {name} cannot be imported ({describe_error(error)}); correct it")
    found: Callable[..., Any] | None = getattr(module, own_name, None)
    if not callable(found):
        option = f"data.prompts.{what.partition(' ')[0]}"
        return Fault(f"{place} has no {kind} {own_name!r}; name one by {option}")
    return found


def call_function(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float | Fault:
    """Returns the reward that a function gives, or what is wrong with it."""
    try:
        value = function(*arguments)
    except (Exception, SystemExit) as error:  # of the user's code
        return Fault("failed", f": {describe_error(error)}; correct it")
    return check_number(value)


def check_number(value: object) -> float | Fault:
    """Returns a reward as a float, or what is wrong with it."""
    # An array of one element is not a number either: it would hide a wrong shape.
    if not isinstance(value, Real):
        return Fault(f"gave {spell_value(value)!r}", "; return a number")
    try:
        reward = float(value)
    except (OverflowError, ValueError):  # a whole number of hundreds of digits
        reward = math.inf
    if not abs(reward) <= _LARGEST:  # true for NaN
        return Fault(f"gave {reward:g}", "; return a finite number that fits float32")
    return reward


def describe_error(error: BaseException) -> str:
    """Returns an error of the user's code as one line of limited length."""
    return " ".join(f"{type(error).__name__}: {_spell(error)}".split())[:_MAX_REASON]


def spell_value(value: object) -> str:
    """Returns the beginning of a value of the user's code as text."""
    return _spell(value)[:_MAX_VALUE]


def _spell(value: object) -> str:
    """Returns a value of the user's code as text; its own conversion may fail, too."""
    try:
        return str(value)
    except Exception:  # the code of a class of the user
        return f"<{type(value).__name__}>"


def _import_file(path: Path) -> Any:
    module_name = f"_genesis_reward_{path.resolve()}"
    if module_name in sys.modules:  # of another of its functions
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None, "a file whose name ends in .py"
    assert spec.loader is not None, "a file whose name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickles of the module look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def prepare_process() -> None:
    """Leaves the signals to a run to its ranks, and prints line by line."""
    # A signal to all processes of a run is for its ranks, which finish the step, and may need a reward for it.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the process ends by a signal, which would lose what is printed


def main(descriptor: int) -> None:
    """Loads the functions and calls them until the process at the other end is gone."""
    prepare_process()

    def serve(connection: "Connection[Any, Any]") -> None:
        sys.path[:], names = connection.recv()
        found = [load_function(name) for name in names]
        connection.send(next((one for one in found if isinstance(one, Fault)), None))
        while True:
            number, arguments = connection.recv()
            function = found[number]
            assert not isinstance(function, Fault), "the other end stops at a fault"
            connection.send(call_function(function, arguments))

    serve_pipe(descriptor, serve)
