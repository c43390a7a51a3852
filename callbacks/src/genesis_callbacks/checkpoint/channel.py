"""Messages between a trainer and its writer: pickled, over a socket that can carry file descriptors.

Both ends are processes of one run on one machine, so that a pickle is safe here; nothing in it is read from a file.
"""

import contextlib
import pickle
import select
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

READY = "ready"
"""A writer's first message."""
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that the writer ignores: a launcher sends them to all processes of a run, and a running save must not end."""

_HEADER = struct.Struct("<Q")
_MAX_DESCRIPTORS = 2  # a buffer and a lock
_ORPHAN_POLL_MS = 500


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
