"""Checks and notes for a recipe of `genesis fit` beside those of the parser and of Lightning's Trainer."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info

from genesis.base.errors import UserError
from genesis.base.run_directory import RunDirectory
from genesis.huggingface.shape import find_family
from genesis.model.decoder import DecoderConfig
from genesis.train.csv_log import CSVLog
from genesis.train.recipe_policy import RECIPE_POLICY, unify_recipe
from genesis_callbacks.checkpoint.drift import compare_mappings

SECTIONS: Final = ("trainer", "model", "data", "checkpoint", "counters", "schedule", "verification", "telemetry")
"""The parts of a recipe that hold options."""


def explain_devices(devices: Any, error: TypeError) -> UserError:
    """Returns the mistake behind an error of an accelerator that cannot use the number of devices.

    Raises:
        TypeError: The error is about something else.
    """
    if "devices" not in str(error):
        raise error
    return UserError(f"trainer.devices is {devices!r}: {error}")


def report_other_choices(recipe: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    """Logs with which float8 and attention a checkpoint is validated, where it was trained with others.

    Args:
        recipe: The recipe of the validation, resolved.
        restored: The recipe in the checkpoint.
    """
    model, trained = recipe["model"], restored.get("model")
    if not isinstance(trained, Mapping):
        return
    for key in ("float8", "attention"):
        if key in trained and trained[key] != model[key]:
            rank_zero_info(
                f"validates with model.{key} {json.dumps(model[key])}; the checkpoint was trained with "
                f"{json.dumps(trained[key])}: give --model.{key} to validate with that"
            )


def check_same_model(recipe: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    """Refuses to validate a checkpoint with another model than the trained one. Of the shape, only dropout may differ.

    Args:
        recipe: The recipe of the validation, resolved.
        restored: The recipe in the checkpoint.

    Raises:
        UserError: A key of `model.decoder` differs: the weights would not fit, or would compute another function.
    """
    now, before = (unify_recipe(each).get("model") for each in (recipe, restored))
    if not isinstance(now, Mapping) or not isinstance(before, Mapping) or "decoder" not in before:
        return
    found = [
        f"{key} is {value!r} and was {was!r}"
        for key, was, value in compare_mappings(before["decoder"], now["decoder"], "model.decoder")
        if RECIPE_POLICY.kind_of(key) == "never"
    ]
    if found:
        raise UserError(
            f"the checkpoint was trained with another model: {', '.join(found)}; validate with the options of the "
            "training, which are in the run's config.yaml: --config RUN/config.yaml"
        )


def report_export(config: DecoderConfig) -> None:
    """Logs before a run begins if its model will not be exported for transformers."""
    try:
        find_family(config)
    except UserError as error:
        rank_zero_info(f"the model of this run cannot be exported for transformers: {error}")


def is_reward_code_allowed(arguments: Sequence[str]) -> bool:
    """Returns whether the arguments themselves, and not a recipe among them, allow the reward function."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--allow_reward_code", default="false")
    return str(parser.parse_known_args(list(arguments))[0].allow_reward_code).lower() in ("true", "yes", "1")


def place_run(run_dir: str, fork: str | None) -> str:
    """Returns the directory of a run: `run_dir`, or next to it under the name of the fork."""
    return run_dir if fork is None else str(Path(run_dir).parent / fork)


def list_loggers(configured: Any, run_dir: Path) -> list[Logger] | bool:
    """Returns the run's CSV log and the configured loggers; False switches all logging off."""
    if configured is False:
        return False
    others = [] if configured in (None, True) else configured if isinstance(configured, list) else [configured]
    return [CSVLog(RunDirectory(run_dir).metrics), *others]
