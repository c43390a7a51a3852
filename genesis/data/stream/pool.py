"""The blocks of a rank, from its workers: asked for ahead, waited for when they are needed.

A block is a pure function of its job, so a killed worker costs nothing but time: another takes its place and is asked
the same again.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from threading import Condition, Thread
from typing import Final, Protocol

from genesis.data.stream.block import Block
from genesis.data.stream.worker import BlockMaker, Failure, Job, Made, Setup
from genesis.errors import UserError
from genesis.processes import PipedWorker

_JOBS_IN_FLIGHT: Final = 2
"""What a worker holds: one in its hands, and the next, so that it need not wait for it."""

_WORKER_MODULE: Final = "genesis.data.stream.worker"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MadeSoFar:
    """Tokens of the blocks that were made, and the time that went into them, of all workers together."""

    num_tokens: int = 0
    seconds: float = 0.0

    def plus(self, answer: Made) -> "MadeSoFar":
        """Returns the sum with one more block."""
        return MadeSoFar(self.num_tokens + answer.block.num_tokens, self.seconds + answer.seconds)


class BlockSupply(Protocol):
    """Where a rank gets blocks."""

    def request(self, job: Job) -> None:
        """Asks for a block that will be taken."""

    def take(self, job: Job) -> Block:
        """Returns the block; each is taken once."""

    def forget(self) -> None:
        """Drops all that was asked for and not taken."""

    def close(self) -> None:
        """Ends the processes."""

    @property
    def queue_depths(self) -> tuple[int, ...]:
        """Returns how many blocks each worker still has to make."""

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Returns the processes that work now."""

    @property
    def wait_seconds(self) -> float:
        """Returns how long `take` has waited, in all."""

    @property
    def made(self) -> "MadeSoFar":
        """Returns what all workers together have made."""

    @property
    def num_restarts(self) -> int:
        """Returns how many workers were replaced."""


class InlineSupply:
    """Makes each block when it is taken, in the caller's thread."""

    queue_depths: tuple[int, ...] = ()
    process_ids: tuple[int, ...] = ()
    num_restarts = 0

    def __init__(self, setup: Setup) -> None:
        self._maker = BlockMaker(setup)
        self.wait_seconds = 0.0
        self.made = MadeSoFar()

    def request(self, job: Job) -> None:
        """Does nothing."""

    def take(self, job: Job) -> Block:
        """Returns the block."""
        begun = time.perf_counter()
        answer = self._maker.make(job)
        self.wait_seconds += time.perf_counter() - begun
        if isinstance(answer, Made):
            self.made = self.made.plus(answer)
        return _block_of(answer)

    def forget(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


@dataclass(eq=False)
class _Worker:
    """A process and what it was given. `waiting` was not sent yet, `sent` not answered yet."""

    setup: Setup
    piped: PipedWorker = field(default_factory=lambda: PipedWorker(_WORKER_MODULE))
    waiting: deque[Job] = field(default_factory=deque)
    sent: deque[Job] = field(default_factory=deque)


class WorkerPool:
    """Makes blocks in processes; a lane stays with one, which keeps its files open.

    One thread of ours talks to the workers; any one other thread asks.

    Args:
        setups: Of each worker; its `parts` are the lanes that it serves.
        max_restarts: How many dead workers are replaced before `take` raises.
    """

    def __init__(self, setups: Sequence[Setup], max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._workers = [_Worker(setup) for setup in setups]
        self._worker_of = {key: worker for worker in self._workers for key in worker.setup.parts}
        self._changed = Condition()
        self._answers: dict[Job, Made | Failure | None] = {}
        self._error: str | None = None
        self._is_closed = False
        self._has_ended = False
        self._bell, self._heard_bell = Pipe(duplex=False)[::-1]
        self._is_ringing = False
        self.wait_seconds = 0.0
        self.made = MadeSoFar()
        self.num_restarts = 0
        self._thread = Thread(target=self._serve, name="genesis-stream", daemon=True)
        self._thread.start()

    @property
    def queue_depths(self) -> tuple[int, ...]:
        """Returns how many blocks each worker still has to make."""
        return tuple(len(worker.waiting) + len(worker.sent) for worker in self._workers)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Returns the processes that work now."""
        return tuple(worker.piped.process.pid for worker in self._workers)

    def request(self, job: Job) -> None:
        """Asks for a block; once more for the same changes nothing."""
        with self._changed:
            if job not in self._answers:
                self._answers[job] = None
                self._worker_of[job.key].waiting.append(job)
                self._ring()

    def take(self, job: Job) -> Block:
        """Returns the block, when it is there.

        Raises:
            UserError: It can't be made, or too many workers died.
        """
        self.request(job)
        begun = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._answers[job] is not None or self._has_ended)
            self.wait_seconds += time.perf_counter() - begun
            if self._answers[job] is None and self._error is not None:
                raise UserError(self._error)
            if self._answers[job] is None:
                raise RuntimeError("the workers of data.stream were closed while a block was waited for")
            answer = self._answers.pop(job)
        assert answer is not None
        return _block_of(answer)

    def forget(self) -> None:
        """Drops all that was asked for and not taken; what a worker has begun, it finishes for nothing."""
        with self._changed:
            self._answers.clear()
            for worker in self._workers:
                worker.waiting.clear()

    def close(self) -> None:
        """Ends the workers. Nothing can be asked for after it."""
        with self._changed:
            self._is_closed = True
            self._ring()
        for worker in self._workers:
            worker.piped.process.kill()
        self._thread.join()
        for worker in self._workers:
            worker.piped.end()  # one that was started meanwhile, too
        self._bell.close()
        self._heard_bell.close()

    # ---- our thread

    def _serve(self) -> None:
        try:
            self._serve_until_the_end()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _serve_until_the_end(self) -> None:
        for worker in self._workers:
            self._send(worker, worker.setup)
        while not self._is_closed and self._error is None:
            for worker in self._workers:
                self._feed(worker)
            ready = set(wait([self._heard_bell, *(worker.piped.connection for worker in self._workers)]))
            if self._heard_bell in ready:
                with self._changed:
                    self._heard_bell.recv_bytes()
                    self._is_ringing = False
            for worker in self._workers:
                if worker.piped.connection in ready:
                    self._receive(worker)

    def _feed(self, worker: _Worker) -> None:
        while True:
            with self._changed:
                if not worker.waiting or len(worker.sent) >= _JOBS_IN_FLIGHT:
                    return
                job = worker.waiting.popleft()
                worker.sent.append(job)
            self._send(worker, job)

    def _send(self, worker: _Worker, message: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead: reading from it will tell
            worker.piped.connection.send(message)

    def _receive(self, worker: _Worker) -> None:
        try:
            answer = worker.piped.connection.recv()
        except (EOFError, ConnectionResetError):
            self._replace(worker)
            return
        assert isinstance(answer, Made | Failure)
        with self._changed:
            expected = worker.sent.popleft()
            if expected != answer.job:
                raise RuntimeError(f"a worker of data.stream answered {answer.job}, but {expected} was its next job")
            if isinstance(answer, Made):
                self.made = self.made.plus(answer)
            if answer.job in self._answers:  # else it was forgotten
                self._answers[answer.job] = answer
                self._changed.notify_all()

    def _replace(self, worker: _Worker) -> None:
        worker.piped.process.kill()
        cause = worker.piped.describe_end()
        if self._is_closed:
            return
        with self._changed:
            if self.num_restarts == self._max_restarts:
                self._error = (
                    f"a worker of data.stream ended {cause}, after {self.num_restarts} others were replaced "
                    "(data.stream.max_worker_restarts); if memory is short, lower num_workers or block_tokens"
                )
                return
            self.num_restarts += 1
            worker.waiting.extendleft(reversed([job for job in worker.sent if job in self._answers]))
            worker.sent.clear()
        _logger.warning("a worker of data.stream ended %s; another one takes its place and its work", cause)
        worker.piped.end()
        worker.piped = PipedWorker(_WORKER_MODULE)
        self._send(worker, worker.setup)

    def _ring(self) -> None:
        if not self._is_ringing:
            self._is_ringing = True
            self._bell.send_bytes(b"")


def _block_of(answer: Made | Failure) -> Block:
    if isinstance(answer, Failure):
        raise UserError(answer.message)
    return answer.block
