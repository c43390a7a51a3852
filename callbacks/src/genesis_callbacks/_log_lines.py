"""What callbacks share: when and how they log, and versions of their states."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from ._compat import log_step_values
from .base.errors import UserError


def is_log_step(trainer: pl.Trainer) -> bool:
    """Returns whether Lightning logs at the end of the current batch."""
    every = vars(trainer)["log_every_n_steps"]  # a public attribute that Lightning's annotations leave out
    return every > 0 and (trainer.global_step % every == 0 or trainer.should_stop)


def log_exact(pl_module: pl.LightningModule, values: Mapping[str, float]) -> None:
    """Logs values of one step in float64. It neither communicates nor waits for the device."""
    # Lightning would make a number a float32 on the device: inexact from 2**24 on, and a wait for the device.
    log_step_values(pl_module, {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()})


def check_version(state: Mapping[str, Any], version: int, subject: str) -> None:
    """Refuses a callback's state in a checkpoint that another release wrote in another form.

    Args:
        state: The state, with its version.
        version: The version that this release reads.
        subject: Subject and verb of the message, such as "the checkpoint's throughput has".

    Raises:
        UserError: The state has another version.
    """
    if state["version"] != version:
        raise UserError(
            f"{subject} version {state['version']}, this release reads {version}: resume with the genesis-callbacks "
            "that wrote it"
        )
