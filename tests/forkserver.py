"""The process that the commands of tests are forked from: it has imported what they need once, which takes seconds.

Its arguments are the descriptor of a listening socket, blanks, and the modules to import. The workers of pytest connect
to that socket, and the process ends when none is connected any more. It reads requests: as JSON a module or a script,
its arguments, the directory and the environment, and with them the descriptors of stdin, stdout, stderr, at most one
more for the module (its number becomes the last argument) and a pipe. To the pipe the child writes its process id, and
the server in the end the status that the kernel reports. A child leaves the loop, runs the module as `python -m MODULE`
does, or the script as `python -P SCRIPT` does, and ends as any interpreter ends, except that it does not destroy what
was imported: that takes longer than most commands. The command line and the first environment that /proc shows are the
child's own; they lie in the place of the blanks. What the child starts by `genesis.base.processes` is forked, too.
Nothing may compute before the fork: the threads of OpenMP do not survive one.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import runpy
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from genesis_callbacks.testing import fork_writers
from tests import commands

MAX_REQUEST_BYTES = 1 << 20
NUM_STANDARD = 3
SCRIPT_SUFFIX = ".py"
MAX_DESCRIPTORS = 5
MODULES = sys.argv[3:]
"""What is imported before the first fork."""


@dataclass(frozen=True)
class Request:
    """One command: what to run, and the descriptors of its stdin, stdout and stderr and of those that it is given."""

    module: str
    arguments: list[str]
    cwd: str
    environment: dict[str, str]
    descriptors: list[int]
    shown: list[str]
    """The command line in /proc."""
    has_own_session: bool
    run: str
    """The run of tests."""


class Server:
    """Forks a child for each request of its clients."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        self._pipes: dict[int, int] = {}
        """Where the end of each child is reported."""
        self._ends, self._ends_writer = socket.socketpair()
        self._ends_writer.setblocking(False)
        # Not `select.select`: a process of many tests hands down descriptors beyond those that it takes.
        self._poll = select.poll()
        for end in (listener, self._ends):
            self._poll.register(end, select.POLLIN)

    def serve(self) -> Request | None:
        """Returns the request in a child, and None when no client is left."""
        signal.set_wakeup_fd(self._ends_writer.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end their commands themselves
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._ends.fileno() in ready:
                self._ends.recv(4096)
                self._report_ends()
            if self._listener.fileno() in ready:
                self._accept()
            for client in [self._clients[descriptor] for descriptor in ready & self._clients.keys()]:
                request = self._take(client)
                if request is not None:
                    return request
            if not self._clients and self._is_forgotten():
                return None

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self._clients[client.fileno()] = client
        self._poll.register(client, select.POLLIN)

    def _take(self, client: socket.socket) -> Request | None:
        """Forks the child that a client asks for. Returns the request in the child."""
        message, descriptors, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not message:
            self._poll.unregister(client)
            self._clients.pop(client.fileno()).close()
            return None
        *given, pipe = descriptors
        pid = os.fork()
        if pid == 0:
            self._leave_to_parent()
            request = Request(descriptors=given, **json.loads(message))
            appear_as(request)
            _write(pipe, os.getpid())
            os.close(pipe)
            return request
        for descriptor in given:
            os.close(descriptor)
        self._pipes[pid] = pipe
        return None

    def _leave_to_parent(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (self._listener, self._ends, self._ends_writer, *self._clients.values()):
            end.close()
        for pipe in self._pipes.values():
            os.close(pipe)

    def _report_ends(self) -> None:
        """Writes the status of each child that has ended to its pipe, and closes it."""
        while self._pipes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            pipe = self._pipes.pop(pid)
            _write(pipe, status)
            os.close(pipe)

    def _is_forgotten(self) -> bool:
        """Closes the listener, unless a client has just connected."""
        with commands.connecting():
            if select.select([self._listener], [], [], 0)[0]:
                return False
            self._listener.close()
            return True


def _write(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        os.write(pipe, f"{number}\n".encode())


def appear_as(request: Request) -> None:
    """Gives this process its environment, its session, and what /proc shows of it, as far as there is room."""
    os.environ.clear()  # until here, the C library reads the environment where /proc does
    os.environ.update(request.environment)
    if request.has_own_session:
        os.setsid()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin_words, end_words, begin_environment, end_environment = map(int, fields[45:49])
    variables = [f"{name}={value}" for name, value in request.environment.items()]
    for begin, end, texts in (
        (begin_words, end_words, request.shown),
        (begin_environment, end_environment, variables),
    ):
        shown = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, shown, min(len(shown), end - begin - 1))


def become(request: Request) -> None:
    """Turns this process into `python -m MODULE` or `python -P SCRIPT`, and runs it."""
    for number, descriptor in enumerate(request.descriptors[:NUM_STANDARD]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.cwd)
    commands.join(request.run, MODULES)
    commands.fork_starts()
    if request.environment.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[0] = request.cwd
    given = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in given if path and path not in sys.path]
    sys.argv[1:] = [*request.arguments, *map(str, request.descriptors[NUM_STANDARD:])]
    status = 0
    try:
        if request.module.endswith(SCRIPT_SUFFIX):
            sys.argv[0] = request.module
            runpy.run_path(request.module, run_name="__main__")
        else:
            runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise  # the interpreter prints what it is
        status = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(status)  # the interpreter reports it as that of any command
    os._exit(status & 0xFF)


def main() -> None:
    """Imports what is slow to import, and serves."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    for module in MODULES:
        # A package that is not installed: a command that needs it says so.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    if display := sys.modules.get("genesis.cli.progress"):
        display.BEGIN_SECONDS = math.inf  # on a busy machine, any stage may take long enough for a line
    fork_writers()  # of commands that train
    gc.freeze()  # what is imported is nobody's garbage: children neither look at it nor copy its pages
    request = Server(listener).serve()
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()
