"""The `genesis` command: finds the command in the table, runs it, turns a user's mistake into one line and exit status 2."""

import difflib
import errno
import sys
from collections.abc import Sequence

from genesis import __version__
from genesis.cli.table import COMMANDS, Command
from genesis.errors import UserError

MISUSE = 2
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
    lines += ["", "`genesis COMMAND --help` tells the options of one; `genesis --version` the version."]
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
    """Runs the command line and returns the exit status: 0 good, 2 a user's mistake, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    groups = {command.name.split()[0] for command in COMMANDS if " " in command.name}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        return 0 if arguments else MISUSE
    if arguments[0] == "--version":
        print(f"genesis {__version__}")
        return 0
    if arguments[0] in groups and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        print(help_text(arguments[0]))
        return 0 if len(arguments) > 1 else MISUSE
    try:
        command, rest = find_command(arguments)
        return command.load()(rest)
    except UserError as error:
        return _complain(str(error))
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): not an error, and nothing more can be said there.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG, errno.ENOENT):
            raise
        return _complain(f"{error.filename or 'a file'}: {error.strerror}")
    except KeyboardInterrupt:
        return _INTERRUPTED


def _complain(message: str) -> int:
    print(f"genesis: error: {message}", file=sys.stderr)
    return MISUSE
