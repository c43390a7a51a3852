"""What every command's `--help` says, recorded, for those who must not import the commands or cannot.

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

_OPTION: Final = re.compile(r"(?P<name>--[\w.-]+)(?: \{(?P<choices>[^}\s]*)\})?")
_NOT_SHOWN: Final = {"--help"}


class Record(NamedTuple):
    """The options of commands, each with its choices, and the help of some."""

    options: dict[str, dict[str, list[str]]]
    help: dict[str, str]


def read_record() -> Record:
    """Returns the recorded options and help pages."""
    return Record(**json.loads(RECORD.read_text(encoding="utf-8")))


def find_options(text: str) -> dict[str, list[str]]:
    """Returns the options in a command's help, each with its choices. Pure.

    Example:
        >>> find_options("options:\\n  -v, --verbose\\n  --kind {a,b}  one of two\\n")
        {'--verbose': [], '--kind': ['a', 'b']}
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if re.match(r"  -", line):
            names = line.strip().partition("  ")[0]
            for option in _OPTION.finditer(names):
                if option["name"] not in _NOT_SHOWN:
                    found.setdefault(option["name"], option["choices"].split(",") if option["choices"] else [])
    return found
