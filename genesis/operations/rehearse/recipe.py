"""Reads the settings that a rehearsal needs from the resolved recipe."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from genesis.base.errors import UserError
from genesis.base.processes import run_program
from genesis.data.sizes import resolve_recipe as resolve_recipe_sizes

_OWN_OPTIONS = ("--run_dir", "--ckpt_path", "--print_config")


@dataclass(frozen=True)
class RehearsedRecipe:
    """The part of a resolved recipe that kills are planned from.

    Args:
        max_steps: The last step of the run.
        every_n_steps: Steps from one save to the next.
        seq_len: Tokens of a sequence.
    """

    max_steps: int
    every_n_steps: int
    seq_len: int


def check_extra(extra: Sequence[str]) -> None:
    """Refuses options that the rehearsal itself passes to its trainings.

    Raises:
        UserError: The arguments have such an option.
    """
    for word in extra:
        if word.partition("=")[0] in _OWN_OPTIONS:
            raise UserError(
                f"{word} is set by the rehearsal itself; remove it after -- (--dir sets the directory of both runs)"
            )


def resolve_recipe(fit: Sequence[str]) -> RehearsedRecipe:
    """Returns the settings of the recipe that `genesis fit` resolves from its arguments.

    Raises:
        UserError: `genesis fit` refuses the arguments, or the resulting run cannot be rehearsed.
    """
    command = [sys.executable, "-m", "genesis", *fit, "--print_config"]
    done = run_program(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(_read_complaint(done))
    return read_recipe(yaml.safe_load(done.stdout))


def read_recipe(resolved: Mapping[str, Any]) -> RehearsedRecipe:
    """Returns the settings of a resolved recipe that a rehearsal needs.

    Raises:
        UserError: The run has no last step, saves no checkpoint before its end, or has no log.
    """
    trainer, checkpoint = resolved["trainer"], resolved["checkpoint"]
    max_steps, every_n_steps = trainer["max_steps"] or -1, checkpoint["every_n_steps"]
    if max_steps < 1:
        raise UserError(f"trainer.max_steps is {max_steps}: a rehearsal needs an end; add -- --trainer.max_steps 60")
    if every_n_steps is None:
        raise UserError(
            "checkpoint.every_n_steps is not set: there would be no checkpoint to resume from; add "
            f"-- --checkpoint.every_n_steps {max(1, max_steps // 6)}"
        )
    if every_n_steps >= max_steps:
        raise UserError(
            f"checkpoint.every_n_steps is {every_n_steps} and trainer.max_steps {max_steps}: after every kill the run "
            f"would start from the beginning; add -- --checkpoint.every_n_steps {max(1, max_steps // 6)}, or more steps"
        )
    if trainer.get("logger") is False:
        raise UserError("trainer.logger is false: a rehearsal follows metrics.csv; add -- --trainer.logger null")
    data = resolve_recipe_sizes(resolved, resolved["model"]["decoder"]["max_seq_len"], num_ranks=1)["data"]
    return RehearsedRecipe(max_steps, every_n_steps, data["seq_len"])


def _read_complaint(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last_line = lines[-1] if lines else "no output"
    prefix = "genesis: error: "
    if last_line.startswith(prefix):
        return last_line.removeprefix(prefix)
    return f"`genesis fit --print_config` ended with status {done.returncode}: {last_line}"
