"""The worker processes of `genesis data prepare`: each runs one job after another and sends the results."""

from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait

from genesis.base.errors import UserError
from genesis.base.processes import PipedWorker
from genesis.data.row_notes import BadRowsError
from genesis.data.tokenize_worker import Failure, FinishedPart, Job, Progress, Setup

_WORKER_MODULE = "genesis.data.tokenize_worker"


def run_jobs(jobs: Sequence[Job], setup: Setup, num_workers: int) -> Iterator[Progress | FinishedPart]:
    """Runs the jobs in worker processes, yields their messages as they arrive, and finally ends the processes.

    Raises:
        UserError: A job failed or a worker died; parts that other workers have finished are yielded first.
    """
    waiting = iter(jobs)
    workers: dict[Connection[object, object], PipedWorker] = {}
    try:
        for _, job in zip(range(num_workers), waiting, strict=False):
            worker = PipedWorker(_WORKER_MODULE)
            workers[worker.connection] = worker
            worker.connection.send(setup)
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
            worker.end()


def _receive(worker: PipedWorker) -> Progress | FinishedPart:
    try:
        message = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        raise UserError(
            f"a worker of data prepare ended {worker.describe_end()}; run the same command again (with fewer "
            "num_workers if memory is short): finished shards are kept"
        ) from None
    if isinstance(message, Failure):
        raise BadRowsError(message.message) if message.has_rows else UserError(message.message)
    assert isinstance(message, Progress | FinishedPart)
    return message
