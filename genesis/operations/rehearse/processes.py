"""Starts, finds, kills and ends the processes of one rehearsal, and no others.

Each process inherits a mark in its environment. The mark identifies further ranks, writers that left the session, and
orphans of a training that has ended.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from genesis.base.processes import Mark, find_kind, find_processes, kill_process, start_program

MARK_NAME = "GENESIS_REHEARSAL"
_POLL_SECONDS = 0.02


class Training:
    """One `genesis fit` in a session of its own, so that all of its ranks can be killed at once.

    Args:
        command: The command to run.
        log: The file for the output of the command.
        mark: The mark in the environment of all processes that the command starts.
    """

    def __init__(self, command: Sequence[str], log: Path, mark: Mark) -> None:
        self._mark = mark
        with log.open("wb") as output:
            self._process = start_program(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, mark.name: mark.value},
            )

    def poll(self) -> int | None:
        """Returns the exit status of rank 0, negative if a signal ended the rank; None while the rank runs."""
        return self._process.poll()

    def ranks(self) -> dict[int, int]:
        """Returns the process ids of the live ranks, without the processes that a rank has forked."""
        processes = [process for process in find_processes(self._mark) if process.group == self._process.pid]
        ranks: dict[int, int] = {}
        for process in processes:
            if find_kind(process) == "rank":
                ranks.setdefault(process.local_rank, process.pid)
        return ranks

    def writers(self) -> dict[int, int]:
        """Returns the process ids of the ranks' live writers, without orphans of an earlier training."""
        ranks = set(self.ranks().values())
        return {
            process.local_rank: process.pid
            for process in find_processes(self._mark)
            if find_kind(process) == "writer" and process.parent in ranks
        }

    def kill_ranks(self) -> None:
        """Sends SIGKILL to all ranks at once."""
        if self._process.returncode is None:  # rank 0 is not reaped yet, so no other process can have its group id
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in self.ranks().values():
            kill_process(pid, self._mark)

    def kill_one(self, pid: int) -> bool:
        """Sends SIGKILL to one rank or writer; returns whether that process still existed."""
        return kill_process(pid, self._mark)

    def wait_ended(self, limit_seconds: float) -> float | None:
        """Waits until all ranks have ended, and returns the seconds that passed; None if some ranks still run."""
        began_seconds = time.monotonic()
        while self._process.poll() is None or self.ranks():
            if time.monotonic() - began_seconds > limit_seconds:
                return None
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - began_seconds
