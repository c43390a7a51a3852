"""Faults at a file operation of this process, by its number: a kill, an I/O error, a disk that is full or dead."""

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from genesis_callbacks.checkpoint.writer import serve
from genesis_callbacks.checkpoint.writer_process import WriterProcess
from genesis_callbacks.checkpoint.writer_start import Channel

OPERATIONS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


class OperationFault:
    """While it is entered, the n-th file operation of this process meets a fault.

    Args:
        number: Counted from 1; nothing happens where there are fewer.
        act: "kill" this process by SIGKILL, "stop" it by SIGSTOP, fail once with "EIO"; from then on: "full" writes
            nothing new, "dead" does nothing at all.
    """

    def __init__(self, number: int, act: str) -> None:
        self._left, self._act = number, act
        self._originals: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    @property
    def is_met(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> "OperationFault":
        for name in OPERATIONS:
            self._originals[name] = getattr(os, name)
            setattr(os, name, self._wrap(name, getattr(os, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(os, name, original)

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            with self._lock:
                self._left -= 1
                left = self._left
            if left == 0 and self._act in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if self._act == "kill" else signal.SIGSTOP)
            if (left == 0 and self._act == "EIO") or (left <= 0 and self._act == "dead"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            # What only takes away still works on a full disk.
            if left <= 0 and self._act == "full" and name in ("open", "write", "fsync", "mkdir"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **keywords)

        return wrapped


class ForkedProcess:
    """A forked child as `WriterProcess` handles its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.code is None:
                self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)


class FaultyWriter(WriterProcess):
    """A writer that meets a fault at its n-th file operation; forked, because an import costs seconds."""

    def __init__(self, number: int, act: str) -> None:
        ours, theirs = socket.socketpair()
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                os.close(told)
                with OperationFault(number, act) as fault:
                    serve(Channel(theirs))
                os.write(tell, b"\1" if fault.is_met else b"\0")
            finally:
                os._exit(0)  # whatever happens, a child is not the rank that it was forked from
        theirs.close()
        os.close(tell)
        self._told = told
        self._process, self._channel, self._is_ready, self._buffer = ForkedProcess(pid), Channel(ours), False, None

    def was_met(self) -> bool:
        """Says whether the fault happened; call it when the writer has ended."""
        answer = os.read(self._told, 1)
        os.close(self._told)
        return answer != b"\0"  # a killed one says nothing
