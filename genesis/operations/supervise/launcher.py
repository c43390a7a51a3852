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
import functools
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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from genesis.base.parent import end_with_forker
from genesis.operations.supervise.forked_writer import WRITER_MODULE, ForkedWriter, run_writer
from genesis.operations.supervise.launch_protocol import (
    MAX_PACKET_BYTES,
    SOCKET_NAME,
    STACKS_SIGNAL,
    Child,
    Job,
    LauncherState,
    encode,
    short_path,
)
from genesis_callbacks.checkpoint.writer_process import start_writers_by

PRELOADED: Final = (WRITER_MODULE, "torch.distributed.fsdp", "lightning.pytorch", "genesis.cli.fit")

_IDLE_SECONDS: Final = 60.0
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: process, user, group


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
        self._jobs: dict[int, tuple[socket.socket, Job]] = {}
        self._writers: dict[int, int | None] = {}
        # A signal handler in Python runs between two instructions; the wake-up makes `poll` return for it.
        self._wakes, wakes_writer = socket.socketpair()
        wakes_writer.setblocking(False)
        self._wakes_writer = wakes_writer
        signal.set_wakeup_fd(wakes_writer.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # signals are for the supervisor, which ends this process by request

    def serve(self) -> Callable[[], int] | None:
        """Serves until there is nothing more to do. Returns what a child has to do, and None in the launcher."""
        idle_since = time.monotonic()
        while not (self._is_leaving and not self._has_children()):
            if self._supervisor is not None or self._has_children():
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > _IDLE_SECONDS:
                break
            task = self._serve_once()
            if task is not None:
                return task
        return None

    def _has_children(self) -> bool:
        return any(child.status is None for child in self._state.children)

    def _serve_once(self) -> Callable[[], int] | None:
        poll = select.poll()
        for descriptor in self._jobs:
            poll.register(descriptor, select.POLLIN)
        for end in (self._listening, self._wakes, self._supervisor):
            if end is not None:
                poll.register(end, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000)}
        if self._wakes.fileno() in ready:
            self._wakes.recv(4096)
        self._reap()
        for descriptor in ready & self._jobs.keys():
            task = self._answer_rank(descriptor)
            if task is not None:
                return task
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

    def _answer(self, supervisor: socket.socket) -> Callable[[], int] | None:
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
            task = self._fork(request["attempt"], [Job(**job) for job in request["jobs"]])
            if task is not None:
                return task
        self._send_state()
        return None

    def _fork(self, attempt: int, jobs: Sequence[Job]) -> Callable[[], int] | None:
        self._state.attempt, self._state.forked_seconds, self._state.children = attempt, time.monotonic(), []
        for job in jobs:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                ours.close()
                return functools.partial(run_job, job, theirs)
            theirs.close()
            self._jobs[ours.fileno()] = (ours, job)
            self._state.children.append(Child(job.rank, pid))
        return None

    def _answer_rank(self, descriptor: int) -> Callable[[], int] | None:
        """Forks a writer for a rank, or returns the status of one; returns what the writer has to do in the child."""
        channel, job = self._jobs[descriptor]
        try:
            packet, passed, _, _ = socket.recv_fds(channel, MAX_PACKET_BYTES, 1)
        except ConnectionError:
            packet, passed = b"", []
        if not packet:
            channel.close()
            del self._jobs[descriptor]
            return None
        request = json.loads(packet)
        answer: int | None
        if request["op"] == "status":
            answer = self._writers.get(request["pid"])
        else:
            pid = os.fork()
            if pid == 0:
                return functools.partial(run_writer, job, passed[0], request["trainer"])
            answer = pid
            self._writers[pid] = None
            os.close(passed[0])
        with contextlib.suppress(OSError):  # the rank has just ended
            channel.send(encode(answer))
        return None

    def _reap(self) -> None:
        has_news = False
        for child in self._state.children:
            if child.status is None:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    child.status, child.ended_seconds = os.waitstatus_to_exitcode(status), time.monotonic()
                    has_news = True
        for writer in [pid for pid, known in self._writers.items() if known is None]:
            pid, status = os.waitpid(writer, os.WNOHANG)
            self._writers[writer] = os.waitstatus_to_exitcode(status) if pid else None
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
        ranks = [channel for channel, _ in self._jobs.values()]
        for end in (self._listening, self._wakes, self._wakes_writer, self._supervisor, *ranks):
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


def run_job(job: Job, launcher: socket.socket) -> int:
    """Turns a child into the process of a job, runs it, and returns the exit status."""
    become(job)
    start_writers_by(functools.partial(ForkedWriter, launcher))
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


def main() -> int:
    """Listens, imports, serves; in a child it runs the job and returns its exit status."""
    directory, run_id = Path(sys.argv[1]), sys.argv[2]
    listening = bind(directory)
    for module in PRELOADED:
        importlib.import_module(module)
    launcher = Launcher(listening, run_id)
    gc.collect()
    gc.freeze()  # what is imported is nobody's garbage: children neither look at it nor copy its pages
    task = launcher.serve()
    launcher.forget()
    if task is not None:
        return task()
    (directory / SOCKET_NAME).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
