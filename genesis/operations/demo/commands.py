"""Runs the commands of a demo one by one, each as a user would type it, and kills one of them on purpose."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.rule import Rule

from genesis.base.console import Console
from genesis.base.processes import start_program
from genesis.base.run_directory import RunDirectory
from genesis.operations.demo.plot import read_curve
from genesis_callbacks.checkpoint import list_committed

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Kill:
    """The state at a kill: the last step in the log, and the newest committed checkpoint."""

    step: int
    checkpoint: Path


class StepFailedError(RuntimeError):
    """A command of the demo failed; `status` is its exit status."""

    def __init__(self, command: Sequence[str], status: int) -> None:
        super().__init__(f"`{shlex.join(command)}` ended with status {status}")
        self.status = status


def step_of(checkpoint: Path) -> int:
    """Returns the step of the checkpoint from its name, because retention may have removed the checkpoint since."""
    return int(checkpoint.name.removeprefix("step-"))


def move_aside(directory: Path) -> None:
    """Renames the directory of an earlier demo, so that nothing of a user's is overwritten."""
    if directory.exists():
        number = 1 + sum(1 for _ in directory.parent.glob(f"{directory.name}.before-*"))
        directory.rename(directory.with_name(f"{directory.name}.before-{number}"))


class Commands:
    """Prints and runs the commands of a demo."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)

    def title(self, text: str) -> None:
        """Prints the heading of a step."""
        self.console.print()
        self.console.print(Rule(text, align="left"))

    def run(self, *arguments: str) -> None:
        """Runs `genesis ARGUMENTS` and prints its duration.

        Raises:
            StepFailedError: The command failed.
        """
        began = time.monotonic()
        command = self._show(*arguments)
        status = _wait(start_program(command))
        if status:
            raise StepFailedError(command, status)
        self.console.print(f"[dim]{time.monotonic() - began:.0f} s[/dim]")

    def run_and_kill(self, fit: Sequence[str], run_dir: Path, num_steps: int) -> Kill:
        """Runs `genesis fit`, waits until it is a few steps past a checkpoint in the middle, and sends SIGKILL.

        Raises:
            StepFailedError: The command ended by itself.
        """
        gap = min(3, num_steps // 20)  # at most half of the steps between two saves
        metrics = RunDirectory(run_dir).metrics
        command = self._show(*fit)
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
        self.console.print(
            f"\n[bold red]SIGKILL[/bold red] at step {kill.step}; the newest checkpoint is {kill.checkpoint.name}"
        )
        return kill

    def _show(self, *arguments: str) -> list[str]:
        self.console.print(f"$ genesis {shlex.join(arguments)}", style="dim", markup=False)
        return [sys.executable, "-m", "genesis", *arguments]


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Returns the exit status of a process. An interrupted demo lets the process end by itself, and not for long."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        # A terminal has interrupted the process, too: a fit saves, and ends.
        for stop in (None, process.terminate):
            if stop is not None:
                stop()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_SECONDS)
                break
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _newest_step(run_dir: Path) -> int:
    committed = list_committed(run_dir)
    return step_of(committed[-1][0]) if committed else 0


def _last_step(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    steps, _ = read_curve(metrics, "step", "train/loss")
    return int(steps[-1]) if steps else 0
