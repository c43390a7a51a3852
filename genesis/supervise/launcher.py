"""The process from which the ranks of a supervised run are forked: it has imported Lightning once.

Importing Lightning takes many seconds, so that a new process per rank would be most of a restart. This process imports,
computes nothing, holds no context of a device and no process group, and forks a child for each request. It outlives the
supervisor: its children go on training, and the next supervisor of the run connects to it and finds them. Ranks end
with it, by the kernel.

It listens on a socket in the run's directory and serves one supervisor at a time. Requests and answers are JSON
objects, one in each packet:

    {"op": "fork", "attempt": 3, "jobs": [Job, ...]}     forks the jobs; the answer is the state
    {"op": "state"}                                      the answer is the state
    {"op": "leave"}                                      ends this process, once no child is left

The state is also sent whenever a child has ended. Without a supervisor and without children it ends after a while.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from genesis.parent import end_with_forker

MAX_PACKET_BYTES: Final = 1 << 17
SOCKET_NAME: Final = "launcher.sock"
STACKS_SIGNAL: Final = signal.SIGUSR2
"""Makes a rank write the stacks of its threads into its file, also while it waits in native code."""
PRELOADED: Final = ("torch.distributed.fsdp", "lightning.pytorch", "genesis.cli.fit")

_IDLE_SECONDS: Final = 60.0
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: process, user, group


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


class Launcher:
    """Serves a supervisor, and then the next.

    Args:
        listening: A listening socket.
        run_id: The value of the run's mark.
    """

    def __init__(self, listening: socket.socket, run_id: str) -> None:
        self._listening = listening
        self._supervisor: socket.socket | None = None
        self._state = LauncherState(os.getpid(), run_id)
        self._is_leaving = False
        # A signal handler in Python runs between two instructions; the wake-up makes `poll` return for it.
        self._wakes, wakes_writer = socket.socketpair()
        wakes_writer.setblocking(False)
        self._wakes_writer = wakes_writer
        signal.set_wakeup_fd(wakes_writer.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # signals are for the supervisor, which ends this process by request

    def serve(self) -> Job | None:
        """Serves until there is nothing more to do. Returns the job in a child, and None in the launcher."""
        idle_since = time.monotonic()
        while not (self._is_leaving and not self._has_children()):
            if self._supervisor is not None or self._has_children():
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > _IDLE_SECONDS:
                break
            job = self._serve_once()
            if job is not None:
                return job
        return None

    def _has_children(self) -> bool:
        return any(child.status is None for child in self._state.children)

    def _serve_once(self) -> Job | None:
        poll = select.poll()
        for end in (self._listening, self._wakes, self._supervisor):
            if end is not None:
                poll.register(end, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000)}
        if self._wakes.fileno() in ready:
            self._wakes.recv(4096)
        self._reap()
        if self._listening.fileno() in ready:
            self._accept()
        elif self._supervisor is not None and self._supervisor.fileno() in ready:
            return self._answer(self._supervisor)
        return None

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        user = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
        if user != os.getuid():  # the socket's directory may be open to others
            connection.close()
            return
        if self._supervisor is not None:  # its supervisor is gone: only the holder of the run's lock connects
            self._supervisor.close()
        self._supervisor = connection
        self._send_state()

    def _answer(self, supervisor: socket.socket) -> Job | None:
        try:
            packet = supervisor.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            packet = b""
        if not packet:
            supervisor.close()
            self._supervisor = None
            return None
        request = json.loads(packet)
        self._state.error = ""
        if request["op"] == "leave":
            self._is_leaving = True
        elif request["op"] == "fork" and self._has_children():
            self._state.error = "children of the attempt before still run"
        elif request["op"] == "fork":
            self._is_leaving = False
            job = self._fork(request["attempt"], [Job(**job) for job in request["jobs"]])
            if job is not None:
                return job
        self._send_state()
        return None

    def _fork(self, attempt: int, jobs: Sequence[Job]) -> Job | None:
        self._state.attempt, self._state.forked_seconds, self._state.children = attempt, time.monotonic(), []
        for job in jobs:
            pid = os.fork()
            if pid == 0:
                return job
            self._state.children.append(Child(job.rank, pid))
        return None

    def _reap(self) -> None:
        has_news = False
        for child in self._state.children:
            if child.status is None:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    child.status, child.ended_seconds = os.waitstatus_to_exitcode(status), time.monotonic()
                    has_news = True
        if has_news:
            self._send_state()

    def _send_state(self) -> None:
        if self._supervisor is None:
            return
        try:
            self._supervisor.send(encode(asdict(self._state)))
        except OSError:  # it is gone; the next one asks
            self._supervisor.close()
            self._supervisor = None

    def forget(self) -> None:
        """Closes everything in a child."""
        signal.set_wakeup_fd(-1)
        for end in (self._listening, self._wakes, self._wakes_writer, self._supervisor):
            if end is not None:
                end.close()


def become(job: Job) -> None:
    """Turns this process, a child, into that of a job: its session, signals, environment, directory and output."""
    end_with_forker()
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, descriptors in ((job.output, (1, 2)), (os.devnull, (0,))):
        flags = os.O_RDONLY if descriptors == (0,) else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(path, flags, 0o644)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that a kill loses no line
    stacks = os.open(job.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.enable(stacks)
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    os.chdir(job.directory)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.argv[:] = ["genesis", *job.arguments]


def run_job(job: Job) -> int:
    """Runs a job in a child that has become its process, and returns the exit status."""
    module, _, name = job.target.partition(":")
    status: int = getattr(importlib.import_module(module), name)(list(job.arguments))
    return status


def bind(directory: Path) -> socket.socket:
    """Returns a socket that listens in a directory, whose earlier launcher is gone."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = directory / SOCKET_NAME
    path.unlink(missing_ok=True)
    with short_path(path) as name:
        listening.bind(name)
    path.chmod(0o600)
    listening.listen(2)
    return listening


@contextlib.contextmanager
def short_path(path: Path) -> Any:
    """Yields a name for `path` that is short enough for a socket, whatever the length of its directory."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def main() -> int:
    """Listens, imports, serves; in a child it runs the job and returns its exit status."""
    directory, run_id = Path(sys.argv[1]), sys.argv[2]
    listening = bind(directory)
    for module in PRELOADED:
        importlib.import_module(module)
    launcher = Launcher(listening, run_id)
    gc.collect()
    gc.freeze()  # what is imported is nobody's garbage: children neither look at it nor copy its pages
    job = launcher.serve()
    launcher.forget()
    if job is None:
        (directory / SOCKET_NAME).unlink(missing_ok=True)
        return 0
    become(job)
    return run_job(job)


if __name__ == "__main__":
    sys.exit(main())
