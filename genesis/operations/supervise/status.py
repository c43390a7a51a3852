"""What the supervisor of a run knows, for other programs: `RUN/supervisor/status.json`, replaced at each change.

A metrics endpoint in the supervisor reads the object; other processes read the file. The heartbeats
(`genesis_callbacks.heartbeats`) have what changes with each step.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.goodput import Goodput
from genesis.operations.supervise.plain import count, entries, number, read_object, text
from genesis_callbacks.base.files import replace_file

State = Literal["launching", "training", "recovering", "waiting", "stopped", "requeued", "completed"]

PREEMPTED: Final = "preempted"
_STATES: dict[str, State] = {state: state for state in get_args(State)}


@dataclass(frozen=True)
class SupervisorStatus:
    """A snapshot of a supervised run.

    Args:
        state: "launching" until ranks train, "training", "recovering" after a crash until the first new step, "waiting"
            for what the last attempt still holds or for disk space, "stopped" (not restarted any more), "requeued" (the
            queue has to start the run again), or "completed".
        pid: The supervisor's process.
        host: Its machine.
        began_seconds: Unix time at which this run was first supervised.
        updated_seconds: Unix time of this snapshot.
        attempt: Number of the attempt, from 1; 0 before the first.
        num_ranks: Number of ranks on this node.
        ends: Ends of attempts by class, without completed ones.
        restarts: Restarts by the class of the end before them.
        step: The largest step that any attempt has reached.
        verified_step: Step of the newest checkpoint that verified when an attempt was launched or saved; None for none.
        goodput: Where wall time went, up to this snapshot.
        reason: Why the run waits, recovers or was stopped, in one line.
    """

    state: State
    pid: int
    host: str
    began_seconds: float
    updated_seconds: float
    attempt: int = 0
    num_ranks: int = 0
    ends: Mapping[str, int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    step: int = 0
    verified_step: int | None = None
    goodput: Goodput = field(default_factory=Goodput)
    reason: str = ""

    @property
    def num_crashes(self) -> int:
        """Number of ends before the run was complete, without preemptions."""
        return sum(number for name, number in self.ends.items() if name != PREEMPTED)

    @property
    def lost_seconds(self) -> float:
        """Wall time that did not train new tokens."""
        return self.goodput.total - self.goodput.trained


def write_status(run_dir: Path, status: SupervisorStatus) -> None:
    """Replaces the snapshot of a run.

    Raises:
        OSError: It cannot be written.
    """
    path = RunDirectory(run_dir).supervisor_status
    path.parent.mkdir(parents=True, exist_ok=True)
    # The supervisors of several nodes share the directory.
    replace_file(path, json.dumps(asdict(status), indent=2).encode() + b"\n", has_rivals=True)


def read_status(run_dir: Path) -> SupervisorStatus | None:
    """Returns the last snapshot of a run; None if there is none, or none that this version writes.

    Its supervisor may be gone: compare `updated_seconds`, or try the lock.
    """
    content = read_object(RunDirectory(run_dir).supervisor_status)
    try:
        return None if content is None else _decode(content)
    except (ValueError, LookupError, OverflowError):  # a forged file, or one of another version
        return None


def _decode(content: Mapping[str, Any]) -> SupervisorStatus:
    verified = content["verified_step"]
    return SupervisorStatus(
        state=_STATES[text(content["state"])],
        pid=count(content["pid"]),
        host=text(content["host"]),
        began_seconds=number(content["began_seconds"]),
        updated_seconds=number(content["updated_seconds"]),
        attempt=count(content["attempt"]),
        num_ranks=count(content["num_ranks"]),
        ends={name: count(value) for name, value in entries(content["ends"]).items()},
        restarts={name: count(value) for name, value in entries(content["restarts"]).items()},
        step=count(content["step"]),
        verified_step=None if verified is None else count(verified),
        goodput=Goodput.decode(entries(content["goodput"])),
        reason=text(content["reason"]),
    )


def measure_age(status: SupervisorStatus) -> float:
    """Returns the seconds since a snapshot was written, by this machine's clock."""
    return max(0.0, time.time() - status.updated_seconds)
