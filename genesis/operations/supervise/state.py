"""What a supervisor needs to know of the one before it, and the lock of the run.

    RUN/supervisor/state.json    the memory of the loop; each of several nodes has one of its own
                   skips.json    which data the run skips, and how much of the budget is used
                   fresh.json    when the run began again from scratch, if it did

The last two are one for all nodes.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from genesis.base.errors import UserError
from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.plain import read_record, write_record
from genesis.operations.supervise.skips import NO_SKIPS, Skips
from genesis_callbacks.base.locks import lock_file

_STATE_NAME: Final = "state.json"
_LOCK_NAME: Final = "lock"
SKIPS_NAME: Final = "skips.json"
_FRESH_NAME: Final = "fresh.json"

NODE_PREFIX: Final = "node-"
"""Begins the name of the directory of one of several nodes, in the run's `supervisor`."""


@dataclass
class LoopState:
    """The loop's own memory.

    Args:
        run_id: The value of the mark of the run's processes.
        is_over: Whether the last supervisor had come to an end of its own: complete, stopped or requeued.
        attempt: Number of the last attempt, from 1; 0 before the first.
        first_crash: Number of the first crash that counts for the decision.
        best_step: The largest step that any attempt has reached.
        saved_step: Step of the newest checkpoint when the last attempt was launched.
        began_seconds: Unix time at which the run was first supervised.
    """

    run_id: str
    is_over: bool = True
    attempt: int = 0
    first_crash: int = 1
    best_step: int = 0
    saved_step: int = 0
    began_seconds: float = 0.0


@dataclass(frozen=True)
class _Fresh:
    since_seconds: float


def read_state(directory: Path) -> LoopState | None:
    """Returns the state in the supervisor's directory; None without a valid one."""
    return read_record(LoopState, directory / _STATE_NAME)


def write_state(directory: Path, state: LoopState) -> None:
    """Replaces the state.

    Raises:
        OSError: It cannot be written.
    """
    write_record(directory / _STATE_NAME, state)


def read_skips(run_dir: Path) -> Skips:
    """Returns what a run skips by `--may_skip_data`; nothing without a valid file."""
    skips = read_record(Skips, RunDirectory(run_dir).supervisor / SKIPS_NAME)
    return NO_SKIPS if skips is None or skips.num_windows < 0 else skips


def write_skips(run_dir: Path, skips: Skips) -> None:
    """Replaces what a run skips.

    Raises:
        OSError: It cannot be written.
    """
    write_record(RunDirectory(run_dir).supervisor / SKIPS_NAME, skips)


def read_fresh_seconds(run_dir: Path) -> float:
    """Returns the Unix time at which a run last began again from scratch; 0 if it never did."""
    fresh = read_record(_Fresh, RunDirectory(run_dir).supervisor / _FRESH_NAME)
    return 0.0 if fresh is None else fresh.since_seconds


def write_fresh_seconds(run_dir: Path, seconds: float) -> None:
    """Notes that a run begins again from scratch.

    Raises:
        OSError: It cannot be written.
    """
    write_record(RunDirectory(run_dir).supervisor / _FRESH_NAME, _Fresh(seconds))


class SupervisorLock:
    """Holds a run for one supervisor, by a lock that ends with the process.

    Args:
        directory: The supervisor's directory in the run's; it is created.

    Raises:
        UserError: Another supervisor holds the run.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / _LOCK_NAME
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            lock_file(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, directory.parent)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            _, is_node, node = directory.name.partition(NODE_PREFIX)
            whose = f"of node {node} " if is_node else ""
            other = ", or give this node another --node_name" if is_node else ""
            raise UserError(
                f"{directory.parent} already has a supervisor {whose}(process {holder or 'unknown'}): "
                f"end it first{other}"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Lets go of the run."""
        os.close(self._descriptor)
