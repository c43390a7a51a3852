"""The one exception that means: the user can mend this."""


class UserError(ValueError):
    """A user's mistake: one line that holds the value and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """
