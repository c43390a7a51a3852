"""Errors that the command line prints in one line: a user's mistake (exit status 2), or a run that ended badly (1)."""

from genesis_callbacks.errors import RunEndedError, UserError, naming, printable, printable_lines

__all__ = ["RunEndedError", "UserError", "naming", "printable", "printable_lines"]
