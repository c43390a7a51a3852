"""The worker pool of a rank: requests blocks ahead of their use, and waits for them when they are needed.

A block is a pure function of its job, so a killed worker costs only time: a new worker gets the same jobs.
"""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from threading import Condition, Thread
from typing import Final, NamedTuple

from genesis.base.errors import UserError, numbered
from genesis.base.processes import PipedWorker
from genesis.data.stream.block import Block
from genesis.data.stream.worker import BlockMaker, Failure, Job, Made, Setup

_JOBS_IN_FLIGHT: Final = 2
"""Number of jobs that a worker has at a time: the current one and the next one, so that it never waits for a job."""

_WORKER_MODULE: Final = "genesis.data.stream.worker"

_logger = logging.getLogger(__name__)


class Production(NamedTuple):
    """Tokens of all blocks so far and the time spent on them, over all workers."""

    num_tokens: int = 0
    seconds: float = 0.0

    def plus(self, answer: Made) -> "Production":
        """Returns the sum with one more block."""
        return Production(self.num_tokens + answer.block.num_tokens, self.seconds + answer.seconds)


class InlineSupply:
    """Builds each block when it is taken, in the caller's thread."""

    queue_depths: tuple[int, ...] = ()

    def __init__(self, setup: Setup) -> None:
        self._maker = BlockMaker(setup)
        self.made = Production()

    def request(self, job: Job) -> None:
        """Does nothing."""

    def take(self, job: Job) -> Block:
        """Returns the block."""
        answer = self._maker.make(job)
        if isinstance(answer, Made):
            self.made = self.made.plus(answer)
        return _block_of(answer)

    def forget(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


@dataclass(eq=False)
class _Worker:
    """A process and its jobs: those in `waiting` are not sent yet, those in `sent` are not answered yet."""

    setup: Setup
    piped: PipedWorker = field(default_factory=lambda: PipedWorker(_WORKER_MODULE))
    waiting: deque[Job] = field(default_factory=deque)
    sent: deque[Job] = field(default_factory=deque)


class WorkerPool:
    """Builds blocks in processes; a lane is always served by the same process, which keeps its files open.

    A thread of the pool communicates with the workers; one other thread at a time may call `request` and `take`.

    Args:
        setups: The setup of each worker; its `parts` are the lanes that it serves.
        max_restarts: Number of dead workers that are replaced before `take` raises.
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
        self.made = Production()
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
        """Requests a block; a second request for the same block has no effect."""
        with self._changed:
            if job not in self._answers:
                self._answers[job] = None
                self._worker_of[job.key].waiting.append(job)
                self._ring()

    def take(self, job: Job) -> Block:
        """Waits for the block and returns it.

        Raises:
            UserError: The block cannot be built, or too many workers have died.
        """
        self.request(job)
        with self._changed:
            self._changed.wait_for(lambda: self._answers[job] is not None or self._has_ended)
            if self._answers[job] is None and self._error is not None:
                raise UserError(self._error)
            if self._answers[job] is None:
                raise RuntimeError("the workers of data.stream were closed during the wait for a block")
            answer = self._answers.pop(job)
        assert answer is not None
        return _block_of(answer)

    def forget(self) -> None:
        """Drops all requested blocks that were not taken; a worker finishes its current block, which is discarded."""
        with self._changed:
            self._answers.clear()
            for worker in self._workers:
                worker.waiting.clear()

    def close(self) -> None:
        """Ends the workers. No block can be requested afterwards."""
        with self._changed:
            self._is_closed = True
            self._ring()
        for worker in self._workers:
            worker.piped.process.kill()
        self._thread.join()
        for worker in self._workers:
            worker.piped.end()  # including a worker that was started meanwhile
        self._bell.close()
        self._heard_bell.close()

    # ---- the pool's thread

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
        with suppress(BrokenPipeError, ConnectionResetError):  # the worker is dead, which the next read from it reports
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
            if answer.job in self._answers:  # else the block was dropped
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
                    f"a worker of data.stream ended {cause}, after {numbered(self.num_restarts, 'others')} were "
                    "replaced (data.stream.max_worker_restarts); if memory is short, lower num_workers or block_tokens"
                )
                return
            self.num_restarts += 1
            worker.waiting.extendleft(reversed([job for job in worker.sent if job in self._answers]))
            worker.sent.clear()
        _logger.warning("a worker of data.stream ended %s; a new worker takes over its jobs", cause)
        worker.piped.end()
        worker.piped = PipedWorker(_WORKER_MODULE)
        self._send(worker, worker.setup)

    def _ring(self) -> None:
        if not self._is_ringing:
            self._is_ringing = True
            self._bell.send_bytes(b"")


BlockSupply = InlineSupply | WorkerPool
"""The source of a rank's blocks."""


def _block_of(answer: Made | Failure) -> Block:
    if isinstance(answer, Failure):
        raise UserError(answer.message)
    return answer.block
