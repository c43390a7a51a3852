"""Runs commands of Genesis one by one, each as a user would type it: of a demo, or of a whole fine-tuning.

A command is a process of its own. A signal that would end this process goes to the command, which may save first; if
this process is killed, its command ends, too.
"""

import functools
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from rich.rule import Rule

from genesis.base.console import Console
from genesis.base.errors import QuietExit, RunEndedError
from genesis.base.parent import end_with_forker
from genesis.base.processes import start_program

_POLL_SECONDS = 0.05
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM)


class StepFailedError(RunEndedError):
    """A command failed; `status` is its exit status, negative for a signal."""

    def __init__(self, command: Sequence[str], status: int) -> None:
        end = f"ended with status {status}" if status > 0 else f"was ended by {signal.Signals(-status).name}"
        super().__init__(f"`{shlex.join(command)}` {end}")
        self.status = status
        self.exit_status = status if status > 0 else 128 - status


class Commands:
    """Prints and runs commands."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)

    def title(self, text: str) -> None:
        """Prints the heading of a step."""
        self.console.print()
        self.console.print(Rule(text, align="left"))

    def run(self, *arguments: str, **options: Any) -> None:
        """Runs `genesis ARGUMENTS` and prints its duration.

        Args:
            arguments: The command and its arguments.
            options: Further ones of `subprocess.Popen`.

        Raises:
            StepFailedError: The command failed.
            KeyboardInterrupt: This process got SIGINT, and the command has ended.
        """
        began = time.monotonic()
        command = self.show(*arguments)
        status = _run_to_end(command, **options)
        if status:
            raise StepFailedError(command, status)
        self.console.print(f"[dim]{time.monotonic() - began:.0f} s[/dim]")

    def show(self, *arguments: str) -> list[str]:
        """Prints `genesis ARGUMENTS`, and returns the program and arguments that run it."""
        self.console.print(f"$ genesis {shlex.join(arguments)}", style="dim", markup=False)
        return [sys.executable, "-P", "-m", "genesis", *arguments]


def _run_to_end(command: Sequence[str], **options: Any) -> int:
    """Returns the exit status of a program, to which signals are passed on.

    The program has a session of its own, so that Ctrl-C on a terminal reaches it once. It is asked to end when this
    process is gone.
    """
    end_with_this = functools.partial(end_with_forker, signal.SIGTERM)
    with _collected_signals() as received:
        process = start_program(command, start_new_session=True, preexec_fn=end_with_this, **options)
        num_sent = 0
        while process.poll() is None:
            for number in received[num_sent:]:
                process.send_signal(number)
                num_sent += 1
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if received:
        raise QuietExit(128 + received[0])
    status: int = process.returncode
    return status


@contextmanager
def _collected_signals() -> Iterator[list[int]]:
    """Yields a list that gets the signals to this process; one that it ignores stays ignored."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in _PASSED_ON}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
