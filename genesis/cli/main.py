"""The `genesis` command: finds a command in the table, runs it, and turns a mistake into one line and a status."""

import contextlib
import difflib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from genesis import __version__
from genesis.cli.table import COMMANDS, Command
from genesis.errors import RunEndedError, UserError, printable, printable_lines
from genesis.parent import end_with_parent

MISUSE = 2
_RANKS = ("fit", "validate")
"""The commands that a launcher may start as a rank of many."""

_INTERRUPTED = 130
"""What a shell reports for a program that SIGINT ended."""


def help_text(group: str | None = None) -> str:
    """Returns the help page: every command, or those of one group (`data`)."""
    commands = [command for command in COMMANDS if group is None or command.name.split()[0] == group]
    width = max(len(command.name) for command in commands)
    lines = [f"usage: genesis {group or ''}{' ' if group else ''}COMMAND [options]", ""]
    if group is None:
        lines += ["Trains language models from raw text, with checkpoints that never lie.", ""]
    lines += [f"  {command.name:<{width}}  {command.summary}" for command in commands]
    lines += [
        "",
        "`genesis COMMAND --help` tells the options of one; `genesis --version` the version.",
        "Exit status: 0 good, 1 a check failed or a run ended badly, 2 a mistake in what was given, 130 interrupted.",
    ]
    return "\n".join(lines)


def find_command(arguments: Sequence[str]) -> tuple[Command, list[str]]:
    """Returns the command that `arguments` begin with, and the rest of them.

    Raises:
        UserError: There is no such command; it names the nearest.
    """
    by_name = {command.name: command for command in COMMANDS}
    for num_words in (2, 1):
        command = by_name.get(" ".join(arguments[:num_words]))
        if command is not None:
            return command, list(arguments[num_words:])
    wanted = " ".join(word for word in arguments[:2] if not word.startswith("-"))
    near = difflib.get_close_matches(wanted, list(by_name), n=1, cutoff=0.4)
    hint = f"; did you mean `genesis {near[0]}`?" if near else ""
    raise UserError(f"no command {wanted!r}{hint} (`genesis --help` lists all)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    0 is good, 1 a check that failed or a run that must not go on, 2 a user's mistake, 130 an interruption.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    page = _find_page(arguments)
    if page is not None:
        print(page)
        return 0 if set(arguments) & {"-h", "--help", "--version"} else MISUSE
    try:
        command, rest = find_command(arguments)
        if command.name in _RANKS:
            end_with_parent()
        with _ended_at_once_by_sigint():
            command.check_arguments(rest)
            function = command.load()
        return function(rest)
    except (UserError, RunEndedError) as error:
        show = printable if error.is_one_line else printable_lines
        return _complain(show(str(error)), error.exit_status)
    except OSError as error:
        if error.errno not in _USERS_ERRORS:
            raise
        return _complain(printable(f"{error.filename or 'a file'}: {error.strerror}"), MISUSE)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning makes a status of 1 of it
            return _INTERRUPTED
        raise


@contextlib.contextmanager
def _ended_at_once_by_sigint() -> Iterator[None]:
    """Lets SIGINT end this process without a word while it has begun nothing.

    An exception in the midst of imports is caught, printed and taken for something else by the modules that it meets.
    """
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_USERS_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)
"""What an operating system refuses because of the user's disk or paths."""


def _find_page(arguments: list[str]) -> str | None:
    """Returns the page that is asked for (or that stands in for a missing command), or None if a command is."""
    groups = {command.name.split()[0] for command in COMMANDS if " " in command.name}
    if not arguments or arguments[0] in ("-h", "--help"):
        return help_text()
    if arguments[0] == "--version":
        return f"genesis {__version__}"
    if arguments[0] in groups and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        return help_text(arguments[0])
    return None


def _complain(message: str, status: int) -> int:
    print(f"genesis: error: {message}", file=sys.stderr)
    return status
