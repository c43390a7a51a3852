"""Starts the trainings of a rehearsal, each with a view of its run and with its output in a file."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from genesis.base.errors import RunEndedError
from genesis.base.processes import Mark, find_kind, find_processes
from genesis.operations.rehearse.plan import Phase, Sight
from genesis.operations.rehearse.processes import Training
from genesis.operations.rehearse.watch import RunView


@dataclass(frozen=True)
class Start:
    """One training: its processes, the view of its run, and its output file."""

    training: Training
    view: RunView
    log: Path

    def look_at_start(self) -> Sight:
        """Returns the state of the run with the phase of its start; this call is slower than `view.look`."""
        return replace(self.view.look(), phase=self._find_phase())

    def _find_phase(self) -> Phase:
        if self.view.restored_step is not None:
            return "first step"
        if self.view.has_started:
            return "restore"
        return "rendezvous" if len(self.training.ranks()) > 1 else "imports"


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
        command = [sys.executable, "-m", "genesis", *self.fit, "--run_dir", str(run_dir), "--ckpt_path", "latest"]
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
