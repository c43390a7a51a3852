"""The process that the commands of tests are forked from: it has imported what they need once, which takes seconds.

Its arguments are the descriptor of a socket and the modules to import. It reads requests from that socket: as JSON a
module or a script, its arguments, the directory and the environment, and with them the descriptors of stdin, stdout,
stderr, at most one more for the module (its number becomes the last argument) and a pipe. To the pipe it writes the
child's process id, and in the end the status that the kernel reports. A child leaves the loop, runs the module as
`python -m MODULE` does, or the script as `python -P SCRIPT` does, and ends as any interpreter ends. Nothing may compute
before the fork: the threads of OpenMP do not survive one.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from genesis_callbacks.testing import fork_writers

MAX_REQUEST_BYTES = 1 << 20
NUM_STANDARD = 3
SCRIPT_SUFFIX = ".py"
MAX_DESCRIPTORS = 5


@dataclass(frozen=True)
class Request:
    """One command: what to run, and the descriptors of its stdin, stdout and stderr and of those that it is given."""

    module: str
    arguments: list[str]
    cwd: str
    environment: dict[str, str]
    descriptors: list[int]


def serve(requests: socket.socket) -> Request | None:
    """Forks a child for each request. Returns the request in the child, and None when the tests have ended."""
    pipes: dict[int, int] = {}
    ends, ends_writer = socket.socketpair()
    ends_writer.setblocking(False)
    signal.set_wakeup_fd(ends_writer.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end their commands themselves
    # Not `select.select`: a process of many tests hands down descriptors beyond those that it takes.
    poll = select.poll()
    for end in (requests, ends):
        poll.register(end, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if ends.fileno() in ready:
            ends.recv(4096)
            report_ends(pipes)
        if requests.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not message:
            return None
        *given, pipe = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for end in (requests, ends, ends_writer):
                end.close()
            for descriptor in (*pipes.values(), pipe):
                os.close(descriptor)
            return Request(descriptors=given, **json.loads(message))
        for descriptor in given:
            os.close(descriptor)
        os.write(pipe, f"{pid}\n".encode())
        pipes[pid] = pipe


def report_ends(pipes: dict[int, int]) -> None:
    """Writes the status of each child that has ended to its pipe, and closes it."""
    while pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = pipes.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it
            os.write(pipe, f"{status}\n".encode())
        os.close(pipe)


def become(request: Request) -> None:
    """Turns this process into `python -m MODULE` or `python -P SCRIPT`, and runs it."""
    for number, descriptor in enumerate(request.descriptors[:NUM_STANDARD]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    if request.environment.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[0] = request.cwd
    given = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in given if path and path not in sys.path]
    sys.argv[1:] = [*request.arguments, *map(str, request.descriptors[NUM_STANDARD:])]
    if request.module.endswith(SCRIPT_SUFFIX):
        sys.argv[0] = request.module
        runpy.run_path(request.module, run_name="__main__")
    else:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Imports what is slow to import, and serves."""
    channel: Any = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    fork_writers()  # of commands that train
    gc.freeze()  # what is imported is nobody's garbage: children neither look at it nor copy its pages
    request = serve(channel)
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()
