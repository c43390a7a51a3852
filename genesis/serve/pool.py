"""Decides which models are loaded and which requests wait. Only this module refuses requests for lack of capacity."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from genesis.base.errors import UserError
from genesis.generate.load import Loaded
from genesis.serve.catalogue import Entry
from genesis.serve.errors import busy, stopping
from genesis.serve.worker import Worker

_Key = tuple[str, str]


@dataclass(frozen=True)
class Limits:
    """Limits on what the server does at the same time.

    Args:
        max_concurrent: Texts that one model generates together.
        max_queue: Texts that may wait for a row in a batch or for their model; further requests get status 429. One
            client may have three quarters of them.
        max_models: Models in memory.
        max_request_seconds: Time from a request's arrival to its last token.
        max_write_seconds: Time that the server waits for a client that does not read.
        prefix_bytes: Bytes of computed beginnings of prompts that all models keep together, each up to an equal share;
            0 to compute all prompts.

    Raises:
        UserError: A limit is too small.
    """

    max_concurrent: int = 16
    max_queue: int = 64
    max_models: int = 2
    max_request_seconds: float = 600.0
    max_write_seconds: float = 30.0
    prefix_bytes: int = 500_000_000

    def __post_init__(self) -> None:
        for name, least in (("max_concurrent", 1), ("max_queue", 0), ("max_models", 1), ("prefix_bytes", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least {least}")
        for name in ("max_request_seconds", "max_write_seconds"):
            if not getattr(self, name) > 0.0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0")


class _Seat:
    """A slot in memory and the model in it."""

    def __init__(self, entry: Entry, worker: Worker) -> None:
        self.entry, self.worker, self.num_leases = entry, worker, 0


class ModelPool:
    """Lends loaded models to requests. All calls must come from the event loop's thread.

    A new model replaces the model that no request has borrowed for the longest time. While all models are borrowed,
    requests for further models wait in order of arrival, and no later request overtakes a waiting one.

    Args:
        load: Loads a model; called in the worker's thread.
        limits: How many models may be loaded, and how many texts may wait.
    """

    def __init__(self, load: Callable[[Entry], Loaded], limits: Limits) -> None:
        self._load, self._limits = load, limits
        self._seats: OrderedDict[_Key, _Seat] = OrderedDict()
        self._line: deque[tuple[Entry, asyncio.Future[_Seat]]] = deque()
        self._num_admitted: dict[_Key, int] = {}
        self._of_client: dict[str, Counter[_Key]] = {}
        self._ended: list[Worker] = []
        self._is_closed = False

    @asynccontextmanager
    async def lend(self, entry: Entry, num_texts: int, client: str) -> AsyncIterator[Worker]:
        """Lends the model of `entry`, loaded, to a request of `num_texts` texts of a client.

        Raises:
            ApiError: Too many texts wait already, or the server is shutting down.
            UserError: The model cannot be loaded.
        """
        key = _key(entry)
        self._admit(entry, num_texts, client)
        try:
            seat = await self._take_seat(entry)
            try:
                # All requests for a model wait for one future, which a client that disconnects must not cancel.
                await asyncio.shield(seat.worker.loaded)
                yield seat.worker
            finally:
                seat.num_leases -= 1
        finally:
            self._num_admitted[key] -= num_texts
            if not self._num_admitted[key]:
                del self._num_admitted[key]
            of_client = self._of_client[client]
            of_client[key] -= num_texts
            if not of_client.total():
                del self._of_client[client]
            # Last: the slot and the rows that this request leaves may be what the head of the queue waits for.
            self._advance()

    @property
    def num_waiting(self) -> int:
        """The number of texts that wait for a row in a batch or for their model."""
        return _count_waiting(self._num_admitted, self._seats.keys(), self._limits.max_concurrent)

    def status(self) -> dict[str, Any]:
        """Returns the loaded models and their load, in plain JSON types."""
        return {
            "models": [
                {
                    "id": seat.entry.id,
                    "is_loaded": seat.worker.loaded.done(),
                    "num_busy": seat.worker.num_busy,
                    "num_waiting": seat.worker.num_waiting,
                    **_describe_memory(seat.worker),
                }
                for seat in self._seats.values()
            ],
            "num_texts": sum(self._num_admitted.values()),
            "num_waiting": self.num_waiting,
            "max_concurrent": self._limits.max_concurrent,
            "max_queue": self._limits.max_queue,
            "max_models": self._limits.max_models,
        }

    def close(self) -> None:
        """Stops all models: every active text receives an error."""
        self._is_closed = True
        for seat in self._seats.values():
            seat.worker.stop()
        while self._line:
            _, future = self._line.popleft()
            if not future.done():
                future.set_exception(stopping())

    def join(self) -> None:
        """Waits until all worker threads have ended."""
        for worker in [*self._ended, *(seat.worker for seat in self._seats.values())]:
            worker.join()

    def _admit(self, entry: Entry, num_texts: int, client: str) -> None:
        if self._is_closed:
            raise stopping()
        key = _key(entry)
        seated = self._seats.keys() | ({key} if self._can_seat(key) else set())
        admitted = {**self._num_admitted, key: self._num_admitted.get(key, 0) + num_texts}
        limits = self._limits
        of_client = self._of_client.get(client, Counter()) + Counter({key: num_texts})
        most = limits.max_queue - limits.max_queue // 4
        if _count_waiting(admitted, seated, limits.max_concurrent) > limits.max_queue:
            raise busy(f"texts that wait: {self.num_waiting}, the limit is {limits.max_queue}: retry a little later")
        if (waiting := _count_waiting(of_client, seated, limits.max_concurrent)) > most:
            raise busy(f"texts of this client that wait: {waiting}, the limit is {most}: retry as some end")
        self._num_admitted = admitted
        self._of_client[client] = of_client

    def _can_seat(self, key: _Key) -> bool:
        if self._line:  # also where the model is loaded: its requests could keep its slot from the queue for ever
            return False
        has_room = len(self._seats) < self._limits.max_models
        return key in self._seats or has_room or any(not seat.num_leases for seat in self._seats.values())

    async def _take_seat(self, entry: Entry) -> _Seat:
        if self._can_seat(_key(entry)):
            return self._seat(entry)
        future: asyncio.Future[_Seat] = asyncio.get_running_loop().create_future()
        self._line.append((entry, future))
        try:
            return await future
        except asyncio.CancelledError:
            # `_advance` has given a slot to this request, which was cancelled before it ran again and must return it.
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().num_leases -= 1
            raise

    def _seat(self, entry: Entry) -> _Seat:
        """Returns the model's slot with one more lease; the caller has checked that a slot is available."""
        key = _key(entry)
        before = None
        if key in self._seats and self._seats[key].worker.has_ended:
            before = self._remove(key)
        if key not in self._seats:
            if len(self._seats) >= self._limits.max_models:
                before = self._remove(next(other for other, seat in self._seats.items() if not seat.num_leases))
            limits = self._limits
            prefix_bytes = limits.prefix_bytes // limits.max_models
            worker = Worker(lambda: self._load(entry), limits.max_concurrent, prefix_bytes, before)
            self._seats[key] = _Seat(entry, worker)
        self._seats.move_to_end(key)
        self._seats[key].num_leases += 1
        return self._seats[key]

    def _remove(self, key: _Key) -> Worker:
        worker = self._seats.pop(key).worker
        worker.stop()
        # Its thread may be in the middle of a step or a load: `join` still has to wait for it.
        self._ended = [other for other in self._ended if other.is_running] + [worker]
        return worker

    def _advance(self) -> None:
        """Removes failed models, and gives free slots to the requests at the head of the queue."""
        for key in [key for key, seat in self._seats.items() if not seat.num_leases and seat.worker.has_ended]:
            self._remove(key)
        # While there is a queue, `_can_seat` refuses everybody, the request at its head as well.
        line, self._line = self._line, deque()
        while line:
            entry, future = line[0]
            if not future.done():
                if not self._can_seat(_key(entry)):
                    break
                future.set_result(self._seat(entry))
            line.popleft()
        self._line = line


def _describe_memory(worker: Worker) -> dict[str, int]:
    """Returns the bytes of a loaded model's weights, and how many of these were in memory already."""
    if not worker.loaded.done() or worker.loaded.cancelled() or worker.loaded.exception() is not None:
        return {}
    facts = worker.loaded.result()
    return {"weights_bytes": facts.weights_bytes, "shared_bytes": facts.shared_bytes}


def _key(entry: Entry) -> _Key:
    return str(entry.path), entry.version


def _count_waiting(num_admitted: dict[_Key, int], seated: Any, num_rows: int) -> int:
    """Returns the number of waiting texts: those beyond a loaded model's rows, and all texts of other models."""
    return sum(max(0, number - num_rows) if key in seated else number for key, number in num_admitted.items())
