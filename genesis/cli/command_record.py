"""The options and the help of commands, recorded: completion and a missing extra leave the commands unimported.

`command_record.json` next to this file has the options of each command, for shell completion, and the whole help of the
commands that have an extra, because their code may not load without it. `make golden` writes the file, and a test
compares it with what the commands print.
"""

import json
import re
from pathlib import Path
from typing import Final, NamedTuple

RECORD: Final = Path(__file__).with_name("command_record.json")
COLUMNS: Final = 100
"""The width of recorded help."""

_OPTION: Final = re.compile(r"(?P<name>--[\w.-]+)\+?(?: (?P<value>\[?\{(?P<choices>[^}\s]*)\}|[^\s,]+))?")
_NOT_SHOWN: Final = {"--help"}


class Record(NamedTuple):
    """The options of commands, each with the choices of its value or None without a value, and the help of some."""

    options: dict[str, dict[str, list[str] | None]]
    help: dict[str, str]


def read_record() -> Record:
    """Returns the recorded options and help pages."""
    return Record(**json.loads(RECORD.read_text(encoding="utf-8")))


def find_options(text: str) -> dict[str, list[str] | None]:
    r"""Returns the options in a command's help, each with the choices of its value; None if it takes no value. Pure.

    Example:
        >>> find_options("options:\n  -v, --verbose\n  --kind {a,b}  one of two\n  --out FILE\n")
        {'--verbose': None, '--kind': ['a', 'b'], '--out': []}
    """
    found: dict[str, list[str] | None] = {}
    for line in text.splitlines():
        if re.match(r"  -", line):
            names = line.strip().partition("  ")[0]
            for option in _OPTION.finditer(names):
                if option["name"] not in _NOT_SHOWN:
                    choices = option["choices"].split(",") if option["choices"] else []
                    found.setdefault(option["name"], choices if option["value"] else None)
    return found
