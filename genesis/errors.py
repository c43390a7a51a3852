"""Errors that the command line prints in one line: a user's mistake (exit status 2), or a run that ended badly (1)."""

from genesis_callbacks.errors import (
    QuietExit,
    RunEndedError,
    UserError,
    find_remedy,
    naming,
    printable,
    printable_lines,
)

__all__ = [
    "QuietExit",
    "RunEndedError",
    "UserError",
    "check_is_named",
    "find_remedy",
    "naming",
    "printable",
    "printable_lines",
]


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
