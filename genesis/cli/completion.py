"""`genesis completion`: prints a shell completion script, built from the table of commands."""

import argparse
import re

import shtab

from genesis.base.arguments import Parser
from genesis.cli.command_record import read_record
from genesis.cli.table import COMMANDS


def _parser_of_commands() -> argparse.ArgumentParser:
    """Returns a parser with the names and options of all commands."""
    parser = argparse.ArgumentParser("genesis")
    parser.add_argument("--version", action="store_true", help="print the version")
    options = read_record().options
    words = parser.add_subparsers()
    leaves: dict[str, argparse.ArgumentParser] = {}
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for command in COMMANDS:
        first, _, second = command.name.partition(" ")
        if not second:
            leaf = leaves[first] = words.add_parser(first, help=command.summary)
        else:
            if first not in groups:  # `mirror` is a command itself, and the first word of another one
                parent = leaves.get(first) or words.add_parser(first, help=f"{first} commands")
                groups[first] = parent.add_subparsers()
            leaf = groups[first].add_parser(second, help=command.summary)
        for name, choices in options[command.name].items():
            _add_option(leaf, name, choices)
        if command.name not in groups:
            _complete_files(leaf.add_argument("path", nargs="*", help=" "))
    return parser


def _complete_files(action: argparse.Action) -> None:
    action.complete = shtab.FILE  # type: ignore[attr-defined]


def _add_option(parser: argparse.ArgumentParser, name: str, choices: list[str] | None) -> None:
    if choices is None:
        parser.add_argument(name, action="store_true", help=" ")
        return
    option = parser.add_argument(name, choices=choices or None, help=" ")
    if not choices:
        _complete_files(option)


def main(argv: list[str]) -> int:
    """Prints a completion script; `source <(genesis completion bash)` activates it."""
    parser = Parser("genesis completion", description=main.__doc__)
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    script = shtab.complete(_parser_of_commands(), parser.parse_args(argv).shell)
    # Of bash's own completion of files, a directory has a slash after it, and no space as here.
    script = re.sub(r"^(\w+_COMPGEN=)_shtab_compgen_files$", r"\1", script, flags=re.MULTILINE)
    print(script.replace("complete -o bashdefault", "complete -o bashdefault -o default"))
    return 0
