"""The threads of a rank that save while training continues."""

import os
import queue
import threading
from collections.abc import Callable

from .job import Outcome, WriteJob, perform
from .stage import Staged

_THREAD_NICENESS = 10


class SaveThread:
    """One thread for all saves of a run: with a new thread for each save, training would wait until it is scheduled."""

    def __init__(self) -> None:
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="genesis-save", daemon=True).start()

    def submit(self, act: Callable[[], None]) -> None:
        """Runs `act` after all earlier ones; `act` must not raise."""
        self._acts.put(act)

    def close(self) -> None:
        """Ends the thread after its submitted work, without waiting for the end."""
        self._acts.put(None)

    def _work(self) -> None:
        while (act := self._acts.get()) is not None:
            act()
            del act  # `act` refers to tensors, whose memory must become free


def perform_niced(job: WriteJob, staged: Staged) -> Outcome:
    """Performs the job in a new thread with low priority.

    On Linux each thread has its own niceness. A thread that raised its niceness cannot lower it for the next staging,
    hence a new thread.
    """
    outcomes: list[Outcome] = []

    def write() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_NICENESS)
        outcomes.append(perform(job, staged, lambda: False))

    thread = threading.Thread(target=write, name="genesis-write", daemon=True)
    thread.start()
    thread.join()
    return outcomes[0]
