"""How far a command's work is: library code opens a stage, and the command line shows it.

    with stage("comparing the tokenizers", total=len(texts), unit="texts") as progress:
        for text in texts:
            ...
            progress.advance()

Without a display, which `genesis.cli.main` installs for commands, a stage costs nothing and prints nothing. A process
that works for a command sends its stages as lines of its output (`sent_as_lines`), and the command shows them as its
own (`SentStages`).
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

_MARK: Final = "genesis-stage "
"""Begins a line of output that describes a stage."""
_SEND_SECONDS: Final = 0.5


@dataclass(eq=False)
class Stage:
    """A part of a command's work.

    Attributes:
        name: A phrase such as `reading the weights`.
        total: Number of units in all; None if it is unknown.
        unit: The plural of what is counted; `bytes` are shown as sizes. Empty if nothing is counted.
        done: Number of units that are done.
        first: Of these, those of an earlier attempt, which took no time now.
        note: A text behind the numbers, such as a rate.
        begin_seconds: When the stage began, by the monotonic clock.
    """

    name: str
    total: int | None = None
    unit: str = ""
    done: int = 0
    first: int = 0
    note: str = ""
    begin_seconds: float = field(default_factory=time.monotonic)

    def advance(self, number: int = 1) -> None:
        """Adds to the number of units that are done."""
        self.done += number

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items and counts each one after its use."""
        for item in items:
            yield item
            self.done += 1


class Display(Protocol):
    """Shows stages. Its methods are called one at a time, but from two threads."""

    tick_seconds: float
    """The time between two calls of `tick`."""

    def begin(self, stage: Stage) -> None:
        """Called when a stage begins, inside those that have not ended."""

    def tick(self, stage: Stage) -> None:
        """Called at intervals with the innermost stage."""

    def end(self, stage: Stage) -> None:
        """Called when a stage ends, also by an error."""


class _Shown:
    """An installed display, its thread, and the stages that have begun."""

    def __init__(self, display: Display) -> None:
        self._display, self._stages = display, list[Stage]()
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, stage: Stage) -> None:
        with self._lock:
            self._stages.append(stage)
            self._display.begin(stage)
        if self._thread is None:
            self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)
            self._thread.start()

    def end(self, stage: Stage) -> None:
        with self._lock:
            self._stages.remove(stage)
            self._display.end(stage)

    def close(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _tick(self) -> None:
        while not self._is_over.wait(self._display.tick_seconds):
            with self._lock:
                if self._stages:
                    self._display.tick(self._stages[-1])


_shown: list[_Shown] = []
"""The installed displays; only the last one is used."""


@contextmanager
def shown_by(display: Display) -> Iterator[None]:
    """Lets a display show all stages of this process within the block."""
    shown = _Shown(display)
    _shown.append(shown)
    try:
        yield
    finally:
        _shown.remove(shown)
        shown.close()


@contextmanager
def stage(name: str, total: int | None = None, unit: str = "", *, first: int = 0) -> Iterator[Stage]:
    """Yields a stage that is shown until the block ends; the block counts what is done.

    Args:
        name: A phrase such as `reading the weights`.
        total: Number of units in all, if it is known.
        unit: The plural of what is counted, or `bytes`.
        first: Units that an earlier attempt has done.
    """
    begun = Stage(name, total, unit, first, first)
    shown = _shown[-1] if _shown else None
    if shown is None:
        yield begun
        return
    shown.begin(begun)
    try:
        yield begun
    finally:
        shown.end(begun)


# ---- the stages of another process


class _Sender:
    """Writes the innermost stage as lines of output."""

    tick_seconds = _SEND_SECONDS

    def begin(self, stage: Stage) -> None:
        self.tick(stage)

    def tick(self, stage: Stage) -> None:
        numbers = {"total": stage.total, "unit": stage.unit, "done": stage.done, "first": stage.first}
        print(_MARK + json.dumps({"name": stage.name, "note": stage.note, **numbers}), flush=True)

    def end(self, stage: Stage) -> None:
        self.tick(stage)
        print(_MARK + json.dumps(None), flush=True)


def sent_as_lines() -> AbstractContextManager[None]:
    """Prints the stages of this process as lines for `SentStages` within the block."""
    return shown_by(_Sender())


class SentStages:
    """Shows the stages that another process sends. Within the block, give it each line of that process's output."""

    def __init__(self) -> None:
        self._open, self._stage = ExitStack(), Stage("")

    def __enter__(self) -> "SentStages":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def take(self, line: str) -> bool:
        """Returns whether a line is about a stage, which is shown from now on."""
        if not line.startswith(_MARK):
            return False
        sent = json.loads(line.removeprefix(_MARK))
        if sent is None or sent["name"] != self._stage.name:
            self._open.close()
            self._stage = Stage("")
        if sent is not None:
            if not self._stage.name:
                begun = stage(sent["name"], sent["total"], sent["unit"], first=sent["first"])
                self._stage = self._open.enter_context(begun)
            self._stage.done, self._stage.note = sent["done"], sent["note"]
        return True
