"""The contenders of `genesis bench step`, and the process in which a contender of any benchmark waits for its turn."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, Self

from genesis.base.errors import UserError
from genesis.base.processes import start_program
from genesis.bench.workers.protocol import Burst, Ready, TimedWork

_ROOT = Path(__file__).resolve().parents[2]
_WORKERS = Path(__file__).resolve().parent / "workers"
_PEERS = _ROOT / "benchmarks" / "peers"
_STOP_TIMEOUT_SECONDS = 30.0
_NUM_ERROR_LINES = 15


class ContenderEndedError(UserError):
    """A contender's process ended too early; the message has the last lines of its log."""

    is_one_line = False


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


OWN = (
    Contender(
        "genesis",
        "our trainer as `genesis fit` sets it up (strategy replicated)",
        _WORKERS / "genesis_trainer.py",
        arguments=("replicated",),
    ),
    Contender(
        "genesis-auto",
        "the same under Lightning's own strategy for one device",
        _WORKERS / "genesis_trainer.py",
        arguments=("auto",),
    ),
    Contender(
        "genesis-packed",
        "genesis on about four documents per row, which attention does not cross",
        _WORKERS / "genesis_trainer.py",
        arguments=("replicated",),
        documents="packed",
    ),
    Contender("bare", "a PyTorch loop of the same model, loss, optimizer and clip", _WORKERS / "bare_loop.py"),
    Contender("matmul", "the peak: the same number of operations, all in large matmuls", _WORKERS / "matmul.py"),
)

PEERS = {
    "transformers": "transformers.Trainer with LlamaForCausalLM, fused AdamW",
    "litgpt": "litgpt.pretrain.fit with litgpt's GPT under Fabric, fused AdamW",
    "olmo_core": "OLMo-core's Trainer and TransformerTrainModule, fused AdamW",
}


def choose_contenders(own: str, peers: str) -> list[Contender]:
    """Returns the contenders of a run.

    Args:
        own: Names of `OWN`, separated by commas. Options of `genesis fit` may follow a name of ours:
            `genesis+model.attention=flex+trainer.deterministic=false`.
        peers: `NAME` or `NAME=PYTHON` of `PEERS`, separated by commas; may be empty.

    Raises:
        UserError: A name is unknown, or the interpreter or script of a contender does not exist.
    """
    known = {contender.name: contender for contender in OWN}
    chosen = []
    for text in own.split(","):
        name, *options = text.split("+")
        if name not in known:
            raise UserError(f"--contenders has {name!r}; there are {', '.join(known)}")
        contender = known[name]
        if options and not contender.arguments:
            raise UserError(f"--contenders has {text!r}, but {name} is no fit of genesis and takes no options")
        chosen.append(replace(contender, name=text, arguments=(*contender.arguments, *options)))
    for peer in filter(None, peers.split(",")):
        name, _, python = peer.partition("=")
        if name not in PEERS:
            raise UserError(f"--peers has {name!r}; there are {', '.join(PEERS)}")
        if python and not Path(python).is_file():
            raise UserError(f"--peers has {peer!r}, but there is no such file; give the python of {name}'s environment")
        script = _PEERS / f"{name}_worker.py"
        if not script.is_file():
            raise UserError(f"--peers has {name!r}, but there is no {script}; run this in a clone of the repository")
        chosen.append(Contender(name, PEERS[name], script, python or sys.executable))
    return chosen


def _choose_paths(python: str) -> dict[str, str]:
    """Returns the search path of a worker: this root, and for our own Python what this process has beside it."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep) if python == sys.executable else []
    return {"PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, own)]), "PYTHONSAFEPATH": "1"}


def find_peer(file_name: str) -> Path:
    """Returns the script of another project's worker.

    Raises:
        UserError: The script does not exist, because this is not a clone of the repository.
    """
    script = _PEERS / file_name
    if not script.is_file():
        raise UserError(f"there is no {script}; run this in a clone of the repository")
    return script


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

    def wait(self) -> None:
        """Waits for the process to end, up to a limit; leaving the context kills a process that takes longer."""
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


class Worker:
    """A contender's process. Leaving the context ends the process.

    Args:
        contender: The contender.
        workload: The training that the contender runs.
        log_path: File for the output of the process other than its answers.
        environment: Environment variables in addition to this process's.
    """

    def __init__(
        self,
        contender: Contender,
        workload: TimedWork,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.contender = contender
        command = [contender.python, str(contender.script), workload.to_json(), *contender.arguments]
        self._process = WorkerProcess(contender.name, command, log_path, workload.num_threads, environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the process."""
        self._process.__exit__(*exception)

    def wait_until_ready(self) -> Ready:
        """Waits until the worker is warmed up, and returns its description of itself."""
        return Ready(**self._process.receive())

    def run_burst(self, num_windows: int) -> Burst:
        """Returns the worker's measurements while it trains `num_windows` windows."""
        self._process.send(f"go {num_windows}")
        return Burst(**self._process.receive())

    def stop(self) -> None:
        """Asks the worker to end, and waits up to a limit."""
        self._process.send("quit")
        self._process.wait()
