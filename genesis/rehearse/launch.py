"""Starts the trainings of a rehearsal, each beside a view of its run and with its output in a file."""

import sys
from dataclasses import dataclass
from pathlib import Path

from genesis.rehearse.processes import Training
from genesis.rehearse.watch import RunView


@dataclass(frozen=True)
class Start:
    """One training: its processes, what is seen of it, and its output."""

    training: Training
    view: RunView
    log: Path


@dataclass(frozen=True)
class Launcher:
    """Starts `genesis fit`.

    Args:
        fit: Its arguments, without the run's directory: `("fit", "--config", ...)`.
        directory: For the output of the trainings.
        mark: For all processes.
    """

    fit: tuple[str, ...]
    directory: Path
    mark: str

    def launch(self, run_dir: Path, name: str) -> Start:
        """Starts a training in `run_dir`, from its latest checkpoint if there is one; `name` is its output's."""
        log = self.directory / f"{name}.log"
        view = RunView(run_dir)
        command = [sys.executable, "-m", "genesis", *self.fit, "--run_dir", str(run_dir), "--ckpt_path", "latest"]
        return Start(Training(command, log, self.mark), view, log)


def read_last_words(log: Path) -> str:
    """Returns the last line of a training's output, without the prefix of an error."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip().removeprefix("genesis: error: ") if lines else "it said nothing"
