"""Runs the phases of a cleaning on datatrove's executors.

datatrove keeps a mark for each finished task, and does not run a task with a mark again. datatrove's local pool of
processes waits forever if a process is killed, so this module starts its own processes; datatrove's executor runs each
task in them.
"""

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final, Literal

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger
from tqdm import tqdm

from genesis.base.arguments import Gigabytes
from genesis.base.errors import UserError, numbered
from genesis.base.processes import PipedWorker, run_program, serve_pipe, without_input
from genesis.base.progress import Stage
from genesis_callbacks.base.locks import lock_file, open_lock
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, read_text

Executor = Literal["local", "slurm", "ray"]
_MEMORY: Final = Gigabytes(2)


@dataclass(frozen=True)
class Phase:
    """A pipeline, the number of its tasks, and its name, which no other phase of the cleaning has."""

    name: str
    pipeline: tuple[PipelineStep, ...]
    num_tasks: int


Begin = Callable[[Phase, int], contextlib.AbstractContextManager[Stage]]
"""Shows a phase, and how many of its tasks are finished, until the block ends."""


@dataclass(frozen=True)
class LocalOptions:
    """Processes on this machine.

    Args:
        workers: Number of processes: 0 for one per core; 1 runs the tasks in the command's own process. The number does
            not change the result.
    """

    workers: int = 0

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise UserError(f"local.workers {self.workers} must be at least 0 (0: one for each core)")

    @property
    def num_workers(self) -> int:
        """Returns the number of processes."""
        return self.workers or len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class SlurmOptions:
    """Jobs of a Slurm cluster, one array for each phase; each waits until the one before has succeeded.

    All nodes must see the same paths. The names are those of datatrove's executor.

    Args:
        partition: The partition.
        time: Limit of a job, as "04:00:00".
        workers: Tasks that run at the same time; -1 for no limit.
        cpus_per_task: Cores of a task.
        mem_per_cpu_gb: Memory per core, in whole GB.
        tasks_per_job: Tasks that one job of the array runs, one after another.
        qos: Quality of service.
        env_command: Shell command that makes `genesis` and datatrove's commands available on a node, as
            "source /shared/venv/bin/activate".
        sbatch_args: Further options of sbatch, as {account: name}.
    """

    partition: str = ""
    time: str = ""
    workers: int = -1
    cpus_per_task: int = 1
    mem_per_cpu_gb: Gigabytes = _MEMORY
    tasks_per_job: int = 1
    qos: str = "normal"
    env_command: str | None = None
    sbatch_args: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RayOptions:
    """Tasks of a Ray cluster: that of the environment variable RAY_ADDRESS, or a new one on this machine.

    All nodes must see the same paths; give absolute ones.

    Args:
        workers: Tasks that run at the same time; -1 for no limit.
        cpus_per_task: Cores of a task.
        mem_per_cpu_gb: Memory per core in GB.
    """

    workers: int = -1
    cpus_per_task: int = 1
    mem_per_cpu_gb: Gigabytes = _MEMORY


def check_slurm(options: SlurmOptions) -> None:
    """Checks the options that Slurm requires, before any job is submitted.

    Raises:
        UserError: No partition or no time is given, or a part of a GB.
    """
    for name in ("partition", "time"):
        if not getattr(options, name):
            raise UserError(f"executor slurm needs slurm.{name}")
    if not options.mem_per_cpu_gb.is_integer():
        raise UserError(f"slurm.mem_per_cpu_gb is {options.mem_per_cpu_gb:g}: Slurm takes whole GB, such as 4GB")


def check_ray() -> None:
    """Checks that Ray is installed.

    Raises:
        UserError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("executor ray needs ray; pip install 'genesis-lm[ray]'")


def wait_for_workers(lock: Path) -> None:
    """Waits until all workers of a killed run have ended: a worker ends by itself, and may write until it ends."""
    with _held(lock, fcntl.LOCK_EX):
        pass


def run_locally(phases: Sequence[Phase], lock: Path, logs: Path, options: LocalOptions, begin: Begin) -> None:
    """Runs the unfinished tasks of the phases, one phase after another; returns when all tasks are finished.

    Args:
        phases: The phases.
        lock: The lock file that each worker holds while it runs.
        logs: Directory of datatrove's marks, statistics and logs.
        options: The number of workers.
        begin: Begins a phase of which so many tasks are finished.

    Raises:
        UserError: A task refused its input, or a process was killed. Finished tasks are kept.
        OSError: A task could not write.
    """
    with _Workers(options.num_workers, lock) as workers:
        for phase in phases:
            executor = LocalPipelineExecutor(
                list(phase.pipeline), tasks=phase.num_tasks, workers=1, logging_dir=str(logs / phase.name)
            )
            ranks = executor.get_incomplete_ranks()
            if ranks:
                with begin(phase, phase.num_tasks - len(ranks)) as shown:
                    executor.save_executor_as_json()
                    for _ in workers.run(executor, ranks):
                        shown.advance()


def run_on_ray(phases: Sequence[Phase], logs: Path, options: RayOptions, begin: Begin) -> None:
    """Runs the unfinished tasks of the phases, one phase after another, each within `begin`.

    Raises:
        UserError: A task failed; the line names its log. Finished tasks are kept.
    """
    for phase in phases:
        with _quiet():
            executor = RayPipelineExecutor(
                list(phase.pipeline),
                tasks=phase.num_tasks,
                logging_dir=str(logs / phase.name),
                **asdict(options),
            )
        ranks = executor.get_incomplete_ranks()
        if ranks:
            with begin(phase, phase.num_tasks - len(ranks)), _quiet():
                executor.run()
            check_complete(executor, logs / phase.name)


def check_complete(executor: PipelineExecutor, folder: Path) -> None:
    """Checks that no task has failed.

    Raises:
        UserError: A task failed; the message has the last line of the first such task's log, which is its error.
    """
    failed = executor.get_incomplete_ranks()
    if failed:
        log = folder / "logs" / f"task_{failed[0]:05d}.log"
        lines = (
            [line for line in read_text(log, MAX_DOCUMENT_BYTES).splitlines() if line.strip()] if log.exists() else []
        )
        raise UserError(
            f"{len(failed):,} of {numbered(executor.world_size, 'tasks')} of {folder.name} failed: "
            f"{lines[-1] if lines else 'they left no log'} ({log}); fix the cause and run the same command again: "
            "finished tasks are kept"
        )


def submit_to_slurm(phases: Sequence[Phase], logs: Path, options: SlurmOptions) -> list[str]:
    """Submits the unfinished phases and returns the job numbers; an empty result means that all phases are finished.

    Raises:
        UserError: sbatch is not installed or refuses a job.
    """
    executors: list[SlurmPipelineExecutor] = []
    for phase in phases:
        executor = SlurmPipelineExecutor(
            list(phase.pipeline),
            tasks=phase.num_tasks,
            job_name=f"clean-{phase.name}",
            logging_dir=str(logs / phase.name),
            depends=executors[-1] if executors else None,
            **{**asdict(options), "mem_per_cpu_gb": int(options.mem_per_cpu_gb)},
        )
        executors.append(executor)
    try:
        with _quiet(), without_input():
            executors[-1].run()
    except FileNotFoundError as error:
        raise UserError(
            f"executor slurm needs the command {error.filename}; run this where jobs are submitted"
        ) from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"sbatch refused a job (status {error.returncode}); its message is printed above") from None
    return [str(executor.job_id) for executor in executors if executor.job_id != -1]


def find_running_jobs(jobs: Sequence[str]) -> list[str]:
    """Returns the Slurm jobs that are waiting or running.

    Raises:
        UserError: Slurm cannot be asked.
    """
    return [job for job in jobs if _is_running(job)]


def _is_running(job: str) -> bool:
    command = ["squeue", "--noheader", "--format=%A", f"--jobs={job}"]
    try:
        result = run_program(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(
            f"Slurm job {job} was submitted, but its state is unknown without squeue; run this where jobs are submitted"
        ) from None
    # squeue fails for the number of a job that ended long ago.
    return result.returncode == 0 and bool(result.stdout.strip())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps datatrove's log of this process off the terminal; each task has a log file."""
    logger.disable("datatrove")
    try:
        yield
    finally:
        logger.enable("datatrove")


# Processes


class _Workers:
    """Processes that run tasks. Leaving the context ends all of them."""

    def __init__(self, num_workers: int, lock: Path) -> None:
        self._num_workers = num_workers
        self._lock = lock
        self._workers: dict[Connection[object, object], PipedWorker] = {}

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.end()

    def run(self, executor: PipelineExecutor, ranks: Sequence[int]) -> Iterator[None]:
        """Runs the tasks `ranks`, in this process if one is enough, and yields after each; raises the first error."""
        if self._num_workers == 1:
            for rank in ranks:
                _raise(_run_task(deepcopy(executor), rank))
                yield
            return
        waiting = iter(ranks)
        busy: set[Connection[object, object]] = set()
        for worker, rank in zip(self._start(min(self._num_workers, len(ranks))), waiting, strict=False):
            worker.connection.send((executor, rank))
            busy.add(worker.connection)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                _receive(self._workers[connection])
                rank_or_none = next(waiting, None)
                if rank_or_none is None:
                    busy.remove(connection)
                else:
                    connection.send((executor, rank_or_none))
                yield

    def _start(self, num_workers: int) -> Iterator[PipedWorker]:
        while len(self._workers) < num_workers:
            worker = PipedWorker(__name__)
            self._workers[worker.connection] = worker
            worker.connection.send(self._lock)
        yield from self._workers.values()


def _receive(worker: PipedWorker) -> None:
    try:
        error = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        raise UserError(
            f"a worker of data clean ended {worker.describe_end()}; run the same command again (with fewer "
            "local.workers if memory is short): finished tasks are kept"
        ) from None
    _raise(error)


def _raise(error: object) -> None:
    if error is not None:
        assert isinstance(error, Exception)
        raise error


def main(descriptor: int) -> None:
    """Runs the tasks received from the connection `descriptor` until its other end is closed."""
    serve_pipe(descriptor, _serve)


def _serve(connection: "Connection[object, object]") -> None:
    lock = connection.recv()
    assert isinstance(lock, Path)
    tqdm.set_lock(threading.RLock())  # the default is a semaphore, which a killed process leaks
    with _held(lock, fcntl.LOCK_SH):
        while True:
            task = connection.recv()
            assert isinstance(task, tuple)
            connection.send(_run_task(*task))


def _run_task(executor: PipelineExecutor, rank: int) -> Exception | None:
    # datatrove also prints a task's log to stderr, where several workers would mix their lines; the log file suffices.
    with Path(os.devnull).open("w") as null, contextlib.redirect_stderr(null):
        try:
            executor._run_for_rank(rank)  # datatrove asks its executors to call this
        except (UserError, OSError) as error:
            return error
        except MemoryError:
            raise
        except Exception as error:
            return RuntimeError("".join(traceback.format_exception(error)))
        finally:
            logger.remove()
    return None


@contextlib.contextmanager
def _held(path: Path, kind: int) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:  # NFS gives a shared lock to readers only
        lock_file(file.fileno(), kind)
        yield
