"""Errors that the command line prints in one line: a user's mistake (exit status 2), or a run that ended badly (1)."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from genesis_callbacks.base.errors import (
    MAX_QUOTED,
    QuietExit,
    RunEndedError,
    UserError,
    as_line,
    find_remedy,
    naming,
    numbered,
    printable,
    printable_lines,
)

__all__ = [
    "QuietExit",
    "RunEndedError",
    "UserError",
    "as_line",
    "blaming",
    "blaming_directory",
    "check_is_named",
    "escape_controls",
    "find_remedy",
    "is_panic",
    "naming",
    "numbered",
    "printable",
    "printable_lines",
]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def check_is_named(value: str | None, option: str) -> None:
    """Refuses an option that is an empty text; as a path it would be the working directory.

    Args:
        value: The value; None if the option is not given.
        option: The name of the option.

    Raises:
        UserError: The text is empty.
    """
    if value is not None and not value.strip():
        raise UserError(f"{option} is empty: give a value")


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Returns a text of lines with everything escaped that could change how a terminal shows the rest.

    Other characters that are not printable, such as spaces of other widths, stay: texts of languages need them. The
    escapes are those of JSON, which stays JSON.
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust, which is no `Exception`; its class cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def blaming(what: object, remedy: str) -> Iterator[None]:
    """Turns any error of a parser within the block into one line about the file that is read.

    Args:
        what: The file or directory, or the row of one.
        remedy: What the user can do.

    Raises:
        UserError: The block raised an error. Those that are one line already, and those that no file causes, pass.
    """
    try:
        yield
    except (UserError, RunEndedError):
        raise
    except BaseException as error:
        if _is_ours(error):
            raise
        reason = " ".join(str(error).split())
        found = f"{type(error).__name__}: {reason[:MAX_QUOTED]}" if reason else type(error).__name__
        if isinstance(error, MemoryError) or "can't allocate memory" in reason:  # the latter is torch's
            raise UserError(f"{what} needs more memory than there is ({found}): free some, or {remedy}") from error
        raise UserError(f"{what} cannot be read ({found}): {remedy}") from error


def _is_ours(error: BaseException) -> bool:
    """Whether no file is to blame: for a mistake of the program, the operating system, or an end that was asked for."""
    if isinstance(error, OSError):
        return error.errno is not None
    return isinstance(error, AssertionError | ImportError) or not (isinstance(error, Exception) or is_panic(error))


def blaming_directory(
    remedy: str,
) -> Callable[[Callable[Concatenate[Path, _Arguments], _Result]], Callable[Concatenate[Path, _Arguments], _Result]]:
    """Returns a decorator that turns any error of a reader into one line about the directory, its first argument.

    Args:
        remedy: What the user can do.
    """

    def decorate(
        read: Callable[Concatenate[Path, _Arguments], _Result],
    ) -> Callable[Concatenate[Path, _Arguments], _Result]:
        @functools.wraps(read)
        def call(directory: Path, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            with blaming(directory, remedy):
                return read(directory, *args, **kwargs)

        return call

    return decorate
