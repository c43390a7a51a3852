"""Options of a command, read from flags and YAML files into the dataclass that owns them."""

import difflib
import re
from argparse import ArgumentError
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from genesis.errors import UserError

T = TypeVar("T")

PLAIN_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""


def build_parser(name: str, description: str) -> ArgumentParser:
    """Returns a parser for `genesis NAME` that reads YAML files by `--config`."""
    parser = ArgumentParser(prog=f"genesis {name}", description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file of options; may be given more than once")
    return parser


def parse(parser: ArgumentParser, argv: list[str], *options: type) -> Namespace:
    """Returns the arguments with every dataclass among them made.

    Raises:
        UserError: An option is unknown, missing or of a wrong type. The nearest name of a field of `options` is hinted.
    """
    known = sorted({name for option in options for name in _field_names(option)})
    try:
        return parser.instantiate_classes(parser.parse_args(argv))
    except UserError:
        raise
    except (ArgumentError, ValueError) as error:
        raise UserError(f"{parser.prog}: {_explain(str(error), known)} (--help tells all)") from None


def make(options: type[T], arguments: Namespace) -> T:
    """Returns the dataclass whose fields `add_class_arguments` put at the top level of the parser."""
    return options(**{field.name: getattr(arguments, field.name) for field in fields(options)})  # type: ignore[arg-type]


def _field_names(options: type) -> set[str]:
    """Returns the names of a dataclass's fields and of the dataclasses in them."""
    names: set[str] = set()
    for name, hint in get_type_hints(options).items():
        names.add(name)
        for inner in (hint, *get_args(hint)):
            if isinstance(inner, type) and is_dataclass(inner):
                names |= _field_names(inner)
    return names


def _explain(message: str, known: list[str]) -> str:
    line = " ".join(message.split())
    unknown: Any = re.search(r"Option '([^']+)' is not accepted", line) or re.search(
        r"unrecognized arguments: --([^\s=]+)", line, re.IGNORECASE
    )
    if unknown:
        near = difflib.get_close_matches(unknown[1].split(".")[-1], known, n=1)
        if near:
            line += f"; did you mean {near[0]}?"
    return line
