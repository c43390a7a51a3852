"""Writers that the launcher forks for ranks, which need not wait until a new process has imported torch."""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Final

from genesis.operations.supervise.launch_protocol import MAX_PACKET_BYTES, Job, encode
from genesis_callbacks.checkpoint.writer_start import enter_session, take_channel

WRITER_MODULE: Final = "genesis_callbacks.checkpoint.writer"


def run_writer(job: Job, descriptor: int, trainer: int) -> int:
    """Turns a child into the writer of a rank, which outlives it for the save in hand, and serves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    enter_session()
    output = os.open(job.output, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(job.environment)
    take_channel(descriptor, trainer)
    writer: Callable[[], None] = importlib.import_module(WRITER_MODULE).main
    writer()
    return 0


class ForkedWriter:
    """A writer that the launcher has forked for this rank, as `genesis_callbacks` uses it.

    Args:
        launcher: This rank's channel to the launcher.
        end: The writer's end of its channel to this rank.
    """

    def __init__(self, launcher: socket.socket, end: socket.socket) -> None:
        self._launcher, self._lock = launcher, threading.Lock()
        socket.send_fds(launcher, [encode({"op": "writer", "trainer": os.getpid()})], [end.fileno()])
        self.pid = int(launcher.recv(MAX_PACKET_BYTES))
        self._ends = select.poll()
        self._descriptor = os.pidfd_open(self.pid)
        self._ends.register(self._descriptor, select.POLLIN)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal; None while the writer runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit status.

        Raises:
            subprocess.TimeoutExpired: The writer still runs after the limit.
        """
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("writer", timeout or 0.0)
        return status

    def kill(self) -> None:
        """Sends SIGKILL, unless the writer has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is None and self._ends.poll(None if timeout is None else 1000 * timeout):
                while self.returncode is None:  # the launcher is about to notice the end
                    self._launcher.send(encode({"op": "status", "pid": self.pid}))
                    self.returncode = json.loads(self._launcher.recv(MAX_PACKET_BYTES))
                os.close(self._descriptor)
            return self.returncode
