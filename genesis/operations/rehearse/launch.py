"""Starts the trainings of a rehearsal, finds, kills and ends their processes, and no others.

Each process inherits a mark in its environment. The mark identifies further ranks, writers that left the session, and
orphans of a training that has ended.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from genesis.base.errors import RunEndedError
from genesis.base.processes import Mark, find_kind, find_processes, kill_process, start_program
from genesis.operations.rehearse.plan import Phase, Sight
from genesis.operations.rehearse.watch import RunView

MARK_NAME = "GENESIS_REHEARSAL"
_POLL_SECONDS = 0.02


class Training:
    """One `genesis fit` in a session of its own, so that all of its ranks can be killed at once.

    Args:
        command: The command to run.
        log: The file for the output of the command.
        mark: The mark in the environment of all processes that the command starts.
    """

    def __init__(self, command: Sequence[str], log: Path, mark: Mark) -> None:
        self._mark = mark
        with log.open("wb") as output:
            self._process = start_program(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, mark.name: mark.value},
            )

    def poll(self) -> int | None:
        """Returns the exit status of rank 0, negative if a signal ended the rank; None while the rank runs."""
        return self._process.poll()

    def ranks(self) -> dict[int, int]:
        """Returns the process ids of the live ranks, without the processes that a rank has forked."""
        processes = [process for process in find_processes(self._mark) if process.group == self._process.pid]
        ranks: dict[int, int] = {}
        for process in processes:
            if find_kind(process) == "rank":
                ranks.setdefault(process.local_rank, process.pid)
        return ranks

    def writers(self) -> dict[int, int]:
        """Returns the process ids of the ranks' live writers, without orphans of an earlier training."""
        ranks = set(self.ranks().values())
        return {
            process.local_rank: process.pid
            for process in find_processes(self._mark)
            if find_kind(process) == "writer" and process.parent in ranks
        }

    def kill_ranks(self) -> None:
        """Sends SIGKILL to all ranks at once."""
        if self._process.returncode is None:  # rank 0 is not reaped yet, so no other process can have its group id
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in self.ranks().values():
            kill_process(pid, self._mark)

    def kill_one(self, pid: int) -> bool:
        """Sends SIGKILL to one rank or writer; returns whether that process still existed."""
        return kill_process(pid, self._mark)

    def wait_ended(self, limit_seconds: float) -> float | None:
        """Waits until all ranks have ended, and returns the seconds that passed; None if some ranks still run."""
        began_seconds = time.monotonic()
        while self._process.poll() is None or self.ranks():
            if time.monotonic() - began_seconds > limit_seconds:
                return None
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - began_seconds


@dataclass(frozen=True)
class Start:
    """One training: its processes, the view of its run, and its output file."""

    training: Training
    view: RunView
    log: Path

    def look_at_start(self, awaited: Phase | None) -> Sight:
        """Returns the state of the run with the phase of its start, as far as the phase that is awaited needs it."""
        return replace(self.view.look(), phase=self._find_phase(awaited))

    def _find_phase(self, awaited: Phase | None) -> Phase:
        if self.view.restored_step is not None:
            return "first step"
        if self.view.has_started:
            return "restore"
        # The ranks are found among all processes, which takes a second on a busy machine: the next phases may be over.
        return "rendezvous" if awaited == "rendezvous" and len(self.training.ranks()) > 1 else "imports"


@dataclass(frozen=True)
class Launcher:
    """Starts `genesis fit`.

    Args:
        fit: The arguments of `genesis`, without the run's directory: `("fit", "--config", ...)`.
        directory: The directory for the output of the trainings.
        mark: The mark in the environment of all processes.
    """

    fit: tuple[str, ...]
    directory: Path
    mark: Mark

    def launch(self, run_dir: Path, name: str) -> Start:
        """Starts a training in `run_dir`, from the latest checkpoint if one exists; `name` names the output file.

        Raises:
            RunEndedError: A rank of an earlier training still runs and could join this training.
        """
        self._refuse_strays(name)
        log = self.directory / f"{name}.log"
        view = RunView(run_dir)
        command = [sys.executable, "-P", "-m", "genesis", *self.fit, "--run_dir", str(run_dir), "--ckpt_path", "latest"]
        return Start(Training(command, log, self.mark), view, log)

    def _refuse_strays(self, name: str) -> None:
        strays = [process for process in find_processes(self.mark) if find_kind(process) == "rank"]
        if strays:
            who = ", ".join(f"rank {process.local_rank} (process {process.pid})" for process in strays)
            raise RunEndedError(f"ranks of an earlier training were still running before the start of {name}: {who}")


def read_last_words(log: Path) -> str:
    """Returns the last line of a training's output, without the prefix of an error."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip().removeprefix("genesis: error: ") if lines else "no output"
