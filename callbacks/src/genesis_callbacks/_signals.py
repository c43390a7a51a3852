"""A signal handler that only remembers, and the end of training when all ranks have decided what it means."""

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer

WATCHED_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalFlag:
    """Remembers the first signal that came while it is installed; SIGINT after it is handed to whoever had it before.

    It can only be installed by the main thread; elsewhere `install` does nothing.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self.received = 0
        """Number of the signal, 0 for none."""

    def install(self) -> None:
        """Takes the watched signals, and forgets what came before."""
        self.received = 0
        if threading.current_thread() is threading.main_thread() and not self._previous:
            for number in WATCHED_SIGNALS:
                self._previous[number] = signal.signal(number, self._remember)

    def remove(self) -> None:
        """Gives the signals back to whoever had them before; a second call does nothing."""
        while self._previous:
            number, previous = self._previous.popitem()
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if self.received and number == signal.SIGINT and callable(previous):
            previous(number, frame)
        self.received = self.received or number


def stop_training(trainer: Trainer) -> None:
    """Makes a fit end after the batch that runs; every rank calls it at the same one."""
    # A limit from below would make Lightning train on in spite of should_stop.
    trainer.fit_loop.min_epochs = None
    trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True
