"""Errors that are printed in one line instead of a traceback."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "QuietExit",
    "RunEndedError",
    "UserError",
    "describe_error",
    "find_remedy",
    "naming",
    "printable",
    "printable_lines",
]

_FREE_SPACE = "free space on its disk"
_RAISE_QUOTA = "free space, or raise your quota on its disk"
_RAISE_SIZE = "raise the limit of a file's size (`ulimit -f unlimited`)"
_RAISE_FILES = "raise the limit of open files (`ulimit -n 4096`)"
_MAY_NOT_WRITE = "make its directory writable, or choose another one"
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _RAISE_QUOTA,
    errno.EFBIG: _RAISE_SIZE,
    errno.EMFILE: _RAISE_FILES,
    errno.ENFILE: _RAISE_FILES,
    errno.EACCES: _MAY_NOT_WRITE,
    errno.EPERM: _MAY_NOT_WRITE,
    errno.EROFS: _MAY_NOT_WRITE,
}


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


def find_remedy(error: BaseException) -> str | None:
    """Returns what the user can do about a full disk, a limit or a missing permission; None for other errors."""
    return _REMEDIES.get(error.errno) if isinstance(error, OSError) and error.errno is not None else None


def describe_error(error: BaseException) -> str:
    """Returns the class and the text of an error, and the remedy if there is one."""
    remedy = find_remedy(error)
    return f"{type(error).__name__}: {error}" + ("" if remedy is None else f"; {remedy}")


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
    ends_all_ranks = False
    """As `UserError.ends_all_ranks`."""
