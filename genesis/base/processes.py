"""Starts every program; workers over a pipe; and processes found by a mark in their environment, to wait or kill."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Literal

from genesis.base.errors import RunEndedError, UserError
from genesis.base.parent import end_with_forker

OUT_OF_MEMORY = 77
"""The exit status of a worker whose work needs more memory."""
_PROC = Path("/proc")
_POLL_SECONDS = 0.02
_LIMITED_NAME = "GENESIS_LIMITED"
"""Environment variable that marks what `run_limited` has started."""
_NUM_LAST_LINES = 12
_NO_PROGRAM_FLAGS = 0x00200004
"""PF_KTHREAD and PF_EXITING of the kernel: such a process has no environment, and will have none."""
_LOADING_SECONDS = 2.0
"""How long the kernel may take to load a program on a busy machine."""
_LOADING_POLL_SECONDS = 0.001

ProcessKind = Literal["rank", "writer", "other"]

WRITER_NAME = "genesis-writer"
"""The name of a writer that was forked, and has the command line of the process that forked it."""
_WRITER_MODULE = b"genesis_callbacks.checkpoint.writer"
_LAUNCHER_MODULE = b"genesis.operations.supervise.launcher"
_GENESIS_MODULES = (b"genesis", b"genesis.__main__")


# ---- the start of a program


def start_program(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a program that cannot read the standard input of this process, unless `stdin` gives it another one.

    What a user types, or a script feeds, is for this process: another program might take it as a permission.

    Args:
        command: The program and its arguments.
        options: As for `subprocess.Popen`.
    """
    return subprocess.Popen(command, **{"stdin": subprocess.DEVNULL, **options})


def run_program(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Runs a program as `start_program` starts it, until it ends; the options are those of `subprocess.run`."""
    return subprocess.run(command, **{"stdin": subprocess.DEVNULL, "check": False, **options})


@contextlib.contextmanager
def without_input() -> Iterator[None]:
    """Gives the programs that other libraries start in the block an empty standard input."""
    try:
        kept = os.dup(0)
    except OSError:  # it is closed
        yield
        return
    try:
        with Path(os.devnull).open("rb") as empty:
            os.dup2(empty.fileno(), 0)
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)


# ---- workers over a pipe


class PipedWorker:
    """A process that runs `main(descriptor)` of a module, and a pipe to it that carries pickled objects.

    The worker is started as a program, not by `multiprocessing`: it is not forked from a process that may hold threads
    or a GPU, and it does not run the caller's main script again. The worker's `main` calls `serve_pipe`.

    Args:
        module: The module that the worker imports; its name identifies the worker in a list of processes.
        has_group: Whether it starts a group of processes, which ends with it: it runs code that may start some, or that
            may never give back the interpreter.
        has_fixed_hashes: Whether sets of texts have the same order in each such process, as code that must give the
            same results after a restart needs.

    Attributes:
        process: The worker process.
        connection: The caller's end of the pipe.
    """

    def __init__(self, module: str, *, has_group: bool = False, has_fixed_hashes: bool = False) -> None:
        self.connection: Connection[object, object]
        self.connection, theirs = Pipe()
        self._group: int | None = None
        options: dict[str, Any] = {"start_new_session": True} if has_group else {}
        if has_fixed_hashes:
            options["env"] = {**os.environ, "PYTHONHASHSEED": "0"}
        with theirs:
            self.process = start_worker(module, theirs.fileno(), **options)
        if has_group:
            self._group = self.process.pid

    def end(self) -> None:
        """Kills the process if it still runs, and closes the pipe; a second call has no effect."""
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
            self._group = None
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def describe_end(self) -> str:
        """Waits until the process has ended and describes its end: "with status 1"."""
        status = self.process.wait()
        if status == OUT_OF_MEMORY:
            return "because it needs more memory"
        if status == -signal.SIGPROF:
            return "at its limit of processor time"
        return f"by signal {-status} (out of memory?)" if status < 0 else f"with status {status}"


def start_worker(module: str, descriptor: int, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process that runs `main(descriptor)` of a module, with options of `subprocess.Popen`."""
    program = f"from {module} import main; main({descriptor})"
    return start_program([sys.executable, "-P", "-c", program], pass_fds=[descriptor], **options)


def serve_pipe(descriptor: int, serve: "Callable[[Connection[object, object]], None]") -> None:
    """Runs `serve` in a worker, with its end of the pipe, until it returns or the process at the other end is gone.

    The worker then exits at once, whatever it is doing. It ignores SIGINT: Ctrl-C reaches the whole process group, and
    the process at the other end decides what happens. A worker that leads a group runs `serve` in a child.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getpgrp() == os.getpid():
        _leave_to_child(descriptor)
    else:
        _watch_pipe(descriptor)
    connection: Connection[object, object] = Connection(descriptor)
    try:
        serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(1)
    except MemoryError:  # of Arrow, too; a traceback would need more, and helps nobody
        os._exit(OUT_OF_MEMORY)


def _leave_to_child(descriptor: int) -> None:
    """Returns in a forked child. This process ends the group with the pipe, or itself as the child has ended.

    While native code holds the interpreter, a thread beside it would not see the end of the pipe.
    """
    child = os.fork()
    if child == 0:
        end_with_forker()
        return
    _watch_pipe(descriptor)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _end_with_pipe(descriptor, 0)  # the child may have seen the end of the pipe first
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _watch_pipe(descriptor: int) -> None:
    threading.Thread(target=_end_with_pipe, args=(descriptor,), name="end-with-pipe", daemon=True).start()


def _end_with_pipe(descriptor: int, wait_ms: int | None = None) -> None:
    hang_up = select.poll()
    hang_up.register(descriptor, 0)
    if hang_up.poll(wait_ms):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


# ---- processes with a limit


@dataclass(frozen=True)
class Ending:
    """How a process ended that had a limit of time.

    Args:
        status: Its exit status, negative for a signal; None if it reached the limit and was killed.
        seconds: How long it ran.
        last_lines: The end of its output.
    """

    status: int | None
    seconds: float
    last_lines: tuple[str, ...]


def run_limited(
    command: Sequence[str], limit_seconds: float, log: Path, environment: Mapping[str, str] | None = None
) -> Ending:
    """Runs a command in a session of its own, and kills it with all that it has started at the limit.

    An exception in this process, as that of Ctrl-C, kills them, too. On systems without /proc, processes that have left
    the session stay.

    Args:
        command: The program and its arguments.
        limit_seconds: How long it may run.
        log: File for its output.
        environment: Variables beside those of this process.
    """
    mark = Mark(_LIMITED_NAME, f"{os.getpid()}-{time.monotonic_ns()}")
    begin_seconds = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    status: int | None = None
    with log.open("wb") as output:
        try:
            process = start_program(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), mark.name: mark.value},
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_seconds)
        finally:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if (_PROC / "self" / "environ").exists():  # finds it even if Ctrl-C came while it was started
                end_all(mark)
    lines = log.read_bytes().decode(errors="replace").splitlines()
    last = tuple(line for line in lines if line.strip())[-_NUM_LAST_LINES:]
    return Ending(status, time.monotonic() - begin_seconds, last)


def run_together(module: str, arguments: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
    """Runs a module once for each list of arguments, all at the same time. If one fails, the others are killed.

    Args:
        module: Run as `python -m`.
        arguments: Of each process.
        environments: Variables of each process beside those of this one.

    Raises:
        RunEndedError: A process failed.
    """
    processes = [
        start_program([sys.executable, "-P", "-m", module, *words], env={**os.environ, **own})
        for words, own in zip(arguments, environments, strict=True)
    ]
    try:
        while None in (found := [process.poll() for process in processes]):
            if any(found):
                break
            time.sleep(_POLL_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(found):  # before the others were killed
        number = next(number for number, status in enumerate(found) if status)
        raise RunEndedError(f"process {number} of {len(found)} ended with status {found[number]}")


# ---- processes that carry a mark


@dataclass(frozen=True)
class Mark:
    """A variable of the environment that identifies a process and, by inheritance, everything that it starts."""

    name: str
    value: str


@dataclass(frozen=True)
class MarkedProcess:
    """A live process that carries a mark.

    Args:
        pid: The process id.
        parent: The parent's process id.
        group: The process group's id.
        started: Start time in the kernel's ticks, to order processes by age.
        words: The command line.
        local_rank: The variable `LOCAL_RANK`, 0 without it.
        name: The name that the process has given itself, or the beginning of its program's.
    """

    pid: int
    parent: int
    group: int
    started: int
    words: tuple[bytes, ...]
    local_rank: int
    name: str = ""


def check_can_find(command: str) -> None:
    """Checks that this system can find processes by a mark.

    Raises:
        UserError: The system has no /proc; the message names `command`, which needs it.
    """
    if not (_PROC / "self" / "environ").exists():
        raise UserError(f"{command} needs Linux: it finds its processes in /proc")


def find_processes(mark: Mark) -> list[MarkedProcess]:
    """Returns the live processes that carry `mark`, oldest first; zombies do not count."""
    found = [_read_process(entry, mark) for entry in _PROC.iterdir() if entry.name.isdecimal()]
    return sorted((process for process in found if process is not None), key=lambda process: process.started)


def _read_process(entry: Path, mark: Mark) -> MarkedProcess | None:
    try:
        environment = dict(item.partition(b"=")[::2] for item in _read_environment(entry).split(b"\0") if b"=" in item)
        if environment.get(mark.name.encode()) != mark.value.encode():
            return None
        words = tuple((entry / "cmdline").read_bytes().split(b"\0"))
        name, fields = _read_stat(entry)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # the process has ended, or belongs to another user
    if fields[0] in (b"Z", b"X"):
        return None
    return MarkedProcess(
        pid=int(entry.name),
        parent=int(fields[1]),
        group=int(fields[2]),
        started=int(fields[19]),
        words=words,
        local_rank=int(environment.get(b"LOCAL_RANK", b"0")),
        name=name,
    )


def _read_environment(entry: Path) -> bytes:
    """Returns the environment of a process.

    While the kernel loads a program, the process has no environment yet: this waits for it, because the parent goes on
    before the kernel has finished.
    """
    found = (entry / "environ").read_bytes()
    if found:
        return found
    deadline_seconds = time.monotonic() + _LOADING_SECONDS
    while _is_loading(entry) and time.monotonic() < deadline_seconds:
        time.sleep(_LOADING_POLL_SECONDS)
    return (entry / "environ").read_bytes()


def _is_loading(entry: Path) -> bool:
    """Returns whether the kernel has not yet set where the environment of a process ends."""
    _, fields = _read_stat(entry)
    return not int(fields[6]) & _NO_PROGRAM_FLAGS and fields[0] not in (b"Z", b"X") and fields[48] == b"0"


def count_processor_ticks(pid: int) -> int:
    """Returns the processor time of a process in the kernel's ticks; 0 without /proc, and once it has ended."""
    try:
        _, fields = _read_stat(_PROC / str(pid))
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _read_stat(entry: Path) -> tuple[str, list[bytes]]:
    """Returns the name of a process and the fields of its file `stat` from the third one, the state, on."""
    # The name stands in brackets and may contain anything, also brackets and spaces.
    described, _, rest = (entry / "stat").read_bytes().rpartition(b")")
    return described.partition(b"(")[2].decode(errors="replace"), rest.split()


def find_kind(process: MarkedProcess) -> ProcessKind:
    """Returns the kind of a process: a rank of a training, a rank's writer, or another helper."""
    if _WRITER_MODULE in process.words or process.name == WRITER_NAME:
        return "writer"
    if _LAUNCHER_MODULE in process.words:  # forked from the launcher, whose command line it keeps
        return "rank"
    is_fit = b"fit" in process.words and any(name in process.words for name in _GENESIS_MODULES)
    return "rank" if is_fit else "other"


def kill_process(pid: int, mark: Mark) -> bool:
    """Sends SIGKILL to `pid` if that process still carries `mark`, and returns whether it did."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor pins the process: from here on the pid cannot be reused by another one.
        if _read_process(_PROC / str(pid), mark) is None:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def wait_until_gone(mark: Mark, limit_seconds: float) -> list[MarkedProcess]:
    """Waits until no process carries `mark`, and returns the processes that still do after the limit."""
    deadline_seconds = time.monotonic() + limit_seconds
    while (left := find_processes(mark)) and time.monotonic() < deadline_seconds:
        time.sleep(_POLL_SECONDS)
    return left


def end_all(mark: Mark) -> None:
    """Kills every process that carries `mark`, until none is left."""
    while left := find_processes(mark):
        for process in left:
            kill_process(process.pid, mark)
        time.sleep(_POLL_SECONDS)
