"""An argument parser that reports mistakes in one line."""

import argparse
import contextlib
import difflib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from genesis.base.errors import UserError, printable
from genesis_callbacks.base.files import find_irregular_kind

_NAMED_BY_USERS: Final = ("--data.mix.", "--data.max_epochs.")
"""Options below which the names are those of the user's sources."""


_UNITS: Final = {
    **{f"{letter}{end}": 1000**power for power, letter in enumerate("kmgtpe", start=1) for end in ("", "b")},
    **{f"{letter}{end}": 1024**power for power, letter in enumerate("kmgtpe", start=1) for end in ("i", "ib")},
    **{"": 1, "b": 1},
}
_SIZE: Final = re.compile(r"\s*(?P<number>[0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE)
_MOST_BYTES: Final = 10**24


class Bytes(int):
    """A number of bytes that a user gives, also as a text: `5GB`, `512MiB`."""


def read_size(text: object) -> Bytes:
    """Returns the bytes that a text such as `5GB`, `80GiB` or `5000000000` means.

    Example:
        >>> read_size("5GB"), read_size("1.5 GiB"), read_size("200_000")
        (5000000000, 1610612736, 200000)

    Raises:
        argparse.ArgumentTypeError: It is no number of bytes.
    """
    found = _SIZE.fullmatch(str(text).replace("_", ""))
    unit = None if found is None else _UNITS.get(found["unit"].lower())
    if found is None or unit is None or not 0 <= float(found["number"]) * unit <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{str(text)!r} is no size: write it as 5GB, 512MiB or a number of bytes")
    number = found["number"]
    return Bytes(int(number) * unit if number.isdecimal() else int(float(number) * unit))


class Gigabytes(float):
    """An amount of memory in GB that a user gives, also as a text: `4`, `4GB`, `512MB`."""


def read_gigabytes(text: object) -> Gigabytes:
    """Returns the GB of a size, whose unit is GB where it has none.

    Example:
        >>> read_gigabytes("0.5"), read_gigabytes("512MB"), read_gigabytes("1GiB")
        (0.5, 0.512, 1.073741824)

    Raises:
        argparse.ArgumentTypeError: It is no size.
    """
    try:
        number = float(str(text))
        if 0 <= number < math.inf:
            return Gigabytes(number)
    except ValueError:
        with contextlib.suppress(argparse.ArgumentTypeError):
            return Gigabytes(read_size(text) / 1e9)
    raise argparse.ArgumentTypeError(f"{str(text)!r} is no size: write it as 0.5 (GB), 512MB or 512MiB")


def read_path(text: str) -> Path:
    """Returns the path of an argument.

    Raises:
        argparse.ArgumentTypeError: The text is empty; as a path it would be the working directory.
    """
    if not str(text).strip():
        raise argparse.ArgumentTypeError("the path is empty: give a path")
    return Path(text)


def respell(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with underscores in the names of options, up to a lone `--`. Pure.

    Users may write dashes or underscores. Names that users chose, such as those of sources, stay as they are.

    Example:
        >>> respell(["--data.seq-len=8", "--data.mix.my-text", "1", "a-b", "--", "--c-d"])
        ['--data.seq_len=8', '--data.mix.my-text', '1', 'a-b', '--', '--c-d']
    """
    end = words.index("--") if "--" in words else len(words)
    return [*map(_respell, words[:end]), *words[end:]]


def _respell(word: str) -> str:
    name, equals, value = word.partition("=")
    if not name.startswith("--") or " " in name:
        return word
    ours = "--" + name.removeprefix("--").replace("-", "_")
    kept = next((len(option) for option in _NAMED_BY_USERS if ours.startswith(option)), len(ours))
    return f"{ours[:kept]}{name[kept:]}{equals}{value}"


def read_text(text: str) -> str:
    """Returns the text of an argument, or of a line of standard input.

    Raises:
        argparse.ArgumentTypeError: It is not UTF-8, which Python shows by characters that stand for single bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(
            f"the text '{printable(text[:40])}' is not UTF-8 at character {error.start + 1}: convert it to UTF-8"
        ) from None
    return text


_NUMBER: Final = re.compile(r"argument (?P<option>.+): invalid (?P<type>int|float) value: (?P<value>'.*')")
_CHOICE: Final = re.compile(r"argument (?P<option>.+): invalid choice: (?P<value>'.*') \(choose from (?P<choices>.*)\)")


def _explain_number(found: re.Match[str]) -> str:
    kind = "a whole number" if found["type"] == "int" else "a number"
    return f"{found['option']} is {found['value']}: give {kind}"


def _explain_choice(found: re.Match[str]) -> str:
    return f"{found['option']} is {found['value']}: give one of {found['choices'].replace(chr(39), '')}"


class Parser(argparse.ArgumentParser):
    """Raises a UserError where argparse would print and exit; an unknown option comes with the nearest one.

    An empty path is refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", Path, read_path)

    def error(self, message: str) -> NoReturn:
        """Raises the message as a UserError.

        Raises:
            UserError: Always.
        """
        message = _CHOICE.sub(_explain_choice, _NUMBER.sub(_explain_number, message))
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        near = difflib.get_close_matches(unknown[1], list(self._option_string_actions), n=1) if unknown else []
        raise UserError(f"{self.prog}: {message}{f'; did you mean {near[0]}?' if near else ''} (see --help)")


def check_output(path: Path, option: str) -> None:
    """Refuses a name that no file can have, before the work whose result the file gets.

    Args:
        path: The file.
        option: The option that names it.

    Raises:
        UserError: It is a directory, a device, a pipe or a socket; a link to one is, too.
    """
    if path.is_dir():
        raise UserError(f"{option} is {path}, which is a directory: give the name of a file")
    if path.exists() and not path.is_file():
        kind = find_irregular_kind(path.stat().st_mode)
        raise UserError(f"{option} is {path}, which is {kind}: give the name of a file")


def read_count(text: str) -> int:
    """Returns an argument that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before and after the first `--`."""
    if "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]
