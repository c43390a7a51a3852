"""Writers that are forked from a process that has imported torch, so that they need not import it again.

A fork is safe where that process has no context of an accelerator yet, and no thread that holds a lock.
"""

import gc
import os
import signal
import socket
import subprocess
import threading
import time
import traceback
import warnings

from . import writer
from .writer_start import StartedWriter, enter_session, start_writer, take_channel

_POLL_SECONDS = 0.005


class ForkedWriter:
    """A forked child with the methods of `subprocess.Popen` that `WriterProcess` uses.

    Args:
        pid: The child.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal; None while the writer runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has waited for it, or this process ignores SIGCHLD
                    pid, status = self.pid, 0
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit status.

        Raises:
            subprocess.TimeoutExpired: The writer still runs after the limit.
        """
        deadline_seconds = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_seconds is not None and time.monotonic() > deadline_seconds:
                raise subprocess.TimeoutExpired("writer", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def kill(self) -> None:
        """Sends SIGKILL, unless the writer has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_writer(end: socket.socket) -> StartedWriter:
    """Forks a writer that serves `end`, in a session of its own and with no other descriptor, and returns its process.

    Its command line is that of the process from which it is forked. Where the system has no memory for a fork, a
    program is started.
    """
    ready, has_session = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)  # from Python 3.12 on
            pid = os.fork()
    except OSError:
        os.close(ready)
        os.close(has_session)
        return start_writer(end)
    if pid:
        os.close(has_session)
        os.read(ready, 1)  # until the child has its own session, as a process of `Popen` has when that returns
        os.close(ready)
        return ForkedWriter(pid)
    try:
        gc.freeze()  # the trainer's objects are not this process's garbage: it need not copy their pages
        enter_session()
        os.write(has_session, b"1")
        take_channel(end.fileno())
        writer.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # this process must never continue as the trainer from which it was forked
