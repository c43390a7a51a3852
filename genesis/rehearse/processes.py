"""The processes of one rehearsal: started, found again, killed, ended; nobody else's.

Each inherits a mark in its environment, by which it is known wherever it has gone: further ranks, writers that left
the session, and orphans of a training that is gone.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from genesis.errors import UserError

MARK_NAME = "GENESIS_REHEARSAL"
Kind = Literal["rank", "writer", "other"]

_WRITER_MODULE = b"genesis_callbacks.checkpoint.writer"
_GENESIS_MODULES = (b"genesis", b"genesis.__main__")
_PROC = Path("/proc")
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Process:
    """One live process of a rehearsal.

    Args:
        pid: Its id.
        parent: Its parent's.
        group: Its process group's.
        kind: A rank of a training, a rank's writer, or another helper.
        local_rank: Of the rank that it is or serves.
        started: In the kernel's ticks, to tell the older from the younger.
    """

    pid: int
    parent: int
    group: int
    kind: Kind
    local_rank: int
    started: int


def check_system() -> None:
    """Says whether processes can be found here.

    Raises:
        UserError: They cannot.
    """
    if not (_PROC / "self" / "environ").exists():
        raise UserError("genesis rehearse needs Linux: it finds its processes in /proc")


def find_processes(mark: str) -> list[Process]:
    """Returns the live processes that carry `mark`, oldest first; a zombie is not alive."""
    found = [_read_process(entry, mark) for entry in _PROC.iterdir() if entry.name.isdecimal()]
    return sorted((process for process in found if process is not None), key=lambda process: process.started)


def _read_process(entry: Path, mark: str) -> Process | None:
    try:
        environment = dict(
            item.partition(b"=")[::2] for item in (entry / "environ").read_bytes().split(b"\0") if b"=" in item
        )
        if environment.get(MARK_NAME.encode()) != mark.encode():
            return None
        words = (entry / "cmdline").read_bytes().split(b"\0")
        # The name stands in brackets and may hold anything.
        fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # it has ended, or is another user's
    if fields[0] in (b"Z", b"X"):
        return None
    return Process(
        pid=int(entry.name),
        parent=int(fields[1]),
        group=int(fields[2]),
        kind=_kind_of(words),
        local_rank=int(environment.get(b"LOCAL_RANK", b"0")),
        started=int(fields[19]),
    )


def _kind_of(words: Sequence[bytes]) -> Kind:
    if _WRITER_MODULE in words:
        return "writer"
    return "rank" if b"fit" in words and any(name in words for name in _GENESIS_MODULES) else "other"


def kill_process(pid: int, mark: str) -> bool:
    """Sends SIGKILL if `pid` is still the process that carries `mark`; says whether it was."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # From here on the number cannot mean another process.
        if _read_process(_PROC / str(pid), mark) is None:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def wait_until_gone(mark: str, limit_seconds: float) -> list[Process]:
    """Waits until no process carries `mark`, and returns those that still do after the limit."""
    deadline_seconds = time.monotonic() + limit_seconds
    while (left := find_processes(mark)) and time.monotonic() < deadline_seconds:
        time.sleep(_POLL_SECONDS)
    return left


def end_all(mark: str) -> None:
    """Kills every process that carries `mark`, until there is none."""
    while left := find_processes(mark):
        for process in left:
            kill_process(process.pid, mark)
        time.sleep(_POLL_SECONDS)


class Training:
    """One `genesis fit` in a session of its own, so that all of its ranks can be killed at once.

    Args:
        command: What is run.
        log: Takes its output.
        mark: For all that it starts.
    """

    def __init__(self, command: Sequence[str], log: Path, mark: str) -> None:
        self._mark = mark
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, MARK_NAME: mark},
            )

    def poll(self) -> int | None:
        """Returns the exit status of rank 0, negative for a signal's; None while it runs."""
        return self._process.poll()

    def ranks(self) -> dict[int, int]:
        """Returns the process ids of its live ranks. What a rank has forked is not one."""
        processes = [process for process in find_processes(self._mark) if process.group == self._process.pid]
        ranks: dict[int, int] = {}
        for process in processes:
            if process.kind == "rank":
                ranks.setdefault(process.local_rank, process.pid)
        return ranks

    def writers(self) -> dict[int, int]:
        """Returns the process ids of its ranks' live writers; orphans of an earlier training are not its own."""
        ranks = set(self.ranks().values())
        return {
            process.local_rank: process.pid
            for process in find_processes(self._mark)
            if process.kind == "writer" and process.parent in ranks
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
