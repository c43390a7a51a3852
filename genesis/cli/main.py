"""The `genesis` command: finds a command in the table, runs it, and reports a user's mistake in one line."""

import contextlib
import difflib
import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from genesis import __version__
from genesis.base.arguments import respell
from genesis.base.errors import RunEndedError, UserError, as_line, find_remedy
from genesis.base.parent import end_with_parent, is_launched
from genesis.cli.surroundings import escaped_streams, prepare_process, restart_in_utf8
from genesis.cli.table import COMMANDS, HELP, SECTIONS, Command, show_stages
from genesis.recipe.imports import allowing, split_allowed
from genesis.recipe.shipped import resolve_recipes

MISUSE = 2
_RANKS = ("fit", "validate")
"""The commands that a launcher such as torchrun may start as one of many ranks."""

_STARTER = "supervise"
"""The command whose arguments service files repeat; the fit that it starts takes --allow_imports."""
_INTERRUPTED = 130
"""The status that a shell reports for a program ended by SIGINT."""
_CLOSED_PIPE = 141
"""The status that a shell reports for a program ended by SIGPIPE."""
_REPEAT_SECONDS = 0.02


def help_text(group: str | None = None) -> str:
    """Returns the help page of all commands, or of one group (`data`)."""
    sections = {
        title: [command for command in commands if group is None or command.name.split()[0] == group]
        for title, commands in SECTIONS.items()
    }
    width = max(len(command.name) for commands in sections.values() for command in commands)
    lines = [f"usage: genesis {group or ''}{' ' if group else ''}COMMAND [options]"]
    if group is None:
        lines += ["", "Trains language models from raw text, with checkpoints that never lie."]
    for title, commands in sections.items():
        if commands:
            lines += ["", f"{title}:"] if group is None else [""]
            lines += [f"  {command.name:<{width}}  {command.summary}" for command in commands]
    lines += [
        "",
        "`genesis COMMAND --help` lists the options of a command; `genesis --version` prints the version.",
        "`--allow-imports NAME[,NAME]` allows recipes to name code of other packages than every run uses.",
        "Exit status: 0 success, 1 a check or a run failed, 2 invalid arguments or input, 130 interrupted.",
    ]
    return "\n".join(lines)


def find_command(arguments: Sequence[str]) -> tuple[Command, list[str]]:
    """Returns the command at the beginning of `arguments`, and the remaining arguments.

    Raises:
        UserError: No command has this name; the message contains the nearest name.
    """
    by_name = {command.name: command for command in COMMANDS}
    for num_words in (2, 1):
        command = by_name.get(" ".join(arguments[:num_words]))
        if command is not None:
            return command, list(arguments[num_words:])
    wanted = " ".join(word for word in arguments[:2] if not word.startswith("-"))
    near = difflib.get_close_matches(wanted, list(by_name), n=1, cutoff=0.4)
    hint = f"; did you mean `genesis {near[0]}`?" if near else ""
    raise UserError(f"no such command: {wanted!r}{hint} (`genesis --help` lists all commands)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    The status is 0 for success, 1 for a failed check or run, 2 for a user's mistake, 130 for an interruption and 141 if
    the reader of the output is gone, as `head` is after its last line.
    """
    if argv is None:
        restart_in_utf8()
    prepare_process()
    with escaped_streams():
        return _run_to_end(list(sys.argv[1:] if argv is None else argv))


def _run_to_end(arguments: list[str]) -> int:
    """Runs the command line, reports interruptions and readers that are gone, and returns the exit status."""
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _end_interrupted(arguments)
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        return _end_unread()
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning turns the interrupt into exit status 1
            return _end_interrupted(arguments)
        if isinstance(end.__context__, BrokenPipeError):  # rich does
            return _end_unread()
        raise
    return status


def _run(arguments: list[str]) -> int:
    """Runs the command line, reports a user's mistake, and returns the exit status."""
    page = _find_page(arguments)
    if page is not None:
        print(page)
        return 0 if set(arguments) & {*HELP, "--version"} else MISUSE
    try:
        command, rest = find_command(arguments)
        words, allowed = _unify(arguments, takes_imports=command.name != _STARTER)
        rest = words[len(arguments) - len(rest) :]
        if command.name in _RANKS:
            end_with_parent()
            _silence_c10d()
        with allowing(allowed):
            with _ended_at_once_by_sigint(arguments):
                command.check_arguments(rest)
                function = command.load(rest)
                display = show_stages()
            with _no_interrupt_lost(), display:
                return function(rest)
    except (UserError, RunEndedError) as error:
        return _complain(str(error), error.exit_status)
    except OSError as error:
        if error.errno not in _USERS_ERRORS and error.filename is None:  # one that names a file is about the file
            raise
        remedy = find_remedy(error)
        problem = f"{error.filename or 'a file'}: {error.strerror}" + ("" if remedy is None else f"; {remedy}")
        return _complain(as_line(problem), MISUSE)


def _end_interrupted(arguments: Sequence[str]) -> int:
    """Prints one line about an interruption, unless another rank prints it, and returns the exit status."""
    command, _ = find_command(arguments)
    line = "genesis: interrupted" + ("; the same command continues" if command.continues else "")
    if not is_launched() or os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(line, file=sys.stderr, flush=True)
    return _INTERRUPTED


def _is_reader_gone() -> bool:
    """Returns whether standard output or standard error is a pipe that nobody reads any more."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end_unread() -> int:
    """Lets Python write what is left in its buffers to nowhere at its end, and returns the exit status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return _CLOSED_PIPE


def _unify(arguments: list[str], *, takes_imports: bool) -> tuple[list[str], frozenset[str]]:
    """Returns the arguments with options in one spelling, and with files in the place of the names of recipes.

    Args:
        arguments: The arguments, beginning with the command.
        takes_imports: Whether --allow_imports is taken out of them.

    Returns:
        The arguments, and the code that they allow recipes to name.

    Raises:
        UserError: --config names neither a file nor a recipe, and no help is asked for. Or --allow_imports is wrong.
    """
    unified = respell(arguments)
    if not HELP & set(arguments):
        unified = resolve_recipes(unified)
    allowed = frozenset[str]()
    if takes_imports:
        unified, allowed = split_allowed(unified)
    if sys.argv[1:] == arguments:
        sys.argv[1:] = unified  # Lightning reads them, and repeats them when it starts further ranks
    return unified, allowed


def _silence_c10d() -> None:
    """Keeps torch's C++ from printing warnings, unless the user asks for them. Before torch is imported.

    When a rank is gone, c10d prints a stack of C++ above the line that names the rank. Its errors are still printed.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextlib.contextmanager
def _ended_at_once_by_sigint(arguments: Sequence[str]) -> Iterator[None]:
    """Makes SIGINT end this process with one line while its modules are still being imported.

    A KeyboardInterrupt during imports would be caught, printed or misreported by the module that it happens to reach.
    """
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(_end_interrupted(arguments)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Repeats a SIGINT whose KeyboardInterrupt was raised where Python ignores exceptions.

    Such places are destructors and callbacks of weak references, which run between any two lines.
    """
    previous = sys.unraisablehook

    def repeat(unraisable: "sys.UnraisableHookArgs") -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Here, too, it would be ignored: it has to come when this function has returned.
            threading.Timer(_REPEAT_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            previous(unraisable)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = previous


_USERS_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS),
    *(errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP),
    *(errno.EIO, errno.ESTALE, errno.ETXTBSY, errno.EBUSY),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENODEV, errno.EMSGSIZE),
)
"""Errors of the operating system that the user can fix: a full or damaged disk, a limit, a missing path."""


def _find_page(arguments: list[str]) -> str | None:
    """Returns the help or version page that the arguments request, also for a missing command; None for a command."""
    names = {command.name for command in COMMANDS}
    groups = {name.split()[0] for name in names if " " in name} - names  # `mirror` is a command with one of two words
    if not arguments or arguments[0] in HELP:
        return help_text()
    if arguments[0] == "--version":
        return f"genesis {__version__}"
    if arguments[0] in groups and (len(arguments) == 1 or arguments[1] in HELP):
        return help_text(arguments[0])
    return None


def _complain(message: str, status: int) -> int:
    print(f"genesis: error: {message}", file=sys.stderr)
    return status
