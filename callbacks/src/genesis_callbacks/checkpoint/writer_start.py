"""Starts writer processes, and carries messages between a trainer and its writer, with file descriptors.

Both ends are processes of one run on one machine, so that a pickle is safe here; nothing in it is read from a file.
Imports no torch: a writer can be started before its trainer has imported anything.
"""

import contextlib
import fcntl
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

READY = "ready"
"""A writer's first message."""
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that the writer ignores: a launcher sends them to all processes of a run, and a running save must not end."""

_HEADER = struct.Struct("<Q")
_MAX_DESCRIPTORS = 2  # a buffer and a lock
_ORPHAN_POLL_MS = 500
_WRITER_MODULE = "genesis_callbacks.checkpoint.writer"
_OWN_NAME = Path("/proc/self/comm")
_WRITER_NAME = "genesis-writer"
"""The name by which Genesis recognises a forked writer."""
_OWN_DESCRIPTORS = Path("/proc/self/fd")


class Channel:
    """One end of a connection. One thread at a time sends, one receives.

    Args:
        end: A connected stream socket of the Unix family; the channel closes it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Any, descriptors: Sequence[int] = (), timeout_seconds: float | None = None) -> None:
        """Sends a message and copies of descriptors.

        Raises:
            TimeoutError: The other end did not read in time.
            OSError: The other end is gone.
        """
        data = pickle.dumps(message)
        self._socket.settimeout(timeout_seconds)
        whole = memoryview(_HEADER.pack(len(data)) + data)
        # The kernel delivers descriptors with the first bytes of the same call, so they come with the header, which is
        # read by the one call that can receive them.
        num_sent = socket.send_fds(self._socket, [whole], descriptors)
        self._socket.sendall(whole[num_sent:])

    def receive(
        self, timeout_seconds: float | None = None, is_orphan: Callable[[], bool] | None = None
    ) -> tuple[Any, list[int]]:
        """Returns the next message and the descriptors that came with it, which belong to the caller.

        Args:
            timeout_seconds: Limit of the wait for each piece.
            is_orphan: Returns whether the process at the other end is gone. No end of file shows that if a forked child
                of that process has a copy of the end, and the process may have been killed within a message.

        Raises:
            TimeoutError: No message arrived in time.
            EOFError: The other end is gone, or its process.
        """
        self._socket.settimeout(timeout_seconds)
        try:
            self._wait(is_orphan)
            header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, _MAX_DESCRIPTORS)
            # A stream may deliver the header in pieces; no bytes at all are the end of the connection.
            header += self._read(_HEADER.size - len(header), is_orphan, is_begun=bool(header))
            (num_bytes,) = _HEADER.unpack(header)
            return pickle.loads(self._read(num_bytes, is_orphan, is_begun=True)), descriptors
        except ConnectionError as error:
            raise EOFError(str(error)) from error

    def _wait(self, is_orphan: Callable[[], bool] | None) -> None:
        """Waits until there is something to read, if `is_orphan` is given."""
        if is_orphan is None:
            return
        poll = select.poll()  # select itself takes no descriptor beyond 1023, and a run may have thousands
        poll.register(self._socket, select.POLLIN)
        while not poll.poll(_ORPHAN_POLL_MS):
            if is_orphan() and not poll.poll(0):  # what was sent before the death is read
                raise EOFError("the process at the other end is gone")

    def _read(self, num_bytes: int, is_orphan: Callable[[], bool] | None, *, is_begun: bool) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            if is_begun:
                self._wait(is_orphan)
            piece = self._socket.recv(num_bytes - len(data)) if is_begun else b""
            if not piece:
                raise EOFError("the other end is gone")
            data += piece
        return bytes(data)

    def has_message(self, timeout_seconds: float) -> bool:
        """Waits until there is something to read, or the other end is gone, and returns whether that came in time."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * timeout_seconds))

    def is_ended(self) -> bool:
        """Returns whether the other end is gone and all of its messages have been received."""
        if not self.has_message(0.0):
            return False
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        """Ends the connection, even if a forked child holds a copy of the descriptor; a second call does nothing."""
        # `close` alone would leave the connection open as long as any process has a copy.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def writer_environment() -> dict[str, str]:
    """Returns the trainer's environment, without accelerators, with one thread, and with the path of this package."""
    # A process that sees an accelerator may open a context there, which takes memory from training.
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
def signals_blocked() -> Iterator[None]:
    """Blocks the signals that a writer ignores, in all processes that this thread starts in the block."""
    # A mask is inherited through exec: no signal can end the writer before its own code ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_writer(end: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a writer that serves `end`, in a session of its own, and returns its process."""
    # A new interpreter, and no fork: a fork of a process with threads and an accelerator's context may deadlock.
    # multiprocessing's spawn would import the main module, and with it Lightning, for many seconds.
    process = subprocess.Popen(
        # -P: no modules from the working directory, because its files may be untrusted.
        [sys.executable, "-P", "-m", _WRITER_MODULE, str(end.fileno())],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=writer_environment(),
    )
    # The kernel ends a writer whose trainer has closed its end, until the writer watches that by itself: a writer that
    # hangs in its imports runs no code that could. A parent-death signal would follow the thread that starts it.
    with contextlib.suppress(OSError):
        fcntl.fcntl(end, fcntl.F_SETOWN, process.pid)
        fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)
    return process


def enter_session() -> None:
    """Gives a forked child, which is to be a writer, a session and a name of its own."""
    os.setsid()
    # Its command line is that of the process that forked it. Some sandboxes have the file and let nobody write it.
    with contextlib.suppress(OSError):
        _OWN_NAME.write_text(_WRITER_NAME, encoding="ascii")


def take_channel(descriptor: int, *trainer: int) -> None:
    """Leaves a forked child its end of the channel, and no other descriptor, environment and arguments than a writer's.

    Args:
        descriptor: The writer's end.
        trainer: The trainer's process, if it is not the parent.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(descriptor, 3)  # then close the rest: a copy of the trainer's channel would hide the trainer's death
    try:
        numbers = [int(path.name) for path in _OWN_DESCRIPTORS.iterdir()]
    except OSError:
        numbers = [*range(os.sysconf("SC_OPEN_MAX"))]
    for number in numbers:
        if number > 3:
            with contextlib.suppress(OSError):
                os.close(number)
    os.environ.update(writer_environment())
    sys.argv[1:] = ["3", *map(str, trainer)]


def watch_channel_itself(end: socket.socket) -> None:
    """Ends what `start_writer` has asked of the kernel, in the writer: it watches its trainer from here on."""
    fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) & ~os.O_ASYNC)


class StartedWriter(Protocol):
    """A running writer, with the part of `subprocess.Popen` that `WriterProcess` uses."""

    pid: int

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal; None while the writer runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit status; raises `subprocess.TimeoutExpired` after the limit."""

    def kill(self) -> None:
        """Sends SIGKILL, unless the writer has ended."""


class EarlyWriter(NamedTuple):
    """A writer that has no trainer yet, and the trainer's end of its channel."""

    end: socket.socket
    process: StartedWriter


_early: list[EarlyWriter] = []


def start_writer_early(start: Callable[[socket.socket], StartedWriter]) -> None:
    """Starts the writer that the first fit of this process takes; if none takes it, it ends with this process."""
    ours, theirs = socket.socketpair()
    with theirs, signals_blocked():
        _early.append(EarlyWriter(ours, start(theirs)))


def take_early_writer() -> EarlyWriter | None:
    """Returns the writer that was started early; None if there is none, or another one has taken it."""
    return _early.pop() if _early else None
