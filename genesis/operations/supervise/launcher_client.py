"""The supervisor's end of the launcher: starts it or finds it running, asks it to fork, and learns of ends."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from genesis.base.errors import RunEndedError
from genesis.base.processes import Mark, start_program
from genesis.operations.supervise.launch_protocol import (
    MAX_PACKET_BYTES,
    SOCKET_NAME,
    Job,
    LauncherState,
    decode_state,
    encode,
    short_path,
)

MARK_NAME: Final = "GENESIS_SUPERVISED"
"""Environment variable that marks every process of a supervised run."""

_IMPORT_LIMIT_SECONDS: Final = 600.0
_START_TRIES: Final = 3
_END_LIMIT_SECONDS: Final = 20
_POLL_SECONDS: Final = 0.02


def start_launcher(directory: Path, mark: Mark) -> "subprocess.Popen[bytes]":
    """Starts the launcher of a run, in a session of its own, with its output in a file."""
    with (directory / "launcher.log").open("wb") as log:
        return start_program(
            [sys.executable, "-P", "-m", "genesis.operations.supervise.launcher", str(directory), mark.value],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Imports would start threads of OpenBLAS, which do not survive a fork. NVML counts devices without a
            # context of CUDA, which a forked process could not use.
            env={
                **{**os.environ, mark.name: mark.value},
                **{"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            },
        )


def _wait_ended(pid: int) -> None:
    """Waits a while until a process has ended that need not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    waiting.poll(1000 * _END_LIMIT_SECONDS)
    os.close(descriptor)


class LauncherLostError(Exception):
    """The launcher has ended, and its children with it."""


class LauncherClient:
    """A connection to the launcher of a run.

    Args:
        directory: The supervisor's directory in the run's.
        mark: Identifies the processes of the run.

    Attributes:
        state: The newest state; None until the launcher has imported.
    """

    def __init__(self, directory: Path, mark: Mark) -> None:
        self._directory, self._mark = directory, mark
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.state: LauncherState | None = None

    def connect(self) -> bool:
        """Connects to a launcher that already runs; returns whether there is one of this run."""
        if not self._try_connect():
            return False
        try:
            self._wait_state(_IMPORT_LIMIT_SECONDS)
        except LauncherLostError:
            return False
        return self.state is not None and self.state.run_id == self._mark.value

    def start(self) -> None:
        """Starts a launcher and connects to it; the launcher is still importing when this returns.

        Raises:
            RunEndedError: The launcher cannot be started.
        """
        for _ in range(_START_TRIES):
            self.close()
            self.was_killed()  # leaves no zombie of the one before
            self._process = start_launcher(self._directory, self._mark)
            if self._wait_connected(self._process):
                return
            if (self._process.poll() or 0) >= 0:  # an error of its own would come again; what a signal ended need not
                break
        raise RunEndedError(f"the launcher of ranks did not start (see {self._directory / 'launcher.log'})")

    def _wait_connected(self, process: subprocess.Popen[bytes]) -> bool:
        deadline_seconds = time.monotonic() + _IMPORT_LIMIT_SECONDS
        while not self._try_connect():
            if process.poll() is not None or time.monotonic() > deadline_seconds:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def fork(self, attempt: int, jobs: Sequence[Job]) -> LauncherState:
        """Forks the children of an attempt; waits until the launcher has imported.

        Raises:
            LauncherLostError: The launcher has ended.
            RunEndedError: Children of the attempt before still run.
        """
        # A state that was sent before the request is not the answer to it.
        while self.poll(0.0):
            pass
        if self.state is None:
            self._wait_state(_IMPORT_LIMIT_SECONDS)
        self._send({"op": "fork", "attempt": attempt, "jobs": [asdict(job) for job in jobs]})
        self.state = None
        state = self._wait_state(_IMPORT_LIMIT_SECONDS)
        if state.error:
            raise RunEndedError(f"attempt {attempt} cannot be launched: {state.error}")
        return state

    def poll(self, limit_seconds: float) -> bool:
        """Waits up to `limit_seconds` for news, and returns whether there was one; `state` is then the newest.

        Raises:
            LauncherLostError: The launcher has ended.
        """
        if self._socket is None:
            raise LauncherLostError
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if not waiting.poll(1000 * limit_seconds):
            return False
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            packet = b""
        if not packet:
            self.close()
            raise LauncherLostError
        self.state = decode_state(packet)
        return True

    def was_killed(self) -> bool:
        """Returns whether the last launcher that this process has started was ended by a signal."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connection ends a moment before it does
            self._process.wait(_END_LIMIT_SECONDS)
        return (self._process.poll() or 0) < 0

    def end_children(self) -> None:
        """Kills the children that still run, and waits a while until the launcher has reported their ends.

        Without the report the launcher would refuse the next children.
        """
        deadline_seconds = time.monotonic() + _END_LIMIT_SECONDS
        with contextlib.suppress(LauncherLostError):  # its children have ended with it
            while self.poll(0.0):
                pass
            while time.monotonic() < deadline_seconds and self.state is not None:
                left = [child.pid for child in self.state.children if child.status is None]
                if not left:
                    return
                for pid in left:  # a child that has ended and is not waited for keeps its number
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.poll(1.0)

    @property
    def pid(self) -> int | None:
        """The launcher's process, if it is known."""
        if self.state is not None:
            return self.state.pid
        return None if self._process is None else self._process.pid

    def leave(self) -> None:
        """Lets the launcher end if no child is left, and waits until it has; otherwise it goes on for the next one."""
        if self._socket is None:
            return
        pid = self.pid
        has_children = self.state is not None and any(child.status is None for child in self.state.children)
        with contextlib.suppress(LauncherLostError):
            if not has_children:
                self._send({"op": "leave"})
        self.close()
        if not has_children and pid is not None:
            _wait_ended(pid)
            if self._process is not None:
                self._process.wait()
                self._process = None

    def close(self) -> None:
        """Closes the connection; the launcher goes on."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self.state = None, None

    def _try_connect(self) -> bool:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with short_path(self._directory / SOCKET_NAME) as name:
                connection.connect(name)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return False
        self._socket = connection
        return True

    def _send(self, request: object) -> None:
        packet = encode(request)
        if len(packet) > MAX_PACKET_BYTES:
            raise RunEndedError(f"the arguments and the environment of the ranks are too long: {len(packet)} bytes")
        assert self._socket is not None
        try:
            self._socket.send(packet)
        except ConnectionError as error:
            self.close()
            raise LauncherLostError from error

    def _wait_state(self, limit_seconds: float) -> LauncherState:
        deadline_seconds = time.monotonic() + limit_seconds
        while time.monotonic() < deadline_seconds:
            if self.poll(1.0) and self.state is not None:
                return self.state
        raise LauncherLostError
