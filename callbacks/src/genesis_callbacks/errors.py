"""What is told in one line instead of a traceback."""


class UserError(ValueError):
    """A user's mistake, or what only the user can decide: one line that holds the value and the remedy."""

    exit_status = 2


class RunEndedError(RuntimeError):
    """A run that must not go on: one line that holds the reason and what to do."""

    exit_status = 1
