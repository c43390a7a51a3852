"""Shows the stages of a command's work: on a terminal a bar that moves, elsewhere a line at intervals. On stderr."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, TextIO

from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from genesis.base.console import Console
from genesis.base.errors import printable
from genesis.base.progress import Display, Stage, shown_by
from genesis.operations.supervise.goodput import format_seconds

BEGIN_SECONDS: Final = 2.0
"""A stage that ends sooner prints no line."""
_LINE_SECONDS: Final = 15.0
_TICK_SECONDS: Final = 0.5
_BAR_WIDTH: Final = 24
_MIN_RATE_SECONDS: Final = 1.0


def shown(stream: TextIO | None = None) -> AbstractContextManager[None]:
    """Shows the stages of this process within the block.

    Args:
        stream: Where to; standard error by default.
    """
    stream = sys.stderr if stream is None else stream
    console = Console(file=stream, highlight=False)
    display: Display = (
        Bars(console) if console.is_terminal else Lines(lambda line: print(line, file=stream, flush=True))
    )
    return shown_by(display)


def describe(stage: Stage, now_seconds: float) -> str:
    """Returns what is done and what is left of a stage: `1,200 of 4,000 texts (30%), 2 min 20 s left`."""
    parts = []
    if stage.unit and (stage.done or stage.total is not None):
        if stage.total is None:
            parts.append(_amount(stage.done, stage.unit))
        else:
            done = decimal(stage.done) if stage.unit == "bytes" else f"{stage.done:,}"
            share = f" ({stage.done / stage.total:.0%})" if stage.total else ""
            parts.append(f"{done} of {_amount(stage.total, stage.unit)}{share}")
    if stage.note:
        parts.append(stage.note)
    seconds, new = now_seconds - stage.begin_seconds, stage.done - stage.first
    if stage.total is not None and new > 0 and seconds >= _MIN_RATE_SECONDS and stage.done < stage.total:
        parts.append(f"{format_seconds((stage.total - stage.done) * seconds / new)} left")
    elif stage.total is None or not new:
        parts.append(format_seconds(seconds))
    return ", ".join(parts)


def _amount(number: int, unit: str) -> str:
    return decimal(number) if unit == "bytes" else f"{number:,} {unit}"


class Lines:
    """Prints a line when a stage has taken two seconds, at intervals from then on, and at its end.

    Args:
        write: Prints a line.
        clock: Returns seconds.
    """

    tick_seconds = _TICK_SECONDS

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._printed: dict[Stage, float] = {}

    def begin(self, stage: Stage) -> None:
        """Prints nothing yet."""

    def tick(self, stage: Stage) -> None:
        """Prints a line if it is time."""
        now = self._clock()
        last = self._printed.get(stage)
        if now - stage.begin_seconds < BEGIN_SECONDS or (last is not None and now - last < _LINE_SECONDS):
            return
        self._printed[stage] = now
        self._write(printable(f"{stage.name}: {describe(stage, now)}"))

    def end(self, stage: Stage) -> None:
        """Prints the length of a stage that has printed a line."""
        if self._printed.pop(stage, None) is not None:
            done = f"{_amount(stage.done, stage.unit)} in " if stage.unit and stage.done else ""
            self._write(printable(f"{stage.name}: {done}{format_seconds(self._clock() - stage.begin_seconds)}"))


class Bars:
    """A line for each open stage, with a bar, that is erased at the stage's end. What is printed goes above them."""

    tick_seconds = _TICK_SECONDS / 2

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._stages: list[Stage] = []

    def begin(self, stage: Stage) -> None:
        """Shows a stage."""
        self._stages.append(stage)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self.tick(stage)

    def tick(self, stage: Stage) -> None:
        """Draws all stages again."""
        if self._live is not None:
            self._live.update(self._draw(), refresh=True)

    def end(self, stage: Stage) -> None:
        """Erases a stage."""
        self._stages.remove(stage)
        if not self._stages and self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> Table:
        now, grid = time.monotonic(), Table.grid(padding=(0, 1))
        for stage in self._stages:
            bar = ProgressBar(
                total=stage.total, completed=stage.done, width=_BAR_WIDTH, pulse=stage.total is None, animation_time=now
            )
            grid.add_row(Text(printable(stage.name)), bar, Text(printable(describe(stage, now))))
        return grid
