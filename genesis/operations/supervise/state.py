"""What a supervisor needs to know of the one before it, and the lock of the run.

    RUN/supervisor/state.json    the memory of the loop; each of several nodes has one of its own
                   skips.json    which data the run skips, and how much of the budget is used
                   fresh.json    when the run began again from scratch, if it did

The last two are one for all nodes.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.plain import count, number, read_object, read_positions, text
from genesis.operations.supervise.skips import NO_SKIPS, Skips
from genesis_callbacks.base.files import replace_file
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


def read_state(directory: Path) -> LoopState | None:
    """Returns the state in the supervisor's directory; None without a valid one."""
    content = read_object(directory / _STATE_NAME)
    if content is None:
        return None
    try:
        return LoopState(
            run_id=text(content["run_id"]),
            is_over=content["is_over"] is True,
            attempt=count(content["attempt"]),
            first_crash=count(content["first_crash"]),
            best_step=count(content["best_step"]),
            saved_step=count(content["saved_step"]),
            began_seconds=number(content["began_seconds"]),
        )
    except (ValueError, LookupError):  # a forged file, or one of another version
        return None


def read_skips(run_dir: Path) -> Skips:
    """Returns what a run skips by `--may_skip_data`; nothing without a valid file."""
    content = read_object(RunDirectory(run_dir).supervisor / SKIPS_NAME)
    try:
        return NO_SKIPS if content is None else decode_skips(content)
    except (ValueError, LookupError, TypeError):  # a forged file, or one of another version
        return NO_SKIPS


def encode_skips(skips: Skips) -> dict[str, Any]:
    """Returns what a run skips in the types of JSON."""
    return {"positions": [list(each) for each in skips.positions], "num_windows": skips.num_windows}


def decode_skips(content: Mapping[str, Any]) -> Skips:
    """Returns what `encode_skips` encoded.

    Raises:
        ValueError: A value is invalid.
        LookupError: A value is missing.
        TypeError: A range is not a pair.
    """
    num_windows = count(content["num_windows"])
    if num_windows < 0:
        raise ValueError("not a number of windows")
    return Skips(read_positions(content["positions"]), num_windows)


def write_skips(run_dir: Path, skips: Skips) -> None:
    """Replaces what a run skips.

    Raises:
        OSError: It cannot be written.
    """
    directory = RunDirectory(run_dir).supervisor
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / SKIPS_NAME, json.dumps(encode_skips(skips)).encode() + b"\n")


def write_state(directory: Path, state: LoopState) -> None:
    """Replaces the state.

    Raises:
        OSError: It cannot be written.
    """
    replace_file(directory / _STATE_NAME, json.dumps(asdict(state), indent=2).encode() + b"\n")


def read_fresh_seconds(run_dir: Path) -> float:
    """Returns the Unix time at which a run last began again from scratch; 0 if it never did."""
    content = read_object(RunDirectory(run_dir).supervisor / _FRESH_NAME)
    try:
        return 0.0 if content is None else number(content["since_seconds"])
    except (ValueError, LookupError):  # a forged file, or one of another version
        return 0.0


def write_fresh_seconds(run_dir: Path, seconds: float) -> None:
    """Notes that a run begins again from scratch.

    Raises:
        OSError: It cannot be written.
    """
    directory = RunDirectory(run_dir).supervisor
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / _FRESH_NAME, json.dumps({"since_seconds": seconds}).encode() + b"\n")


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
