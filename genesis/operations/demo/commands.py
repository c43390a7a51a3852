"""What a demo does around its commands: it kills one of them on purpose, and moves the results of earlier demos."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from genesis.base.processes import start_program
from genesis.base.run_directory import RunDirectory
from genesis.operations.commands import Commands, StepFailedError
from genesis.operations.demo.plot import read_curve
from genesis_callbacks.checkpoint import list_committed

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Kill:
    """The state at a kill: the last step in the log, and the newest committed checkpoint."""

    step: int
    checkpoint: Path


def step_of(checkpoint: Path) -> int:
    """Returns the step of the checkpoint from its name, because retention may have removed the checkpoint since."""
    return int(checkpoint.name.removeprefix("step-"))


def move_aside(directory: Path) -> None:
    """Renames the directory of an earlier demo, so that nothing of a user's is overwritten."""
    if directory.exists():
        number = 1 + sum(1 for _ in directory.parent.glob(f"{directory.name}.before-*"))
        directory.rename(directory.with_name(f"{directory.name}.before-{number}"))


def run_and_kill(commands: Commands, fit: Sequence[str], run_dir: Path, num_steps: int) -> Kill:
    """Runs `genesis fit`, waits until it is a few steps past a checkpoint in the middle, and sends SIGKILL.

    Raises:
        StepFailedError: The command ended by itself.
    """
    gap = min(3, num_steps // 20)  # at most half of the steps between two saves
    metrics = RunDirectory(run_dir).metrics
    command = commands.show(*fit)
    process = start_program(command)
    try:
        while _newest_step(run_dir) < num_steps // 2 or _last_step(metrics) <= _newest_step(run_dir) + gap:
            if process.poll() is not None:
                raise StepFailedError(command, process.returncode)
            time.sleep(_POLL_SECONDS)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    kill = Kill(_last_step(metrics), list_committed(run_dir)[-1][0])
    commands.console.print(
        f"\n[bold red]SIGKILL[/bold red] at step {kill.step}; the newest checkpoint is {kill.checkpoint.name}"
    )
    return kill


def _newest_step(run_dir: Path) -> int:
    committed = list_committed(run_dir)
    return step_of(committed[-1][0]) if committed else 0


def _last_step(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    steps, _ = read_curve(metrics, "step", "train/loss")
    return int(steps[-1]) if steps else 0
