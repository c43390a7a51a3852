"""The worker processes of `genesis data prepare`: each takes one job after another and sends what it made."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

from genesis.data.tokenize_worker import Failure, FinishedPart, Job, Progress, Setup
from genesis.errors import UserError


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: "Connection[object, object]"


def run_jobs(jobs: Sequence[Job], setup: Setup, num_workers: int) -> Iterator[Progress | FinishedPart]:
    """Runs the jobs in worker processes and yields their messages as they come; ends the processes.

    Raises:
        UserError: A job could not be done, or a worker died; other workers' finished parts were yielded before.
    """
    waiting = iter(jobs)
    workers: dict[Connection[object, object], _Worker] = {}
    try:
        for _, job in zip(range(num_workers), waiting, strict=False):
            worker = _start_worker(setup)
            workers[worker.connection] = worker
            worker.connection.send(job)
        busy = set(workers)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                message = _receive(workers[connection])
                yield message
                if isinstance(message, FinishedPart) and message.is_last:
                    job_or_none = next(waiting, None)
                    if job_or_none is None:
                        busy.remove(connection)
                    else:
                        connection.send(job_or_none)
    finally:
        for worker in workers.values():
            worker.connection.close()
            worker.process.kill()
            worker.process.wait()


def _start_worker(setup: Setup) -> _Worker:
    # A program of its own instead of multiprocessing: nothing is forked from a process that may hold threads, and the
    # caller's main script is not run again.
    ours, theirs = Pipe()
    with theirs:
        program = f"from genesis.data.tokenize_worker import main; main({theirs.fileno()})"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
    ours.send(setup)
    return _Worker(process, ours)


def _receive(worker: _Worker) -> Progress | FinishedPart:
    try:
        message = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        status = worker.process.wait()
        cause = f"by signal {-status} (out of memory?)" if status < 0 else f"with status {status}"
        raise UserError(
            f"a worker of data prepare ended {cause}; run the same command again (with fewer num_workers if memory is "
            "short): finished shards are kept"
        ) from None
    if isinstance(message, Failure):
        raise UserError(message.message)
    assert isinstance(message, Progress | FinishedPart)
    return message
