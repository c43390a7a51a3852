"""A pytest plugin that forks the workers of pytest-xdist from one process that has imported the tests.

Each worker would otherwise import torch, Lightning and every test module by itself. The controller starts that process,
which collects the tests of the session once, so that their modules are imported with pytest's assertions. For each
worker, pytest-xdist starts this file as a program in place of the interpreter: it hands its stdin, stdout and stderr
over, and waits until the worker ends. Without the process, or where the imports have started threads, which a fork does
not copy, it becomes the interpreter that pytest-xdist asked for.

PYTEST_DONT_REWRITE: that process imports this file before pytest.
"""

import contextlib
import gc
import importlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

NUM_STANDARD = 3
END_SECONDS = 20.0
"""How long a worker may take to end after the session, beyond the time that pytest-xdist gives it."""
POLL_SECONDS = 0.05


def pytest_xdist_setupnodes(config: object, specs: Sequence[object]) -> None:
    """Starts the process, and makes pytest-xdist fork its workers from it."""
    address = uuid.uuid4().hex
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{address}")
    listener.listen()
    # `-c`, because ranks of multiprocessing would import the file of the main module.
    code = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import forked_workers; forked_workers.main()"
    arguments = map(str, config.invocation_params.args)  # type: ignore[attr-defined]
    command = [sys.executable, "-c", code, str(listener.fileno()), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    listener.close()

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()

    config.add_cleanup(end)  # type: ignore[attr-defined]
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-IS", __file__, address])  # type: ignore[attr-defined]


def main() -> None:
    """Collects the tests, forks a worker for each connection, and ends when the controller closes stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller and the workers
    number, *arguments = sys.argv[1:]
    listener = socket.socket(fileno=int(number))
    collect(arguments)
    if has_threads():
        return
    sys.argv[1:] = []
    workers: set[int] = set()
    connection = accept(listener, workers)
    while connection is not None:
        pid = os.fork()
        if pid == 0:
            listener.close()
            become_worker(connection)
            return
        connection.close()
        workers.add(pid)
        connection = accept(listener, workers)
    listener.close()
    end_workers(workers)


def has_threads() -> bool:
    """Returns whether there is a thread that a fork would lose."""
    names = [(task / "comm").read_text(encoding="ascii").strip() for task in Path("/proc/self/task").iterdir()]
    # jemalloc, which Arrow brings along, prepares itself for a fork, and works without its thread in the child.
    return len([name for name in names if name != "jemalloc_bg_thd"]) > 1


def collect(arguments: Sequence[str]) -> None:
    """Imports what the tests of a session import. What fails here fails in each worker, which reports it."""
    environ = dict(os.environ)
    os.environ.pop("GENESIS_CI_NOTES", None)  # this is no session of its own
    gc.disable()
    standard = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # Not captured: Lightning keeps the stderr of its import for its messages, and a captured one would be closed.
    options = ("-n0", "--dist=no", "--collect-only", "-qq", "--no-summary", "--capture=no")
    importlib.import_module("pytest").main([*arguments, *options])
    sys.stdout.flush()
    os.dup2(standard, 1)
    os.close(standard)
    os.environ.clear()
    os.environ.update(environ)
    gc.collect()
    gc.freeze()  # what is imported is nobody's garbage: workers neither look at it nor copy its pages
    gc.enable()


def accept(listener: socket.socket, workers: set[int]) -> socket.socket | None:
    """Returns the next connection, or None when the controller has ended. Removes workers that have ended."""
    while True:
        ready, _, _ = select.select([0, listener], [], [], 1.0)
        reap(workers)
        if 0 in ready:
            return None
        if ready:
            return listener.accept()[0]


def reap(workers: set[int]) -> None:
    """Removes workers that have ended."""
    for pid in [*workers]:
        if os.waitpid(pid, os.WNOHANG)[0]:
            workers.remove(pid)


def end_workers(workers: set[int]) -> None:
    """Waits for the workers, and kills those that hang."""
    deadline = time.monotonic() + END_SECONDS
    while workers and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        reap(workers)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def become_worker(connection: socket.socket) -> None:
    """Runs what pytest-xdist sends to its workers. The connection stays open until this process ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, NUM_STANDARD)
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    connection.send(b"1")
    with open(0, encoding="utf-8", closefd=False) as lines:
        source = eval(lines.readline())
    exec(source, {"__name__": "__main__", "__builtins__": __builtins__})


def stand_in(address: str, words: Sequence[str]) -> None:
    """Gives the descriptors of this process to a worker and waits until that ends; or becomes the interpreter."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{address}")
        socket.send_fds(connection, [b"1"], list(range(NUM_STANDARD)))
        if connection.recv(1):
            # The controller sees the end of a worker by these.
            os.close(0)
            os.close(1)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            connection.recv(1)
            return
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    stand_in(sys.argv[1], sys.argv[2:])
