"""The mirror of a supervised run: `genesis mirror` as a process of its own, started again if it ends.

Before a launch of a run without checkpoints, the newest one of the mirror is restored: a run whose machine was lost
continues on an empty one. A run must not start from scratch because its mirror cannot be reached; the observer then
raises `LaunchRefusedError`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from genesis.base.processes import run_program, start_program
from genesis.data.store import without_password
from genesis.operations.mirror.listing import read_local_marker
from genesis.operations.supervise.checkpoints import list_markers
from genesis.operations.supervise.observers import Launch, LaunchRefusedError, Observer
from genesis.operations.supervise.status import SupervisorStatus

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 300.0
_RESTORE_ATTEMPTS: Final = 5


@dataclass(frozen=True)
class MirrorProcessOptions:
    """The mirror of a supervised run.

    Args:
        url: Path or URL of the mirror.
        arguments: Further options of `genesis mirror`, such as `--keep_last 3`.
        finish_seconds: How long the last checkpoints may take to reach the mirror after the end of the run.
    """

    url: str
    arguments: Sequence[str] = ()
    finish_seconds: float = 600.0


class MirrorProcess(Observer):
    """Restores a run from its mirror before the first launch, and runs `genesis mirror` beside it.

    Args:
        run_dir: The run's directory.
        options: The mirror.
        report: Prints a line.
    """

    def __init__(self, run_dir: Path, options: MirrorProcessOptions, report: Callable[[str], None]) -> None:
        self._run_dir, self._options, self._report = run_dir, options, report
        self._process: subprocess.Popen[bytes] | None = None
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._begin_seconds = self._next_seconds = 0.0

    def before_launch(self, run_dir: Path, attempt: int) -> None:
        """Restores the newest checkpoint of the mirror into a run that has none.

        Raises:
            LaunchRefusedError: The mirror cannot be read, so that nobody knows whether the run has begun.
        """
        if self._has_checkpoint():
            return
        shown = without_password(self._options.url)
        for number in range(_RESTORE_ATTEMPTS):
            if number:
                time.sleep(min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 4**number))
            command = [*_genesis("mirror", "restore"), self._options.url, str(self._run_dir), "--or_none"]
            status = run_program(command).returncode
            if status == 0:
                return
        raise LaunchRefusedError(
            f"{self._run_dir} has no checkpoint, and its mirror {shown} could not be read {_RESTORE_ATTEMPTS} times: "
            "the run is not started from scratch; make the mirror readable, or leave --mirror out"
        )

    def on_launch(self, launch: Launch) -> None:
        """Starts the mirror, unless it runs."""
        self._keep_running()

    def on_status(self, status: SupervisorStatus) -> None:
        """Starts the mirror again if it has ended, after a pause that grows with each early end."""
        self._keep_running()

    def on_complete(self, status: SupervisorStatus) -> None:
        """Ends the mirror after it has brought the second place up to date, for a bounded time."""
        self.close()
        if not self._has_checkpoint():
            return
        command = [*_genesis("mirror"), str(self._run_dir), self._options.url, "--once", *self._options.arguments]
        try:
            status_of_copy = run_program(command, timeout=self._options.finish_seconds).returncode
        except subprocess.TimeoutExpired:
            status_of_copy = -1
        if status_of_copy != 0:
            self._report(
                "the mirror is not up to date at the end of the run: `genesis mirror --once` completes it, "
                f"{self._run_dir} to {without_password(self._options.url)}"
            )

    def close(self) -> None:
        """Ends the process of the mirror."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the next start removes or continues what it was writing
            self._process.wait()
        self._process = None

    def _has_checkpoint(self) -> bool:
        """Returns whether the run has a committed checkpoint; it is not verified."""
        # A marker with other bytes than a hash commits nothing: the run would start from scratch.
        return any(read_local_marker(marker.parent) for marker in list_markers(self._run_dir).values())

    def _keep_running(self) -> None:
        now = time.monotonic()
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return
            self._process = None
            if now - self._begin_seconds > _LONGEST_PAUSE_SECONDS:
                self._pause_seconds = _FIRST_PAUSE_SECONDS
            self._next_seconds = now + self._pause_seconds
            self._report(f"the mirror ended with status {status} and starts again in {self._pause_seconds:g} s")
            self._pause_seconds = min(_LONGEST_PAUSE_SECONDS, 4 * self._pause_seconds)
        if now >= self._next_seconds:
            own = ["--parent", str(os.getpid())]  # a supervisor that is killed leaves no mirror behind
            command = [*_genesis("mirror"), str(self._run_dir), self._options.url, *own, *self._options.arguments]
            self._process = start_program(command)
            self._begin_seconds = now


def _genesis(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "genesis", *words]
