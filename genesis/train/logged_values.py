"""Logs metrics through Lightning exactly, in the right step, and each value once."""

from collections.abc import Mapping

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

_STEP = "step"
_BATCH_END = "on_train_batch_end"


def log_exactly(module: pl.LightningModule, values: Mapping[str, float]) -> None:
    """Logs `values` in float64, in training under the number of steps done. Call it in a hook of Lightning's."""
    # Lightning would make a number a float32. Its own count of steps for the loggers is one behind.
    exact = {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()}
    if module.trainer.state.fn == TrainerFn.FITTING:
        exact[_STEP] = torch.tensor(float(module.trainer.global_step), dtype=torch.float64)
    module.log_dict(exact, batch_size=1)


def is_log_step(trainer: pl.Trainer) -> bool:
    """Returns whether `log_every_n_steps` divides the number of steps; with 0 it never does."""
    every: int = vars(trainer)["log_every_n_steps"]  # a public attribute without an annotation in Lightning
    return every > 0 and trainer.global_step % every == 0


def read_logged(trainer: pl.Trainer) -> dict[str, float]:
    """Returns what the hooks at the end of this batch have logged so far, without the number of steps."""
    results = trainer._results  # private: Lightning's public dictionary also holds values of earlier steps
    assert results is not None
    logged = results.metrics(on_step=True)["log"]
    return {name: value.item() for name, value in logged.items() if name != _STEP}


def forget_logged(trainer: pl.Trainer) -> None:
    """Keeps Lightning from logging again what earlier batches logged at their ends. Call it at a batch's start.

    Lightning keeps every value that a step has logged, and passes all of them to the loggers whenever it logs. An old
    value would therefore appear in a step that did not log it.
    """
    results = trainer._results  # private: Lightning has no public way to remove a value
    assert results is not None
    for logged in results.values():
        if logged.meta.fx == _BATCH_END and not logged.meta.on_epoch:
            logged.has_reset = True  # until it is logged again


def align_log_steps(trainer: pl.Trainer) -> None:
    """Makes Lightning log in the steps whose number `log_every_n_steps` divides. Call it at a batch's start.

    Lightning decides by a count of its own, which is one too high in a run that resumes from a save made at an
    exception or at the end of training.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step  # private: no public way to set it
