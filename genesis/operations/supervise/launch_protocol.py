"""What the supervisor, the launcher and the ranks say to one another: JSON objects, one in each packet. No torch."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MAX_PACKET_BYTES: Final = 1 << 17
SOCKET_NAME: Final = "launcher.sock"
STACKS_SIGNAL: Final = signal.SIGUSR2
"""Makes a rank write the stacks of its threads into its file, also while it waits in native code."""


@dataclass(frozen=True)
class Job:
    """What a child runs.

    Args:
        rank: Its rank; it names the child in the state.
        target: `module:function`; the function takes `arguments` and returns the exit status.
        arguments: The arguments.
        environment: All of its environment.
        directory: Its working directory.
        output: File for its stdout and stderr, which is appended to.
        stacks: File for the stacks of its threads.
    """

    rank: int
    target: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    output: str
    stacks: str


@dataclass
class Child:
    """A child of the attempt at hand.

    Args:
        rank: Its rank.
        pid: Its process.
        status: Its exit status, negative for a signal; None while it runs.
        ended_seconds: When its end was noticed, by the monotonic clock; None while it runs.
    """

    rank: int
    pid: int
    status: int | None = None
    ended_seconds: float | None = None


@dataclass
class LauncherState:
    """The launcher's own report to the supervisor.

    Args:
        pid: The launcher's process.
        run_id: The value of the mark that all processes of the run carry.
        attempt: Number of the attempt whose children are listed; 0 before the first.
        forked_seconds: When these children were forked, by the monotonic clock.
        children: The children, by rank.
        error: Why the last request failed; empty if it did not.
    """

    pid: int
    run_id: str
    attempt: int = 0
    forked_seconds: float = 0.0
    children: list[Child] = field(default_factory=list)
    error: str = ""


def encode(content: Any) -> bytes:
    """Returns the packet of a request or an answer."""
    return json.dumps(content).encode()


def decode_state(packet: bytes) -> LauncherState:
    """Returns the state in a packet."""
    content = json.loads(packet)
    return LauncherState(**{**content, "children": [Child(**child) for child in content["children"]]})


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yields a name for `path` that is short enough for a socket, whatever the length of its directory."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
