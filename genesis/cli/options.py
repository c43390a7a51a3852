"""Builds the dataclass of a command's options from flags and YAML files."""

import contextlib
import difflib
import os
import re
from argparse import ArgumentError, ArgumentTypeError
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace, _loaders_dumpers, get_loader, set_dumper, set_loader
from jsonargparse.typing import register_type

from genesis.base.arguments import Bytes, Gigabytes, read_gigabytes, read_path, read_size
from genesis.base.errors import UserError
from genesis.cli.help import PlainParser
from genesis.cli.import_gate import guard_imports
from genesis.cli.type_errors import explain_types
from genesis.recipe.yaml import FastRecipeLoader, RecipeLoader, check_aliases, check_is_yaml, dump_yaml

T = TypeVar("T")

FAILED_CHECK = 1
"""Exit status of a command whose check found a problem."""
PLAIN_WIDTH = 120
"""Columns of a table that is printed to a file or a pipe."""


# For every parser of jsonargparse, that of `genesis fit` included.
guard_imports()


def _write_gigabytes(size: Gigabytes) -> float:
    return int(size) if size.is_integer() else float(size)


for _kind, _write, _read in (
    (Path, str, read_path),
    (Bytes, int, read_size),
    (Gigabytes, _write_gigabytes, read_gigabytes),
):
    register_type(
        _kind,
        _write,
        _read,
        deserializer_exceptions=ArgumentTypeError,
        type_check=isinstance,
        fail_already_registered=False,
    )


_load_yaml: Final = get_loader("yaml")


def _load_value(text: str) -> Any:
    """Loads an option's value, or a file that an option names (`model.decoder`), as jsonargparse does."""
    if "*" in text and "&" in text:
        with contextlib.suppress(yaml.YAMLError, RecursionError):  # the loader reports them
            root = yaml.compose(text, RecipeLoader)
            if root is not None:
                check_aliases(root, f"the value or file that begins with {' '.join(text[:40].split())!r}")
    return _load_yaml(text)


# Of plain values, which jsonargparse gives to no loader that is set.
_loaders_dumpers.yaml_default_loader = FastRecipeLoader  # type: ignore[assignment]
set_loader("yaml", _load_value, (yaml.YAMLError,))
set_dumper("yaml", dump_yaml)


class OptionsParser(PlainParser):
    """Parses options; a file that is not YAML is refused with its name and the position of the mistake."""

    def parse_path(self, cfg_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        """Returns the options in the file `cfg_path`."""
        check_is_yaml(cfg_path)
        return super().parse_path(cfg_path, *args, **kwargs)


def build_parser(name: str, description: str) -> ArgumentParser:
    """Returns a parser for `genesis NAME` that reads YAML files given by `--config`."""
    parser = OptionsParser(prog=f"genesis {name}", description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file of options; repeatable")
    return parser


def parse(parser: ArgumentParser, argv: list[str], *options: type) -> Namespace:
    """Returns the arguments, with every dataclass among them built.

    Raises:
        UserError: An option is unknown, missing or of a wrong type. The message names the nearest field of `options`.
    """
    known = sorted({name for option in options for name in _field_names(option)})
    try:
        return parser.instantiate_classes(parser.parse_args(argv))
    except UserError:
        raise
    except (ArgumentError, ValueError) as error:
        raise UserError(f"{parser.prog}: {_explain(str(error), known)} (see --help)") from None


def make(options: type[T], arguments: Namespace) -> T:
    """Returns the dataclass whose fields `add_class_arguments` added at the top level of the parser."""
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


_CHOICES = re.compile(
    r'Parser key "(?P<key>[^"]+)": (?:Does not validate against any of the Union subtypes .*- )?'
    r"Expected a typing\.Literal\[(?P<choices>[^\]]*)\].* (?:Got|Given) value: (?P<value>.*)"
)
"""The text of jsonargparse about a value that is none of an option's choices."""
_EMPTY_PATH = re.compile(
    r'Parser key "(?P<key>[^"]+)": .*Not of type (?:Path|Bytes|Gigabytes): '
    r"(?P<reason>the path is empty: give a path|.* is no size: write it as (?:5GB, 512MiB or a number of bytes|"
    r"0.5 \(GB\), 512MB or 512MiB)).*"
)
"""The text of jsonargparse about an empty path or a size, of which an option may have several types."""


def _list_choices(found: re.Match[str]) -> str:
    return f"--{found['key']} is {found['value']!r}; choose from {found['choices'].replace(chr(39), '')}"


def explain_empty_path(line: str) -> str:
    """Returns a parser's line, which for an empty path becomes the option and the reason."""
    return _EMPTY_PATH.sub(r"\g<key>: \g<reason>", line)


def _explain(message: str, known: list[str]) -> str:
    line = explain_types(explain_empty_path(_CHOICES.sub(_list_choices, " ".join(message.split()))))
    elsewhere = re.search(r"Option '((?:model|data|trainer|schedule)\.[^']+)' is not accepted", line)
    if elsewhere:
        return f"unknown key {elsewhere[1]}: --config is a recipe of `genesis fit`"
    unknown: Any = re.search(r"Option '([^']+)' is not accepted", line) or re.search(
        r"unrecognized arguments: --([^\s=]+)", line, re.IGNORECASE
    )
    if unknown:
        name = unknown[1].split(".")[-1]
        near = difflib.get_close_matches(name, known, n=1)
        if near and near[0] != name:  # the same name is a field of something else, such as of a source
            line += f"; did you mean {near[0]}?"
    return line
