"""One save on one rank, from its start to its outcome, also if an operation raises."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..base.checkpoint_errors import CheckpointError, SaveFailedError
from ..base.errors import UserError
from ..base.event_reader import read_events
from ..base.events import Event, EventLog
from ..base.files import sync_directory
from ..base.manifest import read_committed_hash, read_manifest
from ..base.run_directory import COMMITTED_NAME, checkpoint_name
from .commit import discard
from .file_parts import PartsInFiles
from .job import Outcome, failed_outcome, leave_failure

_NOTE_WAIT_SECONDS = 5.0
_BEGIN_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Progress:
    """The progress of training between two saves, as the caller counts it.

    Attributes:
        num_steps: Returns the optimizer steps so far; called when staging begins and when it ends.
        num_updates: Optimizer steps since the last checkpoint that changed parameters.
        moved: Returns the names of the parameters that the last of these updates changed; called once, while training
            continues.
    """

    num_steps: Callable[[], int]
    num_updates: int = 0
    moved: Callable[[], frozenset[str]] = frozenset


class OneSave:
    """One save of one rank. A single thread runs it and touches the tensors; other threads wait for its events.

    Args:
        number: Number of the save within the run.
        step: Windows attempted.
        staging: The staging directory, which rank 0 creates.
        rank: This rank.
        leaves_notes: Whether rank 0 learns of a failure from the staging directory, or from a collective.
        events: The log that gets the event of a commit; None for no event.

    Attributes:
        staged: Set when the live tensors are not needed any more.
        finished: Set when there is an outcome.
        given_up: Set by the caller when rank 0 has abandoned the save.
        outcome: This rank's outcome.
        interruption: An exception that ended the save but is not an error of the save, such as a KeyboardInterrupt.
        is_begun: Whether this rank created the staging directory.
        staged_bytes: Number of bytes copied on this rank.
        in_files: The parts that this save holds in files, until it is over.
    """

    def __init__(
        self, number: int, step: int, staging: Path, rank: int, *, leaves_notes: bool, events: EventLog | None = None
    ) -> None:
        self._events, self._begin_seconds = events, time.monotonic()
        self.number, self.step, self.staging, self.rank = number, step, staging, rank
        self.staged = threading.Event()
        self.finished = threading.Event()
        self.given_up = threading.Event()
        self.outcome: Outcome | None = None
        self.interruption: BaseException | None = None
        self._leaves_notes = leaves_notes
        self.is_begun = False
        self.staged_bytes = 0
        self.in_files = PartsInFiles(())

    def run(self, act: Callable[["OneSave"], Outcome]) -> None:
        """Runs `act` and sets the outcome, also if `act` raises."""
        try:
            outcome = act(self)
        except BaseException as error:  # of any kind, because the training thread waits for an outcome
            outcome = failed_outcome(error)
            if not isinstance(error, Exception):
                self.interruption = error
        self.staged.set()
        if outcome.kind not in ("written", "committed"):
            # A failing disk may also refuse this note; the outcome is reported in any case.
            with contextlib.suppress(OSError, CheckpointError):
                outcome = self._clear_up(outcome)
        self.in_files.release()
        self.outcome = outcome
        self.finished.set()

    def wait_begun(self, limit_seconds: float) -> None:
        """Waits until rank 0 has created the staging directory.

        Raises:
            SaveFailedError: Rank 0 abandoned the save, or did not start it in time.
        """
        deadline_seconds = time.monotonic() + limit_seconds
        while not self.staging.is_dir():
            if self.given_up.wait(_BEGIN_POLL_SECONDS):
                raise SaveFailedError("rank 0 abandoned the save")
            if time.monotonic() > deadline_seconds:
                raise SaveFailedError("the staging directory did not appear: rank 0 did not start this save")

    def _clear_up(self, outcome: Outcome) -> Outcome:
        if self.rank != 0:
            if not self._leaves_notes:
                return outcome
            with contextlib.suppress(SaveFailedError):
                self.wait_begun(_NOTE_WAIT_SECONDS)
            leave_failure(self.staging, self.rank, outcome)
        elif self.staging.is_dir():
            with contextlib.suppress(OSError):
                discard(self.staging)
        elif self.is_begun and (self._final / COMMITTED_NAME).exists():
            # The writer died after the commit and before its answer. The checkpoint is this save's, because this rank
            # created the staging directory that became the checkpoint.
            sync_directory(self._final.parent)
            return Outcome("committed", manifest_hash=read_committed_hash(self._final), warning=self._complete())
        return outcome

    def _complete(self) -> str:
        """Writes the event of a commit whose writer has died, unless the writer wrote it; returns the warning."""
        problem = None
        if self._events is not None:
            known: list[Event] = []
            with contextlib.suppress(UserError):  # a file of events that cannot be read
                known = read_events(self._events.run_dir)
            if not any(event.kind == "saved" and event.monotonic_seconds >= self._begin_seconds for event in known):
                counters = read_manifest(self._final).counters
                problem = self._events.append("saved", step=self.step, clocks=counters, checkpoint=self._final)
        died = f"{self._final.name} is committed, but its writer died before it answered; another one is started"
        return died if problem is None else f"{died}; {problem}"

    @property
    def _final(self) -> Path:
        return self.staging.parent / checkpoint_name(self.step)
