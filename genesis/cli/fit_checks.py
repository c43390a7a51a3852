"""Checks and notes for a recipe of `genesis fit` beside those of the parser and of Lightning's Trainer."""

import json
from collections.abc import Mapping
from typing import Any, Final

from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_info

from genesis.errors import UserError
from genesis.huggingface.shape import find_family
from genesis.model.decoder import DecoderConfig

SECTIONS: Final = ("trainer", "model", "data", "checkpoint", "counters", "schedule", "verification", "telemetry")
"""The parts of a recipe that hold options."""


def check_trainer(trainer: Namespace) -> None:
    """Refuses options of the Trainer with which a run would fail late, or train wrongly.

    Raises:
        UserError: The limit of the gradient's norm is no limit, or the interval of the log is negative.
    """
    limit, every = trainer.get("gradient_clip_val"), trainer.get("log_every_n_steps")
    if limit is not None and not limit >= 0:  # nan is not
        raise UserError(f"trainer.gradient_clip_val is {limit:g}: give a norm above 0, or 0 to clip nothing")
    if every is not None and every < 0:
        raise UserError(f"trainer.log_every_n_steps is {every}: give a number of steps, or 0 to log nothing")


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


def report_export(config: DecoderConfig) -> None:
    """Logs before a run begins if its model will not be exported for transformers."""
    try:
        find_family(config)
    except UserError as error:
        rank_zero_info(f"the model of this run cannot be exported for transformers: {error}")
