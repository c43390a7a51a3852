"""The output of a running rehearsal: a line for each event, and on a terminal a progress bar of the training."""

from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from genesis.base.console import Console
from genesis.operations.rehearse.plan import Sight


class Display:
    """Prints events and shows the progress bar; the bar is live within this context.

    Args:
        console: The console for lines and bar.
        max_steps: Number of steps of the run.
    """

    def __init__(self, console: Console, max_steps: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("", total=max_steps)

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def print_line(self, line: str) -> None:
        """Prints a line above the bar."""
        self._console.print(escape(line), highlight=False, soft_wrap=True)

    def show(self, name: str, sight: Sight) -> None:
        """Updates the bar."""
        what = name if sight.last_step is not None else f"{name}, starting"
        self._progress.update(self._task, description=what, completed=sight.last_step or 0)
