"""When callbacks log, and how: exact values, in the steps whose number `log_every_n_steps` divides."""

from collections.abc import Mapping

import lightning.pytorch as pl
import torch

from ._compat import log_step_values


def is_log_step(trainer: pl.Trainer) -> bool:
    """Returns whether Lightning logs at the end of the current batch."""
    every = vars(trainer)["log_every_n_steps"]  # a public attribute that Lightning's annotations leave out
    return every > 0 and (trainer.global_step % every == 0 or trainer.should_stop)


def log_exact(pl_module: pl.LightningModule, values: Mapping[str, float]) -> None:
    """Logs values of one step in float64. It neither communicates nor waits for the device."""
    # Lightning would make a number a float32 on the device: inexact from 2**24 on, and a wait for the device.
    log_step_values(pl_module, {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()})
