"""The trainer's side of its writer process: starts it, sends jobs, waits within a limit, and ends it."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from ..base.checkpoint_errors import SaveFailedError
from .job import Outcome, WriteJob, hold_staging
from .stage import SharedBuffer
from .writer_start import Channel, StartedWriter, signals_blocked, take_early_writer
from .writer_start import start_writer as _start_program

start_writer: Callable[[socket.socket], StartedWriter] = _start_program
"""Starts a writer that serves an end of a channel; `start_writers_by` replaces it."""

_START_SECONDS = 180.0
_QUIET_SECONDS = 20.0
_END_SECONDS = 5.0


def start_writers_by(start: Callable[[socket.socket], StartedWriter]) -> None:
    """Lets the writers of this process be started by `start`, which is given the writer's end of its channel.

    A launcher that has imported torch can fork them, so that no save waits for imports.
    """
    global start_writer
    start_writer = start


class WriterProcess:
    """One rank's writer, in a session of its own: a signal to the trainer's process group does not reach it.

    The constructor returns at once, while the writer imports torch for some seconds; `wait_ready` waits for that. One
    thread at a time uses the object.

    Attributes:
        memory_bytes: The writer's own memory at its last answer, without the copies of tensors; 0 before the first.
    """

    memory_bytes = 0

    def __init__(self) -> None:
        self._is_ready = False
        self._buffer: SharedBuffer | None = None
        early = take_early_writer()
        if early is not None:
            self._channel, self._process = Channel(early.end), early.process
            return
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        try:
            with theirs, signals_blocked():
                self._process = start_writer(theirs)
        except OSError:
            self._channel.close()
            raise

    def wait_ready(self, timeout_seconds: float = _START_SECONDS) -> None:
        """Waits until the writer has finished its imports; prints a line if that takes long.

        Raises:
            SaveFailedError: The writer ended, or did not start in time.
        """
        if self._is_ready:
            return
        if timeout_seconds > _QUIET_SECONDS and not self._channel.has_message(_QUIET_SECONDS):
            sys.stderr.write(
                f"genesis-callbacks: the writer of checkpoints (process {self._process.pid}) has not started in "
                f"{_QUIET_SECONDS:g} s: the machine is busy, or a file system is slow or dead; training waits for it "
                f"for {timeout_seconds:g} s more\n"
            )
            sys.stderr.flush()
        try:
            (_, self.memory_bytes), _ = self._channel.receive(timeout_seconds)
        except TimeoutError as error:
            raise SaveFailedError(
                f"the writer process ({self._process.pid}) did not start within {timeout_seconds:g} s; "
                "look for a slow or dead file system, or let a thread write (mode='thread')"
            ) from error
        except (EOFError, OSError) as error:
            raise SaveFailedError(
                f"the writer process ended at its start: {self._describe_end()}; start the run again, or let a thread "
                "write (mode='thread')"
            ) from error
        self._is_ready = True

    def perform(self, job: WriteJob, buffer: SharedBuffer, timeout_seconds: float) -> Outcome:
        """Sends a job and returns its outcome; kills a writer that does not answer in time.

        Args:
            job: The job.
            buffer: Has the staged parts.
            timeout_seconds: How long the writer may take.

        Raises:
            SaveFailedError: The writer died or was killed. The object cannot be used again.
        """
        self.wait_ready()
        try:
            self._send(job, buffer, timeout_seconds)
            (outcome, self.memory_bytes), _ = self._channel.receive(timeout_seconds)
        except TimeoutError as error:
            self.kill()
            still = ", but still hangs: its file system does not respond" if self.is_alive else ""
            raise SaveFailedError(
                f"the writer process did not answer: it was killed after {timeout_seconds:g} s{still}"
            ) from error
        except (EOFError, OSError) as error:
            raise SaveFailedError(f"the writer process died: {self._describe_end()}") from error
        assert isinstance(outcome, Outcome)
        return outcome

    def _send(self, job: WriteJob, buffer: SharedBuffer, timeout_seconds: float) -> None:
        num_bytes, buffers = (None, []) if buffer is self._buffer else (buffer.num_bytes, [buffer.descriptor])
        with contextlib.ExitStack() as stack:
            held = []
            # The lock travels with the job. If the trainer dies before the writer has read its message, a restart finds
            # the staging directory locked and waits. Where the directory is gone, the writer reports that.
            with contextlib.suppress(FileNotFoundError):
                held.append(stack.enter_context(hold_staging(job.staging)))
            self._channel.send((job, num_bytes), [*buffers, *held], timeout_seconds)
        self._buffer = buffer

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return "it closed its channel"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    @property
    def is_alive(self) -> bool:
        """Whether the writer process is running."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kills the writer; a writer that the kernel does not end within some seconds is abandoned."""
        # A process that waits for a dead file system is not interruptible, even by SIGKILL: hence the limit.
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._channel.close()

    def close(self) -> None:
        """Ends the writer after its current job; kills it if that takes too long, or if its start is not complete."""
        if self._is_ready:
            self._channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        if self.is_alive:
            self.kill()
