"""Worker processes whose work has limits of processor time and memory, which the kernel enforces.

A template, or the expressions of a tokenizer, are somebody else's program: one text may take hours or gigabytes, and
nothing interrupts it within an interpreter. A worker is therefore a process that the kernel ends at a limit; the next
request starts another one. The memory is limited on Linux only.
"""

import atexit
import contextlib
import os
import resource
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from genesis.base.errors import RunEndedError
from genesis.base.parent import end_with_forker
from genesis.base.processes import OUT_OF_MEMORY, PipedWorker, count_processor_ticks, serve_pipe

_CLOCK_PER_PROCESSOR: Final = 30.0
"""Seconds that a busy machine may take for a second of processor time before the worker is looked at."""
_CRASHES: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_LIMITS: Final = struct.Struct("dq")
"""What precedes a message: seconds of processor time, bytes of memory."""
TEXTS_BYTES: Final = 8 << 30
"""Address space of a worker that reads and encodes texts; it needs about 1 GB, and 3 GB for the largest record."""
_ENCODING_SECONDS: Final = 8.0
"""To encode some texts, and for each megabyte of them, which takes about one."""
_HAS_MEMORY_LIMIT: Final = sys.platform == "linux"
_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class LimitReachedError(Exception):
    """A worker has reached a limit; the text says which: "takes more than 2 s of processor time"."""


class LimitedWorkers:
    """Answers messages by worker processes, which start when they are needed. Several threads may ask at once.

    Workers end with this process, however it ends; a process that is forked from it has workers of its own.

    Args:
        module: The module that a worker runs; its `main` calls `serve_limited`.
        num_workers: How many messages are answered at a time; further ones wait.
    """

    def __init__(self, module: str, num_workers: int) -> None:
        self._module, self._num_workers = module, num_workers
        self._lent: set[PipedWorker] = set()
        self._free: list[PipedWorker] = []
        self._changed = threading.Condition()
        # The kernel ends a worker with the thread that started it: this one ends with the process.
        self._starter = ThreadPoolExecutor(1, "start-workers")
        self._num_ends = 0
        self._is_watched = False

    def ask(self, message: bytes, seconds: float, num_bytes: int, wait_seconds: float | None = None) -> bytes:
        """Returns the answer to a message.

        Args:
            message: What the worker gets.
            seconds: Processor time for the answer.
            num_bytes: Memory for the answer, beyond what the worker has before.
            wait_seconds: How long to wait; None to wait while the worker uses processor time, however busy the machine.

        Raises:
            LimitReachedError: The answer takes more, or ends the worker.
            RunEndedError: A worker cannot run, or `end` was called meanwhile.
        """
        limited = _LIMITS.pack(seconds, num_bytes) + message
        num_ends, status = self._num_ends, 0
        for _ in range(self._num_workers + 1):  # idle workers may all have been killed from outside
            worker = self._take(num_ends)
            answer: bytes | None = b""
            try:
                if wait_seconds is None:
                    answer = _exchange(worker, limited, seconds * _CLOCK_PER_PROCESSOR, is_patient=True)
                else:
                    answer = _exchange(worker, limited, wait_seconds)
            except (EOFError, OSError):
                status = worker.process.wait()
            finally:
                self._give_back(worker, is_idle=bool(answer))
            if answer:
                return answer
            if answer is None or status == -signal.SIGPROF:
                raise LimitReachedError(f"takes more than {seconds:.2g} s of processor time")
            if status == OUT_OF_MEMORY:
                raise LimitReachedError(f"needs more than {num_bytes >> 20:,} MB of memory")
            if -status in _CRASHES:
                raise LimitReachedError(f"crashes Python by {signal.Signals(-status).name}")
        self._check_wanted(num_ends)
        raise RunEndedError(f"a process of {self._module} ended {worker.describe_end()}; run the command again")

    def end(self) -> None:
        """Ends all workers. Messages without an answer fail; later ones start workers again."""
        with self._changed:
            self._num_ends += 1
            for worker in self._lent:
                worker.process.kill()
            self._end_free()
            self._changed.notify_all()

    def end_idle(self) -> None:
        """Ends the workers that have nothing to do, with the memory that they keep."""
        with self._changed:
            self._end_free()

    def _end_free(self) -> None:
        while self._free:
            self._free.pop().end()

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
        return self._starter.submit(PipedWorker, self._module).result()

    def _check_wanted(self, num_ends: int) -> None:
        if self._num_ends != num_ends:
            raise RunEndedError("there is no answer, because the command ends")

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
        self._starter = ThreadPoolExecutor(1, "start-workers")


def _exchange(worker: PipedWorker, message: bytes, wait_seconds: float, *, is_patient: bool = False) -> bytes | None:
    """Returns the answer of a worker; None if there is none in time.

    With `is_patient` that is when the worker has used no processor time for so long: the kernel ends one that does.
    """
    worker.connection.send_bytes(message)
    arrival = select.poll()
    arrival.register(worker.connection.fileno(), select.POLLIN)
    used = 0
    while not arrival.poll(int(wait_seconds * 1000)):
        before, used = used, count_processor_ticks(worker.process.pid)
        if not is_patient or used <= before:
            return None
    return worker.connection.recv_bytes()


# ---- in the worker


def serve_limited(descriptor: int, answer: Callable[[bytes], bytes], kept_bytes: int | None = None) -> None:
    """Answers the messages of `LimitedWorkers`, each within its limits, until the process at the other end is gone.

    Args:
        descriptor: The worker's end of the pipe.
        answer: Returns what is sent back; a MemoryError ends the worker, as in `serve_pipe`.
        kept_bytes: Memory that this process may keep after an answer; with more it ends, and gives way to a new one.
            None if it may keep all.
    """
    end_with_forker()
    allow_timed_end()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def serve(connection: "Connection[object, object]") -> None:
        # The address space of this process, the quantity that is limited.
        pages = os.open(_STATM, os.O_RDONLY) if _HAS_MEMORY_LIMIT else None
        start_bytes = _count_bytes(pages)
        while kept_bytes is None or _count_bytes(pages) - start_bytes <= kept_bytes:
            message = connection.recv_bytes()
            seconds, num_bytes = _LIMITS.unpack_from(message)
            end_after(seconds)
            _limit_memory(_count_bytes(pages) + num_bytes)
            connection.send_bytes(answer(message[_LIMITS.size :]))

    serve_pipe(descriptor, serve)


def allow_timed_end() -> None:
    """Lets the kernel end this process, which another one watches, by SIGPROF."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    _allowed.add(os.getpid())


def serve_texts(descriptor: int, serve: "Callable[[Connection[object, object]], None]") -> None:
    """Does what `serve_pipe` does for a worker that reads and encodes the texts of strangers, with limits.

    Its memory has one, and `encoding` one of processor time.
    """
    allow_timed_end()
    if _HAS_MEMORY_LIMIT:
        with _STATM.open("rb") as pages:
            _limit_memory(_count_bytes(pages.fileno()) + TEXTS_BYTES)
    serve_pipe(descriptor, serve)


def count_encoding_seconds(num_bytes: int) -> float:
    """Returns the limit of processor time for encoding texts of so many bytes."""
    return _ENCODING_SECONDS * (1 + num_bytes / 1e6)


def is_limited() -> bool:
    """Whether this process is a worker that the kernel may end, whose work needs no other process."""
    return os.getpid() in _allowed


@contextlib.contextmanager
def encoding(num_bytes: int) -> Iterator[None]:
    """Limits the processor time within the `with`, which encodes texts of so many bytes, in a worker of `serve_texts`.

    The expressions of a stranger's tokenizer may take minutes for a kilobyte. In another process it has no effect.
    """
    end_after(count_encoding_seconds(num_bytes))
    try:
        yield
    finally:
        end_after(0)


def end_after(seconds: float) -> None:
    """Lets the kernel end this process after so much processor time from now; 0 takes it back.

    It has no effect in a process without `allow_timed_end`.
    """
    if is_limited():
        signal.setitimer(signal.ITIMER_PROF, seconds)  # an idle process spends none of it


_allowed: Final[set[int]] = set()


def _count_bytes(pages: int | None) -> int:
    return 0 if pages is None else int(os.pread(pages, 64, 0).split()[0]) * _PAGE_BYTES


def _limit_memory(num_bytes: int) -> None:
    if _HAS_MEMORY_LIMIT:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
