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
_CHOICES: Final = re.compile(r"type: one of ((?:[\w.+-]+, )*[\w.+-]+)(?=\)| or |, default)")
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
        >>> find_options("  --packing PACKING\n      How. (type: one of chunk,\n      pad or null, default: null)\n")
        {'--packing': ['chunk', 'pad']}
    """
    found: dict[str, list[str] | None] = {}
    for part in re.split(r"^  (?=-)", text, flags=re.MULTILINE)[1:]:
        described = _CHOICES.search(" ".join(part.split()))
        for option in _OPTION.finditer(re.split(r"  |\n", part)[0]):
            if option["name"] not in _NOT_SHOWN:
                choices = option["choices"].split(",") if option["choices"] else []
                choices = choices or (described[1].split(", ") if described else [])
                found.setdefault(option["name"], choices if option["value"] else None)
    return found
