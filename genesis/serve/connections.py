"""The server's connections: how many there may be, which of them gives way to a new one, and when a silent one ends.

A connection is *at work* while the model answers a complete request of it; if the answer is streamed, until its end.
Any other connection may end at any time, because its client can connect again: the oldest one makes room for a new
one. So nobody can take the last descriptor: neither connections that send nothing nor half of a request, nor clients
that do not read.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from aiohttp import StreamReader, web

from genesis.base.errors import UserError, numbered

MAX_CONNECTIONS: Final = 512
MIN_CONNECTIONS: Final = 8
MAX_HEAD_BYTES: Final = 2**16
HEAD_SECONDS: Final = 10.0
"""How long a connection may send nothing, or half of a request's head, before its first request that is permitted."""
KEEPALIVE_SECONDS: Final = 75.0
"""How long a connection may send nothing after a request that was permitted."""
_FILE_DESCRIPTORS: Final = 16
"""Descriptors that are left to files and pipes."""
_MAX_BATCH: Final = 32
"""Connections that are accepted between two looks at those that exist: they must not wait for an endless stream."""
_SWEEP_SECONDS: Final = 0.25
_RETRY_SECONDS: Final = 0.1
_NO_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_HEAD_ENDS: Final = (b"\n\r\n", b"\n\n")
_HEAD_END_BYTES: Final = max(map(len, _HEAD_ENDS))
_UNPRINTABLE: Final = re.compile(rb"\A\s*[^\r\n]*?[^\t\r\n -~]")
"""A first line that is no HTTP, such as TLS's; aiohttp would quote it in its answer."""
_BAD: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_BUSY: Final = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

_log = logging.getLogger(__name__)


def count_connections() -> int:
    """Returns how many connections the server may have: the process's limit of descriptors leaves room for files.

    Raises:
        UserError: The limit leaves room for too few.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else limit - _count_open() - _FILE_DESCRIPTORS
    if room < MIN_CONNECTIONS:
        raise UserError(
            f"the limit of open files is {limit}, which leaves room for {numbered(max(0, room), 'connections')}: raise "
            f"it to at least {limit + MIN_CONNECTIONS - room}, for example by `ulimit -n 1024`"
        )
    return min(MAX_CONNECTIONS, room)


def _count_open() -> int:
    return sum(1 for _ in Path("/dev/fd").iterdir())


class Connection(asyncio.Protocol):
    """A connection, and what decides whether it may stay.

    It collects the head of its first request by itself: connections that never send one cost next to nothing. Then it
    passes all events on to aiohttp.

    Args:
        sock: The accepted socket.
        client: The client, as `find_client` names it.
        owner: What has accepted the connection.
    """

    def __init__(self, sock: socket.socket, client: str, owner: "Connections") -> None:
        self._sock: socket.socket | None = sock
        self.client, self._owner = client, owner
        self._inner: asyncio.Protocol  # of aiohttp, once the head of the first request has come
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()
        self.is_known = False
        """Whether a request of it was permitted."""
        self._is_at_work = False
        self._is_in_request = False
        self._body: StreamReader | None = None  # of the last request, which may be answered before it has come
        self._num_head_bytes = 0
        self._since_seconds = time.monotonic()  # when it was opened or last answered, or its next request's first byte
        self._stalled_seconds: float | None = None

    def begin(self) -> None:
        """Begins to read."""
        assert self._sock is not None
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._receive_head, self._sock)
        self._receive_head(self._sock)  # a request that has come already is not lost if the connection must give way

    @property
    def can_give_way(self) -> bool:
        """Whether it may end in favour of another one."""
        return (self._sock or self._transport) is not None and (
            not self._is_at_work or self._stalled_seconds is not None
        )

    @property
    def has_head(self) -> bool:
        """Whether the head of its first request has come."""
        return self._sock is None

    @contextlib.contextmanager
    def request(self, body: StreamReader) -> Iterator[None]:
        """Notes that a request, whose head is complete, is handled within the `with`; `body` is its content."""
        self._is_in_request, self._body = True, body
        try:
            yield
        finally:
            self._is_in_request, self._num_head_bytes, self._since_seconds = False, 0, time.monotonic()
            self._owner.make_youngest(self)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Notes that a complete request is answered within the `with`."""
        self._is_at_work = True
        try:
            yield
        finally:
            self._is_at_work = False

    def is_overdue(self, max_write_seconds: float) -> bool:
        """Returns whether the client has been silent, or has not read, for too long."""
        now = time.monotonic()
        if self._stalled_seconds is not None:
            return now - self._stalled_seconds > max_write_seconds
        is_waiting = self.is_known and not self._num_head_bytes
        limit_seconds = KEEPALIVE_SECONDS if is_waiting else HEAD_SECONDS
        return not self._is_in_request and now - self._since_seconds > limit_seconds

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._sock is not None:
            self._release().close()
            self._owner.forget(self)
        elif self._transport is not None:
            self._transport.abort()

    def _release(self) -> socket.socket:
        assert self._sock is not None
        sock, self._sock = self._sock, None
        asyncio.get_running_loop().remove_reader(sock.fileno())
        return sock

    def _receive_head(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(MAX_HEAD_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        begin = max(0, len(self._head) - _HEAD_END_BYTES)
        self._head += data
        if _UNPRINTABLE.match(self._head):
            with contextlib.suppress(OSError):
                sock.send(_BAD)
            self.abort()
        elif any(self._head.find(end, begin) >= 0 for end in _HEAD_ENDS):
            self._inner = self._owner.build_protocol()
            self._owner.start(self._release(), self)
        elif not data or len(self._head) > MAX_HEAD_BYTES:
            self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Is called by the loop when the head of the first request has come, as the further methods."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._inner.connection_made(transport)
        head, self._head = bytes(self._head), bytearray()
        self.data_received(head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Counts it no more."""
        self._owner.forget(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Ends it if the head of a request is too long."""
        if not self._is_in_request and (self._body is None or self._body.is_eof()):
            if self._num_head_bytes > MAX_HEAD_BYTES:  # aiohttp itself would keep a megabyte of headers
                self.abort()
                return
            if not self._num_head_bytes and self.is_known:
                self._since_seconds = time.monotonic()
            self._num_head_bytes += len(data)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Is called when the client sends no more."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Is called when the client leaves its answer unread."""
        self._stalled_seconds = time.monotonic()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Is called when the client reads again."""
        self._stalled_seconds = None
        self._inner.resume_writing()


def find_connection(request: web.Request) -> Connection:
    """Returns the connection of a request.

    Raises:
        ConnectionResetError: The client has disconnected.
    """
    if request.transport is None:
        raise ConnectionResetError("the client has disconnected")
    found = request.transport.get_protocol()
    assert isinstance(found, Connection)
    return found


def find_client(address: str) -> str:
    """Returns what counts as one client: an address, or the network of an IPv6 address, which one machine can have.

    >>> [find_client(address) for address in ("127.0.0.1", "::ffff:10.0.0.1", "2001:db8::1:2")]
    ['127.0.0.1', '10.0.0.1', '2001:db8::']
    """
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.IPv6Address(int(found) >> 64 << 64))


class Connections:
    """Accepts the connections of a listening socket, and ends those that are overdue or in excess.

    Args:
        sock: The listening socket.
        build_protocol: Builds aiohttp's protocol of a connection.
        max_connections: The largest number of connections; one client address may have half of them.
        max_write_seconds: Returns how long a client may leave its answer unread.
    """

    def __init__(
        self,
        sock: socket.socket,
        build_protocol: Callable[[], asyncio.Protocol],
        max_connections: int,
        max_write_seconds: Callable[[], float],
    ) -> None:
        self._sock, self.build_protocol = sock, build_protocol
        self._max, self._max_of_client = max_connections, max(1, max_connections // 2)
        self._batch = max(1, min(_MAX_BATCH, max_connections // 8))
        self._max_write_seconds = max_write_seconds
        self._loop = asyncio.get_running_loop()
        self._clients: dict[str, dict[Connection, None]] = {}  # the oldest first
        self._num_open = 0
        self._starting: set[asyncio.Task[None]] = set()
        self._is_closed = False
        sock.setblocking(False)
        self._listen()
        self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    def close(self) -> None:
        """Accepts no more connections, and ends those that are not at work."""
        self._is_closed = True
        self._sweeper.cancel()
        self._loop.remove_reader(self._sock.fileno())
        for connection in self._all():
            if connection.can_give_way:
                connection.abort()

    def make_youngest(self, connection: Connection) -> None:
        """Makes a connection, which was answered, the last of its client that gives way."""
        of_client = self._clients.get(connection.client, {})
        if connection in of_client:
            del of_client[connection]
            of_client[connection] = None

    def _all(self) -> list[Connection]:
        return [connection for of_client in self._clients.values() for connection in of_client]

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(self._batch):
            try:
                accepted, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    raise
                _log.warning("a connection waits, because no file descriptor is free (%s)", error.strerror)
                self._make_room(self._largest())
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(_RETRY_SECONDS, self._listen)
                return
            accepted.setblocking(False)
            client = find_client(address[0])
            if self._has_room(client):
                self._open(accepted, client)
            else:
                with contextlib.suppress(OSError):
                    accepted.send(_BUSY)
                accepted.close()

    def _has_room(self, client: str) -> bool:
        """Returns whether there is room for one more connection of a client, after another one has given way."""
        if len(self._clients.get(client, ())) >= self._max_of_client:
            return self._make_room(client)
        return self._num_open < self._max or self._make_room(self._largest())

    def _largest(self) -> str:
        return max(self._clients, key=lambda client: len(self._clients[client]), default="")

    def _make_room(self, client: str) -> bool:
        """Ends the oldest connection of a client that may give way; those without a permitted request come first."""
        of_client = self._clients.get(client, {})
        oldest = next((one for one in of_client if not one.has_head), None)
        oldest = oldest or next((one for one in of_client if not one.is_known and one.can_give_way), None)
        oldest = oldest or next((one for one in of_client if one.can_give_way), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.abort()
        return True

    def _open(self, accepted: socket.socket, client: str) -> None:
        connection = Connection(accepted, client, self)
        self._clients.setdefault(client, {})[connection] = None
        self._num_open += 1
        connection.begin()

    def start(self, accepted: socket.socket, connection: Connection) -> None:
        """Gives the socket of a connection to the loop."""
        task = self._loop.create_task(self._start(accepted, connection))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:
            accepted.close()
            self.forget(connection)
        if connection not in self._clients.get(connection.client, {}):
            connection.abort()  # it had to give way before the loop had it

    def forget(self, connection: Connection) -> None:
        """Counts a connection no more."""
        of_client = self._clients.get(connection.client, {})
        if connection in of_client:
            del of_client[connection]
            self._num_open -= 1
        if not of_client:
            self._clients.pop(connection.client, None)

    def _sweep(self) -> None:
        max_write_seconds = self._max_write_seconds()
        for connection in self._all():
            if connection.is_overdue(max_write_seconds):
                self.forget(connection)
                connection.abort()
        self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
