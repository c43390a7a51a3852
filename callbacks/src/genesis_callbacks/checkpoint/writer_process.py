"""The trainer's side of its writer process: start, hand over, wait bounded, end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .channel import IGNORED_SIGNALS, Channel
from .errors import SaveFailedError
from .job import Outcome, WriteJob
from .stage import SharedBuffer

_WRITER_MODULE = "genesis_callbacks.checkpoint.writer"
_START_SECONDS = 180.0
_END_SECONDS = 5.0


def writer_environment() -> dict[str, str]:
    """The trainer's own, without accelerators, with one thread, and with this package where it was found."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """What this thread starts is deaf to the signals that a writer ignores, from its first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_writer(end: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a writer that serves `end`, in a session of its own, and returns its process."""
    return subprocess.Popen(
        # -P: the working directory, which may be a stranger's, gives no modules
        [sys.executable, "-P", "-m", _WRITER_MODULE, str(end.fileno())],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=writer_environment(),
    )


class WriterProcess:
    """One rank's writer: in a session of its own, so that no signal to the trainer's group reaches it.

    Starting takes a moment here and some seconds there; `wait_ready` waits for them. One thread at a time uses it.

    Attributes:
        memory_bytes: What it held for itself when it last answered, the copies of tensors aside; 0 before.
    """

    memory_bytes = 0

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._is_ready = False
        self._buffer: SharedBuffer | None = None
        try:
            with theirs, _signals_blocked():
                self._process = start_writer(theirs)
        except OSError:
            self._channel.close()
            raise

    def wait_ready(self, timeout_seconds: float = _START_SECONDS) -> None:
        """Waits until it has imported what it needs.

        Raises:
            SaveFailedError: It ended, or did not come up in time.
        """
        if self._is_ready:
            return
        try:
            (_, self.memory_bytes), _ = self._channel.receive(timeout_seconds)
        except TimeoutError as error:
            raise SaveFailedError(f"the writer process did not start within {timeout_seconds:g} s") from error
        except (EOFError, OSError) as error:
            raise SaveFailedError(f"the writer process ended at its start: {self._describe_end()}") from error
        self._is_ready = True

    def perform(self, job: WriteJob, buffer: SharedBuffer, timeout_seconds: float) -> Outcome:
        """Hands a job over and returns what became of it; a writer that does not answer in time is killed.

        Raises:
            SaveFailedError: The writer died or was killed. It cannot be used again.
        """
        self.wait_ready()
        try:
            if buffer is not self._buffer:
                self._channel.send((job, buffer.num_bytes), [buffer.descriptor], timeout_seconds)
                self._buffer = buffer
            else:
                self._channel.send((job, None), timeout_seconds=timeout_seconds)
            (outcome, self.memory_bytes), _ = self._channel.receive(timeout_seconds)
        except TimeoutError as error:
            self.kill()
            still = ", and hangs still: its file system does not answer" if self.is_alive else ""
            raise SaveFailedError(
                f"the writer process hung: it was killed after {timeout_seconds:g} s{still}"
            ) from error
        except (EOFError, OSError) as error:
            raise SaveFailedError(f"the writer process died: {self._describe_end()}") from error
        assert isinstance(outcome, Outcome)
        return outcome

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return "it closed its channel"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it at once; one that the kernel does not let go is left behind after some seconds."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._channel.close()

    def close(self) -> None:
        """Ends it after the job in hand; one that takes too long is killed, and one that has none yet at once."""
        if self._is_ready:
            self._channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        if self.is_alive:
            self.kill()
