"""The surroundings that every command needs, and what it takes instead: text in UTF-8, a home, a user's name.

Containers run programs as users without a name or a home, and job scripts run with LANG=C. Libraries raise errors about
either in places that have nothing to do with the command.
"""

import codecs
import contextlib
import io
import os
import pwd
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from genesis.base.errors import escape_controls

_UTF8_NAME = "PYTHONUTF8"
_STREAMS_NAME = "PYTHONIOENCODING"
_USER_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""The variables that `getpass.getuser` reads, in its order."""


def restart_in_utf8() -> None:
    """Starts this program again if Python takes names of files and arguments in another encoding than UTF-8.

    Python decides that when it starts. What is printed keeps the encoding of the terminal.
    """
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get(_UTF8_NAME) == "1":
        return
    os.environ[_UTF8_NAME] = "1"
    if sys.stdout is not None:
        os.environ.setdefault(_STREAMS_NAME, sys.stdout.encoding)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare_process() -> None:
    """Makes the streams take any text, and gives the process a home directory and a name of its user.

    A character that the encoding of standard output lacks is printed by its number.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        encoding = codecs.lookup(sys.stdin.encoding).name
        # `genesis.base.arguments.read_text` refuses what the encoding does not have.
        sys.stdin.reconfigure(encoding="utf-8" if encoding == "ascii" else encoding, errors="surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A launcher may have put a pipe in the place of a file: the stream takes the change, but finds no position.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    if not any(os.environ.get(name) for name in _USER_NAMES) and _find_account() is None:
        os.environ["USER"] = f"user-{os.getuid()}"
    if "HOME" not in os.environ and _find_account() is None:
        # There may be no place for temporary files either, which the command reports if it matters.
        with contextlib.suppress(OSError):
            os.environ["HOME"] = str(_make_home())


_MOVES = re.compile(r"(?:[\r\n]|\x1b\[A)*")
"""How a bar of tqdm, which the downloads of other packages show, goes back over itself."""
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
"""How other packages, such as wandb, write in colours: it moves nothing."""


class EscapedStream:
    """A stream in which names and values of others cannot write control characters.

    Args:
        stream: The stream below, which takes everything else.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream  # rich writes its own sequences there; `genesis.base.console` escapes the rest
        self._is_terminal = stream.isatty()
        self._has_bars = stream is sys.stderr

    def write(self, text: str) -> int:
        """Writes a text with its control characters escaped, other than line ends, tabs and colours."""
        begin, rest = "", text
        if self._has_bars and self._is_terminal:
            moves = _MOVES.match(text)
            assert moves is not None  # it matches nothing as well
            begin, rest = text[: moves.end()], text[moves.end() :]
        elif self._has_bars:
            rest = text.replace("\r\n", "\n").replace("\r", "\n")  # in a file, each state of a bar is a line
        if self._is_terminal:
            parts = _COLOUR.split(rest)
            rest = "".join(part if number % 2 else escape_controls(part) for number, part in enumerate(parts))
        else:
            rest = escape_controls(rest)
        self.rich_proxied_file.write(begin + rest)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each text as `write` does."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextlib.contextmanager
def escaped_streams() -> Iterator[None]:
    """Escapes control characters in all that this process prints within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and EscapedStream(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def own_output() -> TextIO:
    """Returns where a model's own text goes: standard output, which escapes nothing unless it is a terminal."""
    out = sys.stdout
    below: TextIO = out if out.isatty() else getattr(out, "rich_proxied_file", out)
    return below


def _find_account() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        return None


def _make_home() -> Path:
    home = Path(tempfile.gettempdir()) / f"genesis-home-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    # Programs trust what lies in a home directory.
    is_ours = not home.is_symlink() and home.stat().st_uid == os.getuid()
    return home if is_ours else Path(tempfile.mkdtemp(prefix="genesis-home-"))
