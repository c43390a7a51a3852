"""Commands of tests in processes of their own, forked from one that has imported Lightning (`tests.forkserver`).

A forked command has a process id, signals, directory, environment, stdin, exit status and place in /proc of its own, as
one that the shell starts; only its parent is the process that it is forked from. Where a test is about starting, or
looks for the children of a process, it starts `sys.executable` instead. What a forked command starts by
`genesis.base.processes` is forked likewise, and so is a worker over a pipe; where a test looks for a worker by its
command line or among its parent's children, use the fixture `started_workers`.
"""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO, Any

from genesis.base import processes
from genesis.export.proof import PROVE_ADAPTER_MODULE, PROVE_MODULE

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL

WORKER_MODULES = (
    *("genesis.data.tokenize_worker", "genesis.data.tokenizer_training"),
    *("genesis.data.stream.worker", "genesis.data.clean.execute"),
)
MODULES = (
    *("torch.distributed.fsdp", "lightning.pytorch", "genesis.cli.fit", "genesis.cli.serve", "genesis.cli.progress"),
    *WORKER_MODULES,
)
"""What most commands and workers import."""
PROOF_MODULES = (
    "genesis.export.texts",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
)

NUM_SHOWN_BYTES = 1 << 16
"""Room for the command line, and for the environment, that /proc shows of a forked command."""

Target = int | IO[Any] | None
REPOSITORY = Path(__file__).parents[1]

start_real_worker = processes.start_worker
_run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
_modules = MODULES
_has_to_start = True
"""Whether this process starts the servers that it needs. A forked command uses those that run."""


class ForkedCommand:
    """A running command, with the methods of `subprocess.Popen` that tests use; it may be used in a `with`.

    Args:
        module: A module, or the path of a script that ends with `.py`.
        arguments: Of the command.
        cwd: Its working directory; this process's if None.
        env: Its environment; this process's if None.
        stdin: `PIPE`, or None for nothing to read.
        stdout: As for `subprocess.Popen`.
        stderr: As for `subprocess.Popen`.
        pass_descriptor: One more descriptor for it; its number becomes the last argument.
        preloaded: What the process that it is forked from has imported; chosen by the module if None.
        start_new_session: As for `subprocess.Popen`.
        shown: Its command line in /proc; that of the module if None.
    """

    def __init__(
        self,
        module: str,
        *arguments: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: Target = None,
        stderr: Target = None,
        pass_descriptor: int | None = None,
        preloaded: tuple[str, ...] | None = None,
        start_new_session: bool = False,
        shown: Sequence[str] | None = None,
    ) -> None:
        words = [*map(str, arguments)]
        self.args = ["python", "-m", module, *words] if shown is None else [*shown]
        self.returncode: int | None = None
        request = {
            "module": module,
            "arguments": words,
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "shown": self.args,
            "has_own_session": start_new_session,
            "run": _run,
        }
        self.stdout, out = _open(stdout, 1)
        self.stderr, err = (None, os.dup(out)) if stderr == STDOUT else _open(stderr, 2)
        reports, pipe = os.pipe()
        self.stdin, given = _open_stdin(stdin)
        if preloaded is None:
            preloaded = PROOF_MODULES if module in (PROVE_MODULE, PROVE_ADAPTER_MODULE) else _modules
        passed = [] if pass_descriptor is None else [pass_descriptor]
        with _connection(preloaded) as requests:
            socket.send_fds(requests, [json.dumps(request).encode()], [given, out, err, *passed, pipe])
            for descriptor in (given, out, err, pipe):
                os.close(descriptor)
            self._reports = os.fdopen(reports, "r", encoding="ascii")
            line = self._reports.readline()
        assert line, "the forkserver has ended"
        self.pid = int(line)

    def __del__(self) -> None:
        # As for `subprocess.Popen`: nobody need ask for the end of a command, but a command that runs on is a mistake.
        if "pid" in vars(self) and not self._reports.closed:
            if not self._is_reported(0.0):
                text = f"process {self.pid} still runs: {self.args}"
                warnings.warn(text, ResourceWarning, source=self, stacklevel=2)
            self._reports.close()

    def poll(self) -> int | None:
        """Returns the exit status, or None while the command runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status; waits for it."""
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def _is_reported(self, timeout: float | None) -> bool:
        # Not `select.select`: a process of many tests has descriptors beyond those that it takes.
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        return bool(poll.poll(None if timeout is None else math.ceil(1000 * timeout)))

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._is_reported(timeout):
            line = self._reports.readline()
            assert line, "the forkserver has ended"
            self.returncode = os.waitstatus_to_exitcode(int(line))
            self._reports.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the command has ended."""
        if self.poll() is None:
            # The server may reap the process at this moment, as `subprocess.Popen.send_signal` allows for, too.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns what is left to read of stdout and stderr (empty where they are no pipes); waits for the end."""
        texts = {"stdout": "", "stderr": ""}

        def read(name: str, stream: IO[str]) -> None:
            texts[name] = stream.read()

        pipes = {name: stream for name in texts if (stream := getattr(self, name)) is not None and not stream.closed}
        readers = [threading.Thread(target=read, args=pipe, daemon=True) for pipe in pipes.items()]
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for stream in pipes.values():
            stream.close()
        return texts["stdout"], texts["stderr"]

    def __enter__(self) -> "ForkedCommand":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self.communicate()


def start_genesis(*arguments: str | Path, **options: Any) -> ForkedCommand:
    """Starts `python -m genesis ARGUMENTS`; `options` are those of `ForkedCommand`."""
    return ForkedCommand("genesis", *arguments, **options)


def run_module(
    module: str, *arguments: str | Path, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m MODULE ARGUMENTS` to its end and returns status and output."""
    with ForkedCommand(module, *arguments, **{"stdout": PIPE, "stderr": PIPE, **options}) as command:
        out, err = command.communicate(timeout)
    assert command.returncode is not None
    return subprocess.CompletedProcess(command.args, command.returncode, out, err)


def start_worker(module: str, descriptor: int, **options: Any) -> Any:
    """Does what `genesis.base.processes.start_worker` does; the process has imported the module."""
    if module == "genesis.chat.worker":  # It imports little, and its memory is limited to what a bare worker needs.
        return start_real_worker(module, descriptor)
    return ForkedCommand("tests.piped_worker", module, pass_descriptor=descriptor, **options)


def fork_python(command: Sequence[str], *, text: bool = False, **options: Any) -> Any:
    """Does what `subprocess.Popen(command)` does, for a command of this interpreter that runs a module or a script.

    Another program is started, as are code of `-c`, what ends with its parent, and what writes bytes to a pipe.
    """
    python, *words = map(str, command)
    words = [word for word in words if word != "-P"]
    preloaded = options.pop("preloaded", None)
    is_known = options.keys() <= {"stdin", "stdout", "stderr", "cwd", "env", "start_new_session"}
    reads_bytes = not text and PIPE in (options.get("stdout"), options.get("stderr"))
    is_forked = is_known and not reads_bytes and python == sys.executable and "--parent" not in words
    if not is_forked or not (words[:1] == ["-m"] or "".join(words[:1]).endswith(".py")):
        return subprocess.Popen(command, text=text, **options)
    program, *arguments = words[1:] if words[0] == "-m" else words
    if options.get("stdin") == DEVNULL:
        del options["stdin"]
    return ForkedCommand(program, *arguments, preloaded=preloaded, shown=[*map(str, command)], **options)


def join(run: str, modules: Sequence[str]) -> None:
    """Makes this process a command of a run of tests, forked from the server that has imported `modules`."""
    global _run, _modules, _has_to_start
    _run, _modules, _has_to_start = run, tuple(modules), False


def fork_starts() -> None:
    """Lets `genesis.base.processes` fork the workers and programs that it would start."""
    processes.start_worker = start_worker
    processes.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _fork_or_start})  # type: ignore[assignment]


def _fork_or_start(command: Sequence[str], **options: Any) -> Any:
    try:
        return fork_python(command, **options)
    except ConnectionRefusedError:  # no server has imported what the command needs
        return subprocess.Popen(command, **options)


def run_genesis(
    *arguments: str | Path, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m genesis ARGUMENTS` to its end and returns status and output."""
    return run_module("genesis", *arguments, timeout=timeout, **options)


def _open(target: Target, standard: int) -> tuple[IO[str] | None, int]:
    """Returns the end of a pipe to read from, if one is asked for, and a descriptor for the child."""
    if target == PIPE:
        ours, theirs = os.pipe()
        return os.fdopen(ours, "r", encoding="utf-8", errors="replace"), theirs
    if target == DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    if target is None:
        return None, os.dup(standard)
    return None, os.dup(target if isinstance(target, int) else target.fileno())


def _open_stdin(target: int | None) -> tuple[IO[str] | None, int]:
    """Returns the end of a pipe to write to, if one is asked for, and a descriptor for the child."""
    if target == PIPE:
        theirs, ours = os.pipe()
        return os.fdopen(ours, "w", encoding="utf-8"), theirs
    assert target is None
    return None, os.open(os.devnull, os.O_RDONLY)


# Registered before any worker of the product, so that it ends after them: they end commands of the servers.
_at_exit = contextlib.ExitStack()
atexit.register(_at_exit.close)


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Keeps other processes from connecting to a server, or from ending as one, until the context is left."""
    with Path(__file__).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _find_address(modules: tuple[str, ...]) -> str:
    # Not in the file system, so that nothing is left of a run that is killed.
    return "\0" + hashlib.sha256(repr((_run, REPOSITORY, modules)).encode()).hexdigest()


@contextlib.contextmanager
def _connection(modules: tuple[str, ...]) -> Iterator[socket.socket]:
    """Gives a connection to the forkserver that has imported `modules`.

    A process of tests starts the server if need be, and keeps its connection. A forked command closes its own, because
    the server would otherwise wait for whatever the command leaves behind.

    Raises:
        ConnectionRefusedError: This is a forked command, and there is no such server.
    """
    if _has_to_start:
        yield _requests(modules)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours:
        ours.connect(_find_address(modules))
        yield ours


@functools.cache
def _requests(modules: tuple[str, ...]) -> socket.socket:
    """Returns a connection to the forkserver that has imported `modules`.

    The workers of a run of pytest share one. It ends when the last of them ends.
    """
    address = _find_address(modules)
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with connecting():
        try:
            ours.connect(address)
        except ConnectionRefusedError:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(address)
                listener.listen()
                ours.connect(address)
                _start_forkserver(listener.fileno(), modules)
    _at_exit.callback(ours.close)  # which comes before the wait for the server's end
    return ours


def _start_forkserver(listener: int, modules: tuple[str, ...]) -> None:
    # Its imports would start threads of OpenBLAS; after a fork there are none.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    room = NUM_SHOWN_BYTES * " "
    command = [sys.executable, "-m", "tests.forkserver", str(listener), room, *modules]
    process = subprocess.Popen(command, cwd=REPOSITORY, env={**environment, "ROOM": room}, pass_fds=[listener])
    _at_exit.callback(process.wait)
