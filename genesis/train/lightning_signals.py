"""Disables Lightning's own agreement of ranks on SIGTERM, which `AsyncProcessCheckpoint` replaces."""

from typing import Any

import lightning.pytorch as pl

from genesis_callbacks import AsyncProcessCheckpoint


def leave_signals_to_votes(trainer: pl.Trainer) -> None:
    """Keeps Lightning from asking rank 0 for a signal before every batch, where the checkpoint callback does so.

    Lightning broadcasts a number on the device and waits for it, before it fetches the batch: on a GPU nothing is in
    the queue while the host fetches, copies and adds up counts (Lightning #21487). The callback's votes take part in
    the reduction at a window's end, on the host. Without the callback, or its `save_on_signal`, Lightning's way stays.
    """
    callbacks = vars(trainer)["callbacks"]  # a public attribute without an annotation in Lightning
    if any(isinstance(callback, AsyncProcessCheckpoint) and callback.has_signal_votes for callback in callbacks):
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        # Lightning's private name: where it is missing, the assignment would silently change nothing.
        is_known = callable(getattr(epoch_loop, "_broadcast_sigterm_tensor", None))
        assert is_known, "this version of Lightning has no _broadcast_sigterm_tensor"
        epoch_loop._broadcast_sigterm_tensor = _do_nothing


def _do_nothing() -> None: ...
