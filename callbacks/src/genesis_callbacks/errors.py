"""Errors that are reported in one line instead of a traceback."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["RunEndedError", "UserError", "naming", "printable", "printable_lines"]


def printable(text: str) -> str:
    r"""Returns `text` in one line that a terminal prints and does not obey: what is not printable is escaped.

    Names in a checkpoint are whatever somebody wrote there: control sequences, line ends, text from right to left.

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
    """Returns `text` as `printable` does, but keeps its line ends: for text in which we alone have written them."""
    return "\n".join(map(printable, text.split("\n")))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an `OSError` without a file name the name `path`: writes, which meet a full disk, know only descriptors."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class UserError(ValueError):
    """A user's mistake, or what only the user can decide: one line that holds the value and the remedy."""

    exit_status = 2
    is_one_line = True
    """False for a class that writes line breaks of its own; whatever else stands in such a text must be printable."""


class RunEndedError(RuntimeError):
    """A run that must not go on: one line that holds the reason and what to do."""

    exit_status = 1
    is_one_line = True
