"""Errors that are printed in one line instead of a traceback."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["QuietExit", "RunEndedError", "UserError", "naming", "printable", "printable_lines"]


def printable(text: str) -> str:
    r"""Returns `text` in one line without control characters: everything that is not printable is escaped.

    Names in a checkpoint may hold anything: terminal control sequences, line ends, text from right to left.

    Example:
        >>> printable("weight\x1b[2J\n")
        'weight\\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def printable_lines(text: str) -> str:
    """Returns `text` as `printable` does, but keeps line ends: for text whose line ends this package wrote itself."""
    return "\n".join(map(printable, text.split("\n")))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file name `path` to an `OSError` without one: a failed write knows its descriptor only."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class QuietExit(SystemExit):
    """Ends a rank without a word, because another rank prints why all ranks end."""

    ends_all_ranks = True


class UserError(ValueError):
    """A user's mistake, or a decision that only the user can make: one line with the value and the remedy."""

    exit_status = 2
    is_one_line = True
    """False for a class that writes line breaks of its own; the rest of such a text must be printable."""
    ends_all_ranks = False
    """Set to True on an error that all ranks have agreed on, so that none misses the others."""


class RunEndedError(RuntimeError):
    """A run that must not continue: one line with the reason and the remedy."""

    exit_status = 1
    is_one_line = True
