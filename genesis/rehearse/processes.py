"""Starts, finds, kills and ends the processes of one rehearsal, and no others.

Each inherits a mark in its environment, by which it is known wherever it has gone: further ranks, writers that left
the session, and orphans of a training that is gone.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from genesis.processes import Mark, MarkedProcess, find_processes, kill_process

MARK_NAME = "GENESIS_REHEARSAL"
Kind = Literal["rank", "writer", "other"]

_WRITER_MODULE = b"genesis_callbacks.checkpoint.writer"
_GENESIS_MODULES = (b"genesis", b"genesis.__main__")
_POLL_SECONDS = 0.02


def find_kind(process: MarkedProcess) -> Kind:
    """Returns what a process of a rehearsal is: a rank of a training, a rank's writer, or another helper."""
    if _WRITER_MODULE in process.words:
        return "writer"
    is_fit = b"fit" in process.words and any(name in process.words for name in _GENESIS_MODULES)
    return "rank" if is_fit else "other"


class Training:
    """One `genesis fit` in a session of its own, so that all of its ranks can be killed at once.

    Args:
        command: What is run.
        log: Takes its output.
        mark: For all that it starts.
    """

    def __init__(self, command: Sequence[str], log: Path, mark: Mark) -> None:
        self._mark = mark
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, mark.name: mark.value},
            )

    def poll(self) -> int | None:
        """Returns the exit status of rank 0, negative for a signal's; None while it runs."""
        return self._process.poll()

    def ranks(self) -> dict[int, int]:
        """Returns the process ids of its live ranks. What a rank has forked is not one."""
        processes = [process for process in find_processes(self._mark) if process.group == self._process.pid]
        ranks: dict[int, int] = {}
        for process in processes:
            if find_kind(process) == "rank":
                ranks.setdefault(process.local_rank, process.pid)
        return ranks

    def writers(self) -> dict[int, int]:
        """Returns the process ids of its ranks' live writers; orphans of an earlier training are not its own."""
        ranks = set(self.ranks().values())
        return {
            process.local_rank: process.pid
            for process in find_processes(self._mark)
            if find_kind(process) == "writer" and process.parent in ranks
        }

    def kill_ranks(self) -> None:
        """Sends SIGKILL to all ranks at once."""
        if self._process.returncode is None:  # unreaped, so that the group is still its own
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in self.ranks().values():
            kill_process(pid, self._mark)

    def kill_one(self, pid: int) -> bool:
        """Sends SIGKILL to one rank or writer; says whether it was still there."""
        return kill_process(pid, self._mark)

    def wait_ended(self, limit_seconds: float) -> float | None:
        """Waits until all ranks have ended, and returns the seconds that it took; None: some still run."""
        began_seconds = time.monotonic()
        while self._process.poll() is None or self.ranks():
            if time.monotonic() - began_seconds > limit_seconds:
                return None
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - began_seconds
