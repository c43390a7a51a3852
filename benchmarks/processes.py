"""The process in which a contender waits for its turn."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final, Literal, Self

from benchmarks.harness import ROOT, take_rounds
from benchmarks.workers.protocol import Burst, Ready, TimedWork, Workload
from genesis.base.console import Console
from genesis.base.errors import UserError
from genesis.base.processes import start_program

WORKERS: Final = ROOT / "benchmarks/workers"
PEERS: Final = ROOT / "benchmarks/peers"
_STOP_TIMEOUT_SECONDS: Final = 30.0
_NUM_ERROR_LINES: Final = 15


class ContenderEndedError(UserError):
    """A contender's process ended too early; the message has the last lines of its log."""

    is_one_line = False


class WorkerProcess:
    """A process that answers each line with a line. Leaving the context ends the process.

    Args:
        name: The name of the process in messages.
        command: The command to run.
        log_path: File for the output of the process other than its answers.
        num_threads: Number of CPU threads.
        environment: Environment variables in addition to this process's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        num_threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log_path = log_path
        threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with log_path.open("wb") as log:
            self._process = start_program(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Workers import the protocol from this root; names in a worker's own directory may hide other modules.
                env={**os.environ, **threads, **_choose_paths(command[0]), **(environment or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes():
            pipe.close()

    def ask(self, word: str) -> dict[str, Any]:
        """Sends a line and returns the answer to it."""
        self.send(word)
        return self.receive()

    def send(self, word: str) -> None:
        """Sends a line."""
        pipe, _ = self._pipes()
        try:
            pipe.write(word + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self) -> dict[str, Any]:
        """Returns the next line, a JSON object.

        Raises:
            UserError: The process has ended; the message has the last lines of its log.
        """
        line = self._pipes()[1].readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Asks the process to end and waits, up to a limit; leaving the context kills a process that takes longer."""
        self.send("quit")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_SECONDS)

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def _ended(self) -> ContenderEndedError:
        errors = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_ERROR_LINES:]
        return ContenderEndedError(f"{self.name} ended before its work was done; its last lines:\n" + "\n".join(errors))


def _choose_paths(python: str) -> dict[str, str]:
    """Returns the search path of a worker: this root, and for our own Python what this process has beside it."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep) if python == sys.executable else []
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, own)]), "PYTHONSAFEPATH": "1"}


@dataclass(frozen=True)
class Contender:
    """An implementation whose speed is measured.

    Args:
        name: Name in the report.
        summary: A description of one line.
        script: The script that the contender's process runs.
        python: The interpreter of the contender's environment.
        arguments: Arguments of the script after the workload.
        documents: The layout of documents that the contender trains on.
    """

    name: str
    summary: str
    script: Path
    python: str = sys.executable
    arguments: tuple[str, ...] = ()
    documents: Literal["one_per_row", "packed"] = "one_per_row"

    def start(self, workload: TimedWork, log_path: Path, environment: Mapping[str, str] | None = None) -> WorkerProcess:
        """Starts the contender's process, which warms up without further messages."""
        command = [self.python, str(self.script), workload.to_json(), *self.arguments]
        return WorkerProcess(self.name, command, log_path, workload.num_threads, environment)


@contextmanager
def keeping_logs() -> Iterator[tuple[ExitStack, Path]]:
    """Gives a stack for processes, and a directory for their logs, which is removed after their end."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        yield stack, Path(directory)


def run_bursts(
    work: Sequence[tuple[Contender, Workload]], num_rounds: int, burst_steps: int, *, is_together: bool = True
) -> tuple[dict[str, Ready], dict[str, list[Burst]]]:
    """Returns each contender's description of itself, and its bursts by round.

    Args:
        work: The contenders, each with its work.
        num_rounds: Number of rounds.
        burst_steps: Windows of each contender per round.
        is_together: Whether all warm up at once: most of a warm-up is imports and compilation.
    """
    with keeping_logs() as (stack, logs):
        workers: dict[str, WorkerProcess] = {}
        readies: dict[str, Ready] = {}
        for contender, workload in work:
            Console(stderr=True).print(f"warming up {contender.name}: {contender.summary}", highlight=False)
            own = replace(workload, documents=contender.documents)
            workers[contender.name] = stack.enter_context(contender.start(own, logs / str(len(workers))))
            if not is_together:
                readies[contender.name] = Ready(**workers[contender.name].receive())
        readies |= {name: Ready(**worker.receive()) for name, worker in workers.items() if name not in readies}
        bursts = take_rounds(workers, num_rounds, ask_burst(burst_steps), lambda one: one.tokens_per_second, "tokens/s")
        for worker in workers.values():
            worker.stop()
    return readies, bursts


def ask_burst(num_windows: int) -> Callable[[WorkerProcess], Burst]:
    """Returns what lets a worker train some windows, and gives its measurements."""
    return lambda worker: Burst(**worker.ask(f"go {num_windows}"))


def parse_peers(text: str, known: Sequence[str], suffix: str, *, own_python: bool) -> dict[str, tuple[Path, str]]:
    """Returns the script and the interpreter of other projects' workers by name, from `NAME=PYTHON,...`.

    Args:
        text: The option `--peers`.
        known: The names that there are.
        suffix: The end of the scripts' names.
        own_python: Whether a name without an interpreter takes ours.

    Raises:
        UserError: A name is unknown, or its interpreter does not exist.
    """
    peers = {}
    for peer in filter(None, text.split(",")):
        name, _, python = peer.partition("=")
        if name not in known:
            raise UserError(f"--peers has {name!r}; there are {', '.join(known)}")
        if (python and not Path(python).is_file()) or not (python or own_python):
            raise UserError(
                f"--peers has {peer!r}, and there is no such file: give {name}=PYTHON, that of its environment"
            )
        peers[name] = (PEERS / f"{name}{suffix}.py", python or sys.executable)
    return peers
