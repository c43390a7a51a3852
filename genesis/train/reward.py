"""The reward function of a recipe: a user's Python code, which runs only where the command line allows it.

    def reward(messages, text, columns):
        return 1.0 if text.strip() == columns["answer"] else 0.0

`messages` is the prompt as a list of messages, `text` the answer without the token that ended it, and `columns` a dict
of the other fields of the prompt's record. The result is a finite number. The function must give the same number for
the same arguments, or a resumed run differs from one that was never stopped.
"""

import copy
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from genesis.base.errors import UserError
from genesis.data.prompts import Prompt

_MAX_REASON = 300
_LARGEST = 3e38
"""Rewards are summed in float32 for the log."""
_REMEDY = "give module:function or file.py:function by data.prompts.reward"


class Reward:
    """Scores answers by a user's function.

    Args:
        name: The function as the recipe names it.
        function: The function.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function = name, function

    def score(self, prompt: Prompt, text: str, number: int) -> float:
        """Returns the reward of an answer.

        Args:
            prompt: The prompt.
            text: The answer.
            number: The number of the answer among those to this prompt, from 1, for messages.

        Raises:
            UserError: The function fails, or its result is not a finite number; the message names the prompt's row.
        """
        where = f"answer {number} to {prompt.place}"
        try:
            # Copies, because a function that changes its arguments would change the rewards of later answers.
            # Gradients are off again after a function that turns them on, for a model of its own.
            with torch.no_grad():
                value = self._function(copy.deepcopy(list(prompt.messages)), text, copy.deepcopy(dict(prompt.columns)))
        except (Exception, SystemExit) as error:
            reason = _describe(error)
            raise UserError(f"the reward function {self.name} failed for {where}: {reason}; correct it") from error
        # An array of one element is not a number either: it would hide a wrong shape.
        if not isinstance(value, Real):
            raise UserError(f"the reward function {self.name} gave {_spell(value)[:60]!r} for {where}; return a number")
        try:
            reward = float(value)
        except (OverflowError, ValueError):  # a whole number of hundreds of digits
            reward = math.inf
        if not abs(reward) <= _LARGEST:  # true for NaN
            raise UserError(
                f"the reward function {self.name} gave {reward:g} for {where}; return a finite number that fits float32"
            )
        return reward


def load_reward(name: str, *, is_allowed: bool) -> Reward:
    """Returns the reward function that a recipe names. Runs its module.

    Args:
        name: `module:function` or `file.py:function`; a file is relative to the working directory.
        is_allowed: Whether the command line allows it.

    Raises:
        UserError: The function is not allowed, or not found, or its module fails.
    """
    place, _, function_name = name.rpartition(":")
    if not place or not function_name.isidentifier():
        raise UserError(f"data.prompts.reward is {name!r}; {_REMEDY}")
    if not is_allowed:
        raise UserError(
            f"data.prompts.reward is {name!r}, Python code that runs with your rights, and a recipe may come from "
            "anyone: read the code, then allow it by --allow_reward_code true"
        )
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        reason = _describe(error)
        raise UserError(
            f"the module of the reward function {name} cannot be imported ({reason}); correct it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{place} has no function {function_name!r}; {_REMEDY}")
    return Reward(name, function)


def _describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {_spell(error)}".split())[:_MAX_REASON]


def _spell(value: object) -> str:
    """Returns a value of the user's code as text; its own conversion may fail, too."""
    try:
        return str(value)
    except Exception:  # the code of a class of the user
        return f"<{type(value).__name__}>"


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"no such file: {path} (relative to {Path.cwd()})")
    module_name = f"_genesis_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None, "a file whose name ends in .py"
    assert spec.loader is not None, "a file whose name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickles of the module look it up there
    spec.loader.exec_module(module)
    return module
