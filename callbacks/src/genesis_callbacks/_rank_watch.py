"""Names a rank whose process is gone, and ends the other ranks, which would wait for it in a collective.

Each rank holds a lock on a small file of its own in the run's directory. The operating system frees the lock when the
process ends, however it ends. A thread of each rank checks whether the lock of the next rank is still held, and writes
its finding into a file for the other ranks. No communication: a process group that has lost a rank cannot be used. If
the file system does not carry locks from node to node, no rank is watched, and a warning is issued.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import threading
import warnings
from pathlib import Path

from .base.events import EventLog
from .base.locks import PrivateDescriptor, lock_file
from .base.run_directory import RunDirectory
from .base.untrusted import read_text

EXIT_STATUS = 70
"""sysexits' EX_SOFTWARE, as a forward that one rank enters alone ends with."""

_INTERVAL_SECONDS = 0.5
_VERDICT_NAME = "lost"
_REPORTED_PREFIX = "reported-"
_ENDED = "ended"
_FAILED = "failed with"
_CONSEQUENCES = tuple(f"{_FAILED} {name}" for name in ("RuntimeError", "DistBackendError", "DistNetworkError"))
"""What ranks fail with whose process group has lost a rank; gloo's errors have no class of their own."""


def say_gone(lost: str) -> str:
    """Returns that ranks are gone, given what `RankWatch.describe_lost` returned."""
    return f"{lost} {'are' if ', rank ' in lost else 'is'} gone"


class RankWatch:
    """Watches the other ranks of a run, from construction to `stop`.

    Rank 0 clears the directory (`clear`), then every rank makes a watch. The ranks synchronise between these two steps
    and again before `start`.

    Args:
        directory: The run's, the same on all ranks.
        rank: This rank.
        world_size: Number of ranks.
        grace_seconds: How long this process may continue after another rank is gone: most process groups notice a lost
            rank by themselves.
    """

    def __init__(self, directory: Path, rank: int, world_size: int, grace_seconds: float) -> None:
        self._directory = RunDirectory(directory).ranks
        self._events = EventLog(directory, rank)
        self._rank, self._world_size, self._grace_seconds = rank, world_size, grace_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._directory.mkdir(exist_ok=True)
        # Private: a forked loader worker would inherit a plain descriptor, and hold the lock after its rank's death.
        self._descriptor = PrivateDescriptor(self._path(rank), os.O_CREAT | os.O_RDWR)
        self._is_watching = True
        try:
            lock_file(self._descriptor.number, fcntl.LOCK_EX)
            self._write(f"process {os.getpid()}")
        except OSError:  # no locks on this file system: the text keeps other ranks from taking this one for lost
            self._is_watching = False
            self._write(_ENDED)

    @staticmethod
    def clear(directory: Path) -> None:
        """Removes files of an earlier run. The holder of the directory calls it, before any rank makes a watch."""
        shutil.rmtree(RunDirectory(directory).ranks, ignore_errors=True)

    def start(self) -> None:
        """Starts watching, if this rank sees the locks of all other ranks. Every rank has made its own by now."""
        # All ranks are alive here. A lock that looks free is therefore not visible from this node.
        if not self._is_watching or self._find_all_lost():
            self._is_watching = False
            warnings.warn(
                f"the file system of {self._directory} has no locks between ranks: a lost rank cannot be named",
                stacklevel=2,
            )
            return
        self._thread.start()

    def describe_lost(self) -> str | None:
        """Returns which ranks ended before the run did, as "rank 1 (process 42)" or "(failed with ...)", or None."""
        if not self._is_watching:
            return None
        with contextlib.suppress(OSError):
            return read_text(self._directory / _VERDICT_NAME)
        return ", ".join(f"rank {rank} ({said})" for rank, said in self._find_all_lost().items()) or None

    def claims_to_report(self) -> bool:
        """Returns whether this rank reports which ranks are gone: one rank of each node does, the first to ask."""
        try:
            os.close(os.open(self._directory / f"{_REPORTED_PREFIX}{socket.gethostname()}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:  # no room, or no directory: rather twice than not at all
            return True
        return True

    def has_lost_process(self) -> bool:
        """Returns whether a rank ended without recording a failure, so that it cannot take part in a save."""
        return self._is_watching and any(not said.startswith(_FAILED) for said in self._find_all_lost().values())

    def _find_all_lost(self) -> dict[int, str]:
        lost = {rank: self._find_lost(rank) for rank in range(self._world_size) if rank != self._rank}
        found = {rank: said for rank, said in lost.items() if said is not None}
        causes = {rank: said for rank, said in found.items() if said not in _CONSEQUENCES}
        return causes or found

    def stop(self, failure: BaseException | None = None) -> None:
        """Stops watching. Waits for no other rank.

        At a clean end rank 0 removes the directory; ranks that no longer find a file do not take its rank for lost.

        Args:
            failure: Why this rank ends before the run does; its class is recorded for the other ranks.
        """
        if self._descriptor.number < 0:
            return
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10 * _INTERVAL_SECONDS)
        with contextlib.suppress(OSError):
            self._write(_ENDED if failure is None else f"{_FAILED} {type(failure).__name__}")
        if failure is None and self._rank == 0 and not (self._directory / _VERDICT_NAME).exists():
            shutil.rmtree(self._directory, ignore_errors=True)
        # Last: the text has to be in place when the lock becomes free, since both are read together.
        self._descriptor.close()

    def _path(self, rank: int) -> Path:
        return self._directory / str(rank)

    def _write(self, text: str) -> None:
        os.ftruncate(self._descriptor.number, 0)
        os.pwrite(self._descriptor.number, text.encode(), 0)

    def _find_lost(self, rank: int) -> str | None:
        """Returns the last text of a rank whose lock is free although it did not end cleanly; None for other ranks."""
        try:
            descriptor = os.open(self._path(rank), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            # It raises while the owner lives. If it succeeds, closing the descriptor frees the lock again, so that
            # every other rank can find the same.
            lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            said = os.pread(descriptor, 500, 0).decode(errors="replace")
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return None if said == _ENDED else said

    def _watch(self) -> None:
        # A ring: each rank reads one file per interval, whatever the number of ranks. The verdict's file covers the
        # case that the watching neighbour is gone as well.
        neighbour = (self._rank + 1) % self._world_size
        while not self._stopped.wait(_INTERVAL_SECONDS):
            if (self._directory / _VERDICT_NAME).exists() or self._find_lost(neighbour) is not None:
                self._end()
                return

    def _end(self) -> None:
        """Records the lost ranks for the others, waits for the main thread to end by itself, then ends this process."""
        verdict = self.describe_lost()
        if verdict is None:
            return  # the rank ended cleanly between the two looks
        with contextlib.suppress(OSError):
            (self._directory / _VERDICT_NAME).write_text(verdict, encoding="utf-8")
        if self._stopped.wait(self._grace_seconds):
            return
        self._events.append("failed", text=f"{say_gone(verdict)}; this rank ends as well")
        if self.claims_to_report():
            sys.stderr.write(
                f"genesis-callbacks: error: [rank {self._rank}] {say_gone(verdict)}; this rank ends as well "
                f"{self._grace_seconds:g} s later. The last checkpoint is good: start the run again\n"
            )
            sys.stderr.flush()
        # Not sys.exit, which ends this thread only: the main thread waits in a collective and cannot be interrupted.
        os._exit(EXIT_STATUS)
