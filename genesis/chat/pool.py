"""Worker processes that render chat templates with limits of processor time, memory and length.

A template is somebody else's program: one expression may take hours or gigabytes, and nothing interrupts it within an
interpreter. `worker.py` therefore runs it in a process that the system ends at a limit; the next request starts another
one. Limits grow with the size of the request. The memory is limited on Linux only.
"""

import atexit
import json
import os
import pickle
import select
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any, Final, NamedTuple

from genesis.base.errors import RunEndedError
from genesis.base.processes import PipedWorker

SECONDS = 2.0
"""Processor time for one answer, and for each megabyte of its request. An ordinary text takes about a millisecond."""
MEMORY_BYTES = 256 << 20
"""Memory for one answer, beyond what an idle worker has."""
MAX_CHARS = 1_000_000
"""Characters that a template may write by itself."""
_MEMORY_PER_BYTE: Final = 32
_CHARS_PER_BYTE: Final = 16
_TURNS_PER_TEXT: Final = 100
"""To lay out a conversation, it is rendered again for each turn; so many turns get the time of one answer."""
_CLOCK_PER_PROCESSOR: Final = 30.0
"""Seconds that a busy machine may take for a second of processor time."""
_NUM_WORKERS: Final = 4

OUT_OF_MEMORY: Final = 77
"""The exit status of a worker whose template needs more memory."""
_CRASHES: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
LIMITS: Final = struct.Struct("dqq")
"""What precedes a request: seconds of processor time, bytes of memory, characters of a text."""


class Request(NamedTuple):
    """A function of `genesis.chat.worker`, the template that it gets, and its further arguments."""

    template: str
    name: str
    today: date | None
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Answer(NamedTuple):
    """What a function returned, or why there is no result.

    Args:
        result: The result, in the types of JSON.
        mistake: The message of a `UserError`; None for a result.
        is_of_conversation: Whether the mistake concerns one conversation.
        limit: What the template does that it may not; None within the limits.
    """

    result: Any = None
    mistake: str | None = None
    is_of_conversation: bool = False
    limit: str | None = None


class TemplatePool:
    """Answers requests by worker processes, which start when they are needed. Several threads may ask at once.

    Workers end with this process, however it ends; a process that is forked from it has workers of its own.

    Args:
        num_workers: How many requests are answered at a time; further ones wait.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lent: set[PipedWorker] = set()
        self._free: list[PipedWorker] = []
        self._changed = threading.Condition()
        # The kernel ends a worker with the thread that started it: this one ends with the process.
        self._starter = ThreadPoolExecutor(1, "start-chat-workers")
        self._num_ends = 0
        self._is_watched = False

    def ask(self, request: Request) -> Answer:
        """Returns the answer to a request.

        Raises:
            RunEndedError: A worker cannot run, or `end` was called meanwhile.
        """
        try:
            payload = pickle.dumps(request)
        except RecursionError:
            return Answer(mistake="the conversation is nested too deeply; flatten it", is_of_conversation=True)
        share = len(payload) / 1e6
        seconds = SECONDS * (1 + share)
        if request.function == "lay_out":
            seconds *= 1 + len(request.arguments[0]) / _TURNS_PER_TEXT
        num_bytes = MEMORY_BYTES + _MEMORY_PER_BYTE * len(payload)
        num_chars = MAX_CHARS + _CHARS_PER_BYTE * len(payload)
        message = LIMITS.pack(seconds, num_bytes, num_chars) + payload
        num_ends, status = self._num_ends, 0
        for _ in range(self._num_workers + 1):  # idle workers may all have been killed from outside
            worker = self._take(num_ends)
            answer: bytes | None = b""
            try:
                answer = _exchange(worker, message, seconds * _CLOCK_PER_PROCESSOR)
            except (EOFError, OSError):
                status = worker.process.wait()
            finally:
                self._give_back(worker, is_idle=bool(answer))
            if answer:
                return Answer(*json.loads(answer))
            if answer is None or status == -signal.SIGPROF:
                return Answer(limit=f"takes more than {seconds:.2g} s of processor time")
            if status == OUT_OF_MEMORY:
                return Answer(limit=f"needs more than {num_bytes >> 20:,} MB of memory")
            if -status in _CRASHES:
                return Answer(limit=f"crashes Python by {signal.Signals(-status).name}")
        self._check_wanted(num_ends)
        raise RunEndedError(
            f"the process that renders chat templates ended {worker.describe_end()}; run the command again"
        )

    def end(self) -> None:
        """Ends all workers. Requests without an answer fail; later ones start workers again."""
        with self._changed:
            self._num_ends += 1
            for worker in self._lent:
                worker.process.kill()
            while self._free:
                self._free.pop().end()
            self._changed.notify_all()

    def _take(self, num_ends: int) -> PipedWorker:
        with self._changed:
            self._changed.wait_for(lambda: len(self._lent) < self._num_workers or self._num_ends != num_ends)
            self._check_wanted(num_ends)
            worker = self._free.pop() if self._free else self._start()
            self._lent.add(worker)
            return worker

    def _start(self) -> PipedWorker:
        if not self._is_watched:
            os.register_at_fork(after_in_child=self._disown)
            atexit.register(self.end)
            self._is_watched = True
        return self._starter.submit(PipedWorker, "genesis.chat.worker").result()

    def _check_wanted(self, num_ends: int) -> None:
        if self._num_ends != num_ends:
            raise RunEndedError("a conversation is not rendered, because the command ends")

    def _give_back(self, worker: PipedWorker, *, is_idle: bool) -> None:
        if not is_idle:
            worker.end()
        with self._changed:
            self._lent.remove(worker)
            if is_idle:
                self._free.append(worker)
            self._changed.notify()

    def _disown(self) -> None:
        """Leaves the workers to the process from which this one was forked."""
        for worker in (*self._free, *self._lent):
            worker.process.returncode = 0  # there is nothing to wait for
        self._free, self._lent, self._changed = [], set(), threading.Condition()
        self._starter = ThreadPoolExecutor(1, "start-chat-workers")


def _exchange(worker: PipedWorker, message: bytes, wait_seconds: float) -> bytes | None:
    """Returns the answer of a worker; None if there is none in time."""
    worker.connection.send_bytes(message)
    arrival = select.poll()
    arrival.register(worker.connection.fileno(), select.POLLIN)
    return worker.connection.recv_bytes() if arrival.poll(int(wait_seconds * 1000)) else None


POOL: Final = TemplatePool(_NUM_WORKERS)
"""The workers of this process."""
