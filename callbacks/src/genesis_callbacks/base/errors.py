"""Errors that are printed in one line instead of a traceback."""

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = [
    "MAX_QUOTED",
    "QuietExit",
    "RunEndedError",
    "UserError",
    "as_line",
    "describe_error",
    "find_remedy",
    "name_some",
    "naming",
    "numbered",
    "printable",
    "printable_lines",
]

_FREE_SPACE = "free space on its disk"
_RAISE_QUOTA = "free space, or raise your quota on its disk"
_RAISE_SIZE = "raise the limit of a file's size (`ulimit -f unlimited`)"
_RAISE_FILES = "raise the limit of open files (`ulimit -n 4096`)"
_MAY_NOT_WRITE = "make its directory writable, or choose another one"
_FAILED = "its disk, or the server of its file system, has failed: see the kernel's log (`dmesg`)"
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _RAISE_QUOTA,
    errno.EFBIG: _RAISE_SIZE,
    errno.EMFILE: _RAISE_FILES,
    errno.ENFILE: _RAISE_FILES,
    errno.EACCES: _MAY_NOT_WRITE,
    errno.EPERM: _MAY_NOT_WRITE,
    errno.EROFS: _MAY_NOT_WRITE,
    errno.EIO: _FAILED,
    errno.ESTALE: "another machine has removed or replaced it, or its server has started again: start again",
    errno.ELOOP: "remove the link: it leads to itself, or lies where only a file may be written",
}


def numbered(number: float, plural: str) -> str:
    """Returns a number with its noun, which is given in the plural and is the end of the phrase.

    Example:
        >>> numbered(1, "other ranks"), numbered(1200, "steps"), numbered(1, "batches"), numbered(1, "entries")
        ('1 other rank', '1,200 steps', '1 batch', '1 entry')
    """
    return f"{number:,} {_PLURAL.sub(_singular, plural) if number == 1 else plural}"


_PLURAL = re.compile(r"(ies|(?<=ss)es|(?<=[cs]h)es|(?<=x)es|s)$")


def _singular(ending: re.Match[str]) -> str:
    return "y" if ending.group() == "ies" else ""


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


def name_some(names: Sequence[str], most: int = 3) -> str:
    """Returns the first names of a list, and how many more there are.

    Example:
        >>> name_some(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


MAX_QUOTED = 200
"""Characters of a quoted value that a message shows."""
_MAX_NAME = 255
"""Characters of a name that no file system exceeds."""
_MAX_LINE, _MAX_END = 2000, 600
_QUOTED = re.compile(rf"(?<!\w)(['\"])(?!\[)((?:(?!\1)[^\\]|\\.){{{MAX_QUOTED + 1},}}?)\1(?!\w)", re.DOTALL)
"""A long quoted value, but not a list, which is an argument to paste."""
_LONG_WORD = re.compile(rf"[^\s/]{{{_MAX_NAME + 1},}}")


def as_line(text: str) -> str:
    """Returns a message as `printable` does, with long values cut, and its middle left out if it is still long.

    A message quotes what files, requests and options of others contain, of any length. Its end has the remedy.
    """
    if len(text) > MAX_QUOTED:
        text = _QUOTED.sub(lambda found: f"{found[1]}{found[2][:MAX_QUOTED]}\u2026{found[1]}", text)
        text = _LONG_WORD.sub(lambda found: f"{found[0][:MAX_QUOTED]}\u2026", text)
        if len(text) > _MAX_LINE:
            text = f"{text[: _MAX_LINE - _MAX_END]} \u2026 {text[-_MAX_END:]}"
    return printable(text)


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
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if error.errno == errno.EIO and error.filename is None:  # a terminal that is gone gives it, too
        return None
    return _REMEDIES.get(error.errno)


def describe_error(error: BaseException) -> str:
    """Returns the class and the text of an error, and the remedy if there is one."""
    remedy = find_remedy(error)
    return as_line(f"{type(error).__name__}: {error}" + ("" if remedy is None else f"; {remedy}"))


class _PrintableError(Exception):
    """An error whose text is safe to print: whoever raises it may quote anything."""

    is_one_line = True
    """False for a class that writes line breaks of its own."""

    def __str__(self) -> str:
        text = super().__str__()
        return as_line(text) if self.is_one_line else "\n".join(map(as_line, text.split("\n")))


class QuietExit(SystemExit):
    """Ends a rank without a word, because another rank prints why all ranks end."""

    ends_all_ranks = True


class UserError(_PrintableError, ValueError):
    """A user's mistake, or a decision that only the user can make: one line with the value and the remedy."""

    exit_status = 2
    ends_all_ranks = False
    """Set to True on an error that all ranks have agreed on, so that none misses the others."""


class RunEndedError(_PrintableError, RuntimeError):
    """A run that must not continue: one line with the reason and the remedy."""

    exit_status = 1
    ends_all_ranks = False
    """As `UserError.ends_all_ranks`."""
