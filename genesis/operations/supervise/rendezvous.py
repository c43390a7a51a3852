"""Where the supervisors of several nodes meet, and what they tell one another: torch's elastic rendezvous.

The machine that HOST of `--rdzv HOST:PORT` names hosts a `TCPStore` of c10d in its supervisor; the others connect to
it. This module imports torch, so that only a supervisor with `--nodes` imports it.

torch's `DynamicRendezvousHandler` forms the rounds: it counts the nodes, waits for more within a last call, gives
each its number, and forgets a node that has stopped its keep-alive. Everything else is ours: torch's agent starts
processes of its own, which would import Lightning at each restart, and restarts without a class of the end.

A store's connection answers one request at a time, so that a node has two: one for the handler, whose keep-alive must
not wait, and one for messages. Messages of a round lie under its number and are never changed:

    hello/N    what a node is: version, recipe, the run as it knows it
    token      what node 0 has written into the run's directory     seen/N   whether the node finds it there
    go         the plan of the attempt, or a refusal
    beat/N     a counter that shows that the supervisor lives       ended    a node's ranks have failed
    stop       why all ranks shall save and stop                    end/N    what is left of a node's ranks
    verdict    what follows, by node 0                              read/N   a node has read it
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from genesis.base.errors import UserError
from genesis.operations.supervise.node_options import NodeOptions

_POLL_SECONDS: Final = 0.2
_BEAT_SECONDS: Final = 0.5
_STORE_SECONDS: Final = 15
_CONNECT_SECONDS: Final = 2.0
_SILENT_SECONDS: Final = 30.0
_RUN_ID: Final = "genesis"
_KEEP_ALIVE_ATTEMPTS: Final = 4
_WRONG_ANSWERS: Final = 5
"""A store that just ends accepts a connection, too."""
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR


class StoreLostError(Exception):
    """The machine at which the nodes meet does not answer any more."""


class NotMetError(UserError):
    """HOST did not answer, or too few nodes came, within the limit."""


class _SilentError(RuntimeError):
    """What listens at the port accepts connections and does not answer."""


class _Backend(C10dRendezvousBackend):
    """A backend that can be closed, so that a thread that waits for the next round ends.

    A thread that is within torch's store when the interpreter ends would abort the process.
    """

    is_closed = False

    def get_state(self) -> tuple[bytes, Any] | None:
        """See the base class."""
        self._check()
        return super().get_state()

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """See the base class."""
        self._check()
        return super().set_state(state, token)

    def _check(self) -> None:
        if self.is_closed:
            raise RendezvousConnectionError("this node has left")


class Messages:
    """Messages of one round of nodes.

    Args:
        store: The store.
        number: A number that no other round has.
        node: This node.
        num_nodes: Number of nodes.
    """

    def __init__(self, store: Store, number: str, node: int, num_nodes: int) -> None:
        self._store = PrefixStore(f"genesis/{number}", store)
        self._lock = threading.Lock()
        self.number, self.node, self.num_nodes = number, node, num_nodes

    def put(self, key: str, content: object) -> None:
        """Writes a message.

        Raises:
            StoreLostError: The store does not answer.
        """
        with self._calls():
            self._store.set(key, json.dumps(content))

    def peek(self, key: str) -> Any:
        """Returns a message; None if there is none yet.

        Raises:
            StoreLostError: The store does not answer.
        """
        with self._calls():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def wait(self, key: str, has_ended: Callable[[], bool]) -> Any:
        """Returns a message as soon as there is one; None if `has_ended` returns True before.

        Raises:
            StoreLostError: The store does not answer.
        """
        while (content := self.peek(key)) is None:
            if has_ended():
                return self.peek(key)
            time.sleep(_POLL_SECONDS / 4)
        return content

    @contextlib.contextmanager
    def _calls(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except RuntimeError as error:  # torch's DistNetworkError and DistStoreError
                raise StoreLostError(str(error)) from error


class Watch:
    """Shows the other nodes that this one lives, and notices which of them do, in a thread of its own.

    Args:
        messages: Those of the round.
        limit_seconds: A node that is silent for so long is lost.
        find_waiting: Returns the number of nodes that wait to take part.
        max_nodes: So many may.
    """

    def __init__(
        self, messages: Messages, limit_seconds: float, find_waiting: Callable[[], int], max_nodes: int
    ) -> None:
        self._messages, self._limit, self._find_waiting = messages, limit_seconds, find_waiting
        self._may_grow = messages.num_nodes < max_nodes
        self._done = threading.Event()
        self._has_told_end = self._has_ended = self._is_watching_growth = False
        self._own_stop: str | None = None
        self.lost: set[int] = set()
        self.is_store_lost = False
        self.stop: str | None = None
        self.is_growing = False
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def has_ended(self) -> bool:
        """Returns whether the ranks of another node have failed, or it or the store is lost."""
        return self._has_ended or bool(self.lost) or self.is_store_lost

    def tell_end(self) -> None:
        """Lets the other nodes know that the ranks of this one have ended early."""
        self._has_told_end = True

    def ask_stop(self, reason: str) -> None:
        """Lets the ranks of all nodes save and stop."""
        self._own_stop = self._own_stop or reason

    def watch_growth(self) -> None:
        """Lets the ranks save and stop from now on, as soon as another node waits to take part."""
        self._is_watching_growth = True

    def is_gone(self, node: int) -> bool:
        """Returns whether a node, or the store, is lost."""
        return self.is_store_lost or node in self.lost

    def close(self) -> None:
        """Ends the thread."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        counter, seen = 0, {node: (0, time.monotonic()) for node in range(self._messages.num_nodes)}
        seen.pop(self._messages.node)
        has_put_stop = has_put_end = False
        try:
            while not self._done.is_set():
                counter += 1
                self._messages.put(f"beat/{self._messages.node}", counter)
                if self._has_told_end and not has_put_end:
                    self._messages.put("ended", self._messages.node)
                    has_put_end = True
                if self._own_stop is not None and not has_put_stop:
                    self._messages.put("stop", self._own_stop)
                    has_put_stop = True
                for node, (last, moment) in seen.items():
                    beat = self._messages.peek(f"beat/{node}") or 0
                    now = time.monotonic()
                    seen[node] = (beat, now) if beat != last else (last, moment)
                    if now - seen[node][1] > self._limit:
                        self.lost.add(node)
                self.stop = self.stop or self._messages.peek("stop")
                self._has_ended = self._messages.peek("ended") not in (None, self._messages.node)
                if self._is_watching_growth and self._may_grow and self._find_waiting() > 0:
                    self.is_growing = True
                    self.ask_stop("another node takes part")
                self._done.wait(_BEAT_SECONDS)
        except (StoreLostError, RendezvousError):
            self.is_store_lost = True


class Meeting:
    """A node's end of the rendezvous.

    Args:
        options: How the nodes meet.
        report: Prints a line.
    """

    def __init__(self, options: NodeOptions, report: Callable[[str], None]) -> None:
        self._options, self._report = options, report
        self._server: TCPStore | None = None
        self._messages_store: TCPStore | None = None
        self._handler: DynamicRendezvousHandler | None = None
        self._backend: _Backend | None = None
        self._waiting: threading.Thread | None = None
        self.address = ""
        # The ranks have a store of their own: that of a supervisor must not carry their traffic.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    @property
    def is_host(self) -> bool:
        """Whether the nodes meet at this supervisor."""
        return self._server is not None

    @property
    def interface(self) -> str | None:
        """The network interface that has this node's address; None if none is found."""
        return find_interface(self.address)

    def forget(self) -> None:
        """Closes the connections, so that `join` connects again."""
        handler, self._handler, self._messages_store = self._handler, None, None
        # A server that is ours stays: what failed is then its client.
        if handler is not None:
            # Public is only `shutdown`, which closes the rendezvous for all nodes. Left to the garbage collector, the
            # keep-alive's thread may be the one that tries to join itself.
            handler._stop_heartbeats()
        if self._backend is not None:
            self._backend.is_closed = True
        if self._waiting is not None:
            self._waiting.join(_STORE_SECONDS)
        self._backend = self._waiting = None

    def leave(self) -> None:
        """Leaves for good."""
        self.forget()
        self._server = None

    def join(self, find_stop: Callable[[], str | None], limit_seconds: float) -> tuple[Messages, RendezvousInfo] | None:
        """Waits for the other nodes and returns the round; None if this supervisor shall stop.

        Raises:
            NotMetError: Nobody has answered, or too few nodes have come.
            UserError: The port cannot be listened on, or belongs to another program.
        """
        deadline = time.monotonic() + limit_seconds
        while find_stop() is None:
            if self._handler is None:
                self._connect(find_stop, deadline, limit_seconds)
                if self._handler is None:
                    return None
            try:
                info = self._next(find_stop, deadline)
            except RendezvousError:
                self._report(f"the rendezvous at {self._options.endpoint} is lost, waiting for it")
                self.forget()
                time.sleep(_POLL_SECONDS)
                continue
            if info is None:
                break
            assert self._messages_store is not None
            try:
                number = _number_round(info)
            except RuntimeError:  # node 0 or the store is gone again
                self.forget()
                continue
            return Messages(self._messages_store, number, info.rank, info.world_size), info
        if find_stop() is not None:
            return None
        least = self._options.min_nodes
        raise NotMetError(
            f"fewer than {least} nodes came to {self._options.endpoint} within {limit_seconds:g} s: start the same "
            "command on the others, lower the least number of --nodes, or raise --rdzv_seconds"
        )

    def find_waiting(self) -> int:
        """Returns the number of nodes that wait to take part."""
        return 0 if self._handler is None else self._handler.num_nodes_waiting()

    def _next(self, find_stop: Callable[[], str | None], deadline: float) -> RendezvousInfo | None:
        """Returns the next round, which torch waits for without a way to interrupt it; None if the wait must end."""
        handler, found, failed = self._handler, [], []
        assert handler is not None

        def run() -> None:
            try:
                found.append(handler.next_rendezvous())
            except (RendezvousError, RuntimeError) as error:
                failed.append(error)

        thread = self._waiting = threading.Thread(target=run, name="rendezvous", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if thread.is_alive() and (find_stop() is not None or time.monotonic() > deadline):
                return None
        if failed:
            raise RendezvousError(str(failed[0])) from failed[0]
        return found[0]

    def _connect(self, find_stop: Callable[[], str | None], deadline: float, limit_seconds: float) -> None:
        options = self._options
        num_wrong, reported = 0, ""
        while find_stop() is None:
            has_answered = False
            try:
                if self._server is None:
                    self._server = self._host()
                with socket.create_connection((options.host, options.port), _CONNECT_SECONDS) as probe:
                    self.address, peer = probe.getsockname()[0], probe.getpeername()[0]
                if peer.startswith("127.") and self.is_host and not options.host.startswith("127."):
                    self.address = options.host  # this machine's own name for itself; others know it by HOST
                has_answered = True
                self._open(find_stop)
                return
            except (OSError, RuntimeError) as error:  # RuntimeError: torch's, from what is no store
                num_wrong += _WRONG_ANSWERS if isinstance(error, _SilentError) else has_answered
                reason = "no rendezvous yet" if has_answered else _explain(error)
            if num_wrong >= _WRONG_ANSWERS:
                raise UserError(
                    f"--rdzv {options.endpoint} answers, but is no rendezvous of genesis: give a port that no other "
                    "program uses"
                )
            if time.monotonic() > deadline:
                raise NotMetError(
                    f"--rdzv {options.endpoint} did not answer within {limit_seconds:g} s ({reason}): give the name "
                    "of one of the nodes, and start its supervisor"
                )
            if reason != reported:
                reported = reason
                self._report(f"waiting for {options.endpoint} to answer, at most {limit_seconds:g} s: {reason}")
            time.sleep(_POLL_SECONDS)

    def _host(self) -> TCPStore | None:
        """Returns the store's server, if HOST is this machine and no supervisor of it hosts it already."""
        options = self._options
        # A name may be unknown for a while: that of a pod, until the pod exists.
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                    return None
                raise UserError(f"--rdzv {options.endpoint} cannot be listened on: {error.strerror}") from error
        try:
            return TCPStore(
                options.host, options.port, is_master=True, wait_for_workers=False, timeout=_limit(), multi_tenant=False
            )
        except RuntimeError:  # another supervisor of this machine was quicker
            return None

    def _open(self, find_stop: Callable[[], str | None]) -> None:
        """Connects to the store, unless this supervisor shall stop.

        torch's client waits without a limit for a server that accepts and keeps silent: it gets a thread to wait in.

        Raises:
            RuntimeError: What answers is no store.
        """
        options = self._options
        found: list[TCPStore] = []
        failed: list[RuntimeError] = []

        def connect() -> None:
            try:
                for _ in range(2):
                    store = TCPStore(
                        options.host, options.port, is_master=False, wait_for_workers=False, timeout=_limit()
                    )
                    store.set("genesis/here", "1")
                    found.append(store)
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=connect, name="rendezvous", daemon=True)
        thread.start()
        limit = time.monotonic() + _SILENT_SECONDS
        while thread.is_alive() and find_stop() is None:
            if time.monotonic() > limit:
                raise _SilentError
            thread.join(_POLL_SECONDS)
        if failed:
            raise failed[0]
        if thread.is_alive():
            return
        first, second = found
        keep_alive = max(1, int(options.peer_seconds / _KEEP_ALIVE_ATTEMPTS))
        self._backend = _Backend(first, _RUN_ID)
        self._handler = DynamicRendezvousHandler.from_backend(
            _RUN_ID,
            first,
            self._backend,
            options.min_nodes,
            options.max_nodes,
            self.address,
            RendezvousTimeout(
                join=timedelta(days=30),
                last_call=timedelta(seconds=options.last_call_seconds),
                heartbeat=timedelta(seconds=_STORE_SECONDS),
            ),
            keep_alive,
            _KEEP_ALIVE_ATTEMPTS,
        )
        self._messages_store = second


def _number_round(info: RendezvousInfo) -> str:
    """Returns what names a round for good: torch counts from 0 again when its store is new."""
    if info.rank == 0:
        info.store.set("genesis", uuid.uuid4().hex)
    return info.store.get("genesis").decode()


def _explain(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _limit() -> timedelta:
    return timedelta(seconds=_STORE_SECONDS)


def find_interface(address: str) -> str | None:
    """Returns the network interface that has an IPv4 address; None if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without such an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def describe_difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns in which things that must be the same on all nodes two nodes differ; empty if in none. Pure."""
    names = {
        **{"version": "the version of genesis", "nodes": "--nodes", "ranks": "the number of ranks"},
        "may_skip_data": "--may_skip_data",
    }
    found = [
        f"{text} ({other.get(key)} on {other['name']}, {mine.get(key)} on {mine['name']})"
        for key, text in names.items()
        if mine.get(key) != other.get(key)  # another version may lack one
    ]
    if mine["recipe"] != other["recipe"]:
        found.append(f"the recipe (on {other['name']} and {mine['name']})")
    return ", ".join(found)
