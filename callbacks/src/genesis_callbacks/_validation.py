"""How a fit validates: with training's generators kept, again after a save before it, not when a signal ends it.

It replaces methods of Lightning's loop by attributes on it, with a test. It does not communicate.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

_VALIDATES = ("run", "increment_progress_to_evaluation_end")


def shield_validation(
    trainer: Any,
    shield: Callable[[], AbstractContextManager[None]],
    *,
    validates_restored: bool = True,
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Makes a fit's validation run within `shield()`, by attributes on its loop.

    Lightning validates whenever a fit stops early. Who stops it by a signal waits for the save alone (`is_stopped`).

    A run that resumes from a save before a validation validates first. Lightning would only count that validation, by
    `increment_progress_to_evaluation_end`: its metrics, its mark of the best and EarlyStopping's view would be lost.
    For a fork (`validates_restored` false) they belong to the run that it leaves.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    validate = _within(loop.run, shield)
    loop.run = lambda: None if is_stopped() else validate()
    skip = _within(loop.increment_progress_to_evaluation_end, shield)  # it draws from the generators, too
    loop.increment_progress_to_evaluation_end = (lambda: _validate_restored(trainer)) if validates_restored else skip


def _validate_restored(trainer: Any) -> None:
    epoch_loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    # As Lightning validates after a batch, before it counts the batch for the loggers.
    is_first, epoch_loop.val_loop.restarting = connector._first_loop_iter, False
    epoch_loop._batches_that_stepped -= 1
    trainer.validating = True
    epoch_loop.val_loop.run()
    trainer.training = True
    epoch_loop._batches_that_stepped += 1
    connector._first_loop_iter = is_first


def _within(function: Callable[[], Any], shield: Callable[[], AbstractContextManager[None]]) -> Callable[[], Any]:
    def shielded() -> Any:
        with shield():
            return function()

    return shielded


def unshield_validation(trainer: Any) -> None:
    """Gives the loop its own methods back; does nothing if they were not shielded."""
    for name in _VALIDATES:
        vars(trainer.fit_loop.epoch_loop.val_loop).pop(name, None)
