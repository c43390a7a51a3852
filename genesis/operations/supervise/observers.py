"""How other parts attach to the loop: a mirror, metrics and webhooks are observers of it.

The loop calls observers in its own thread, one after another, and waits for each: an observer that works longer hands
over to a thread of its own. An observer that raises is reported in one line; the loop goes on, and so do the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from genesis.base.errors import RunEndedError
from genesis.operations.supervise.crashes import CrashRecord
from genesis.operations.supervise.status import SupervisorStatus


@dataclass(frozen=True)
class Launch:
    """One attempt whose ranks have been started.

    Args:
        run_dir: The run's directory.
        attempt: Number of the attempt, from 1.
        pids: Process id by rank, of the ranks on this node.
        is_adopted: Whether the ranks already ran, started by a supervisor that was killed.
    """

    run_dir: Path
    attempt: int
    pids: Mapping[int, int] = field(default_factory=dict)
    is_adopted: bool = False


class LaunchRefusedError(RunEndedError):
    """An observer knows that the run must not be launched now; the supervisor ends with this reason."""


class Observer(Protocol):
    """What happens to a supervised run. `NullObserver` has a method for each that does nothing."""

    def before_launch(self, run_dir: Path, attempt: int) -> None:
        """Called before an attempt is launched, when nothing of the attempt before is left.

        What it adds to the run's checkpoints, the attempt may continue from.

        Raises:
            LaunchRefusedError: The run must not be launched now.
        """

    def on_launch(self, launch: Launch) -> None:
        """Called when the ranks of an attempt have been started, or found running."""

    def on_end(self, record: CrashRecord) -> None:
        """Called when an attempt has ended before the run did, and the action is decided but not done."""

    def on_recovered(self, record: CrashRecord) -> None:
        """Called when the run has trained its first new step after a crash; the record has the cost."""

    def on_status(self, status: SupervisorStatus) -> None:
        """Called at each new snapshot: at changes of state, and about once a second."""

    def on_complete(self, status: SupervisorStatus) -> None:
        """Called once at the end, whether the run is complete, stopped or left to its queue (`status.state`)."""


class NullObserver:
    """Does nothing at any time; observers that need only some of the methods begin with it."""

    def before_launch(self, run_dir: Path, attempt: int) -> None:
        """Does nothing."""

    def on_launch(self, launch: Launch) -> None:
        """Does nothing."""

    def on_end(self, record: CrashRecord) -> None:
        """Does nothing."""

    def on_recovered(self, record: CrashRecord) -> None:
        """Does nothing."""

    def on_status(self, status: SupervisorStatus) -> None:
        """Does nothing."""

    def on_complete(self, status: SupervisorStatus) -> None:
        """Does nothing."""


class Observers:
    """Calls all observers of a run; none of them can end the loop.

    Args:
        observers: The observers, in the order of their calls.
        report: Prints a line.
    """

    def __init__(self, observers: Sequence[Observer], report: Callable[[str], None]) -> None:
        self._observers, self._report = tuple(observers), report

    def call(self, act: Callable[[Observer], None]) -> None:
        """Calls `act` with each observer.

        Raises:
            LaunchRefusedError: An observer refuses a launch.
        """
        for observer in self._observers:
            try:
                act(observer)
            except LaunchRefusedError:
                raise
            except Exception as error:  # a mirror or a webhook must never stop a training
                name = type(observer).__name__
                self._report(f"{name} failed and is called again next time: {type(error).__name__}: {error}")
