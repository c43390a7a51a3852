"""An argument parser that reports mistakes in one line."""

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from genesis.errors import UserError
from genesis_callbacks.files import find_irregular_kind


def read_path(text: str) -> Path:
    """Returns the path of an argument.

    Raises:
        argparse.ArgumentTypeError: The text is empty; as a path it would be the working directory.
    """
    if not str(text).strip():
        raise argparse.ArgumentTypeError("the path is empty: give a path")
    return Path(text)


class Parser(argparse.ArgumentParser):
    """Raises a UserError where argparse would print and exit; an unknown option comes with the nearest one.

    Users may write an option with dashes or underscores between its words. An empty path is refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", Path, read_path)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses after every option has been put into the spelling in which it was added."""
        given = sys.argv[1:] if args is None else list(args)
        end = given.index("--") if "--" in given else len(given)
        return super().parse_known_args([*map(self._respell, given[:end]), *given[end:]], namespace)

    def _respell(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        spellings = {option.replace("_", "-"): option for option in self._option_string_actions}
        return spellings.get(name.replace("_", "-"), name) + equals + value

    def error(self, message: str) -> NoReturn:
        """Raises the message as a UserError.

        Raises:
            UserError: Always.
        """
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
