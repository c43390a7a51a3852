"""The threads of a rank in which a save goes on while training does."""

import os
import queue
import threading
from collections.abc import Callable

from .job import Outcome, WriteJob, perform
from .stage import Staged

_THREAD_NICENESS = 10


class SaveThread:
    """One thread for all saves of a run: to start one for each would make training wait until it is scheduled."""

    def __init__(self) -> None:
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="genesis-save", daemon=True).start()

    def submit(self, act: Callable[[], None]) -> None:
        """Runs `act`, which raises nothing, after those before it."""
        self._acts.put(act)

    def close(self) -> None:
        """Ends the thread after what it has; does not wait for it."""
        self._acts.put(None)

    def _work(self) -> None:
        while (act := self._acts.get()) is not None:
            act()
            del act  # it holds tensors


def perform_nicely(job: WriteJob, staged: Staged) -> Outcome:
    """Performs the job in a new thread.

    On Linux niceness belongs to a thread, and a thread cannot lower it again for the next staging.
    """
    outcomes: list[Outcome] = []

    def write() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_NICENESS)
        outcomes.append(perform(job, staged, lambda: False))

    thread = threading.Thread(target=write, name="genesis-write", daemon=True)
    thread.start()
    thread.join()
    return outcomes[0]
