"""A signal handler that only remembers, and the end of training when all ranks have decided what it means."""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer

WATCHED_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalFlag:
    """Remembers the first signal that arrives while it is installed; a later SIGINT goes to the previous handler.

    Only the main thread can install it; in other threads `install` does nothing.

    Args:
        is_announced: Whether a line on standard error answers the first signal.
    """

    def __init__(self, *, is_announced: bool = False) -> None:
        self._is_announced = is_announced
        self._previous: dict[int, Any] = {}
        self.received = 0
        """Number of the signal, 0 for none."""
        self.is_validating = False
        """Whether the fit validates, so that the save comes later."""

    def install(self) -> None:
        """Installs handlers for the watched signals, and forgets an earlier signal."""
        self.received = 0
        # Python allows `signal.signal` in the main thread alone.
        if threading.current_thread() is threading.main_thread() and not self._previous:
            for number in WATCHED_SIGNALS:
                self._previous[number] = signal.signal(number, self._remember)

    def remove(self) -> None:
        """Restores the previous handlers; a second call does nothing."""
        while self._previous:
            number, previous = self._previous.popitem()
            # None stands for a handler that was not installed from Python, which Python cannot put back.
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Nothing else happens here: the handler may run in the middle of an optimizer step or of a collective, and
        # a save there would be torn. Lightning's own handler reduces over ranks, which hangs if only one rank gets it.
        previous = self._previous.get(number)
        if self.received and number == signal.SIGINT and callable(previous):
            previous(number, frame)
        if not self.received and self._is_announced:
            when = "this validation and one more step" if self.is_validating else "this step"
            answer = f"{signal.Signals(number).name}: saving after {when}; Ctrl-C again to stop without a save\n"
            # By the descriptor: the handler may run in the middle of a print, which cannot be entered again.
            with contextlib.suppress(OSError):
                os.write(2, answer.encode())
        self.received = self.received or number


def stop_training(trainer: Trainer) -> None:
    """Makes a fit end after the current batch; every rank calls it at the same batch."""
    # A limit from below would make Lightning train on in spite of should_stop.
    trainer.fit_loop.min_epochs = None
    trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True
