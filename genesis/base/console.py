"""The console that commands print tables on: control characters of what it prints are escaped, its own are not."""

from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from genesis.base.errors import escape_controls


class Console(rich.console.Console):
    """A `rich.console.Console`; cells, names and paths of others cannot move the cursor or turn a line around.

    Args:
        options: Of rich's. `:dog:` in a name stays what it is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    @property
    def file(self) -> IO[str]:
        """The stream that takes the console's own sequences, below those of `genesis.cli.surroundings`."""
        found = super().file
        while (below := getattr(found, "rich_proxied_file", found)) is not found:
            found = below
        return found

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields what rich would print."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_controls(segment.text)
            yield segment if text is segment.text else segment._replace(text=text)
