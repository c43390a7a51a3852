"""Refuses misspelt options and wrong values of `genesis fit` and `genesis validate` before Lightning is imported.

`option_names.json` next to this file lists the options of the real parser; `make golden` writes it, and a test compares
it with the parser. Only names that are certainly wrong by this list are refused. All others are left to the real
parser: abbreviations, keys below an option (`trainer.strategy.init_args.shard`), and names declared in our sources.
"""

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import yaml

from genesis.base.errors import UserError
from genesis.cli.option_values import CORPUS, RESTORE, check_corpus, check_value
from genesis.cli.options import check_is_yaml
from genesis.recipe.deprecated import check_beside_muon, is_removed, rename_in_arguments, rename_option
from genesis.recipe.imports import check_imports
from genesis.recipe.run_length import replace_in_files
from genesis.recipe.yaml import RecipeLoader, list_imports
from genesis_callbacks.base.untrusted import read_file

RECORD = Path(__file__).with_name("option_names.json")

_FEW_NAMES = 20
_PRINT = "print_config"
_CLASS_KEYS = {"class_path", "init_args"}
_TEXT_TAG = "tag:yaml.org,2002:str"
_NULL_TAG = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class OptionNames:
    """The options that one command accepts.

    Args:
        options: Dotted names that take a value: `data.seq_len`. The keys below them are not known here.
        groups: Dotted names that only contain options: `data`. All keys below them are listed.
        types: The types of those options whose values `genesis.cli.option_values` can judge.
    """

    options: frozenset[str]
    groups: frozenset[str]
    types: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, command: str) -> "OptionNames | None":
        """Returns the options of `command`; None if the list was made with another version of Lightning."""
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        if record["lightning"] != version("lightning"):
            return None
        names = record["commands"][command]
        return cls(frozenset(names["options"]), frozenset(names["groups"]), _split(names["types"]))

    def is_unknown(self, name: str) -> bool:
        """Returns whether `name` is certainly neither an option nor a key below one."""
        parts = name.split(".")
        if name in self.options | self.groups or _CLASS_KEYS.intersection(parts):
            return False
        if not all(parts) or any(part.startswith("__") for part in parts):
            return False
        return not self.options.intersection(".".join(parts[:end]) for end in range(1, len(parts)))

    def is_abbreviated(self, name: str) -> bool:
        """Returns whether an option begins with `name`, which argparse would then accept as its abbreviation."""
        return any(option.startswith(name) for option in self.options | self.groups)

    def hint(self, name: str) -> str:
        """Returns the end of the message that refuses `name`: the nearest option."""
        group, _, last = name.rpartition(".")
        siblings = {option.rpartition(".")[2]: option for option in self.options if option.rpartition(".")[0] == group}
        namesakes = [option for option in sorted(self.options) if option.rpartition(".")[2] == last]
        near = [siblings[sibling] for sibling in difflib.get_close_matches(last, sorted(siblings), n=1)] or namesakes
        if not near and group not in self.groups:
            near = difflib.get_close_matches(name, sorted(self.options), n=1)
        if near:
            return f"; did you mean {near[0]!r}?"
        return f"; the options are {', '.join(sorted(siblings))}" if 0 < len(siblings) <= _FEW_NAMES else ""


def _split(types: Mapping[str, str]) -> dict[str, list[str]]:
    return {name: kinds.split(" | ") for name, kinds in types.items()}


def check_fit(arguments: Sequence[str]) -> None:
    """Refuses `genesis fit` without a recipe, a misspelt option, a wrong value, and a missing corpus; see `check`."""
    _check_corpus(check("fit", arguments), arguments)
    _check_has_recipe("fit", arguments)


def check_validate(arguments: Sequence[str]) -> None:
    """Refuses `genesis validate` without a recipe, a misspelt option, a wrong value, and a missing corpus."""
    _check_corpus(check("validate", arguments), arguments)
    _check_has_recipe("validate", arguments)


def _check_corpus(values: Mapping[str, str], arguments: Sequence[str]) -> None:
    is_printed_only = any(_name_of(word) == _PRINT for word in _option_words(arguments))
    if not is_printed_only and all(map(str.strip, values.values())):  # the real parser reports an empty value
        check_corpus(values.get(CORPUS), is_restored=RESTORE in values)


def check(command: str, arguments: Sequence[str]) -> dict[str, str]:
    """Refuses names that are certainly misspelt, and values that are certainly wrong.

    Args:
        command: `fit` or `validate`.
        arguments: Its arguments; those in their `--config` files are checked, too.

    Returns:
        The single values that are given, as they are written; none where the real parser has to judge.

    Raises:
        UserError: An option is misspelt; the message has the option and the nearest one. Or its value is wrong.
    """
    arguments, _ = rename_in_arguments(arguments)
    _check_beside_muon(arguments)
    words = [word for word in _option_words(arguments) if " " not in word]  # with a space it may be a value
    names = OptionNames.read(command)
    if names is None or any(_may_ask_for_help(word, names) for word in words):
        return {}
    for word in words:
        name = _name_of(word)
        if names.is_unknown(name) and not names.is_abbreviated(name) and not _is_declared(name):
            raise UserError(f"unrecognized arguments: {word}{names.hint(name)}")
    values: dict[str, str] = {}
    for path in _config_files(arguments):
        values |= _check_file(command, path, names)
    for name, value in _given_values(arguments):
        if name in names.types:
            check_value("", name, value, names.types[name])
        values[name] = value
    return values


def _check_beside_muon(arguments: Sequence[str]) -> None:
    """Refuses options of the optimizer beside a file that names `muon`, under which they had another meaning."""
    files = [(str(path), _read_options(path, "model.optimizer.")) for path in _config_files(arguments)]
    check_beside_muon(files, list(_given_values(arguments)))


def _given_values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields option and value of `--NAME=VALUE` and `--NAME VALUE`."""
    words = list(arguments)[: arguments.index("--") if "--" in arguments else None]
    for word, following in itertools.zip_longest(words, words[1:]):
        if word.startswith("--"):
            _, equals, value = word.partition("=")
            if equals:
                yield _name_of(word), value
            elif following is not None and not following.startswith("--"):
                yield _name_of(word), following


def _check_has_recipe(command: str, arguments: Sequence[str]) -> None:
    """Refuses a command without any recipe, for which the real parser would list every required option.

    Raises:
        UserError: There is no recipe, and no option of a model in its place.
    """
    words = [_name_of(word) for word in _option_words(arguments)]
    starts = ("config", "model", "print_config")
    if "-c" not in arguments and not any(word.startswith(starts) or word.endswith("help") for word in words):
        raise UserError(
            f"`genesis {command}` needs a recipe: give one by --config, such as --config genesis-10m; "
            "`genesis recipes` lists those of Genesis"
        )


def _option_words(arguments: Sequence[str]) -> Iterator[str]:
    for word in arguments:
        if word == "--":
            return
        if word.startswith("--"):
            yield word


def _name_of(word: str) -> str:
    """Returns the option in `--NAME`, `--NAME=VALUE`, or `--NAME+=VALUE`, which appends to a list."""
    return word.partition("=")[0].removeprefix("--").removesuffix("+")


def _may_ask_for_help(word: str, names: OptionNames) -> bool:
    """Returns whether `word` may be `--help`, or the help of one class (`--trainer.logger.help`), in full or short."""
    name = _name_of(word)
    if name in names.options | names.groups and not name.endswith("help"):
        return False
    return any(option.endswith("help") and option.startswith(name) for option in names.options)


def _config_files(arguments: Sequence[str]) -> Iterator[Path]:
    """Yields the regular files given by --config. A pipe is skipped: only one reader, the real parser, can read it."""
    for position, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in ("-c", "--config"):
            path = Path(value if equals else "".join(arguments[position + 1 : position + 2]))
            if path.is_file():
                yield path


def replace_in_recipes(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns what later recipes replace in earlier ones, and lines about it (`recipe.run_length.replace_in_files`).

    Args:
        arguments: Of `genesis fit`, with its `--config` files.
    """
    paths = list(_config_files(arguments))
    return replace_in_files((str(path), _read_values(path)) for path in (paths if len(paths) > 1 else ()))


def _read_values(path: Path) -> dict[str, str]:
    """Returns the single values in a file, as they are written."""
    check_is_yaml(path)
    root = yaml.compose(read_file(path), RecipeLoader)
    assert root is not None, "it is a mapping"
    found = ((rename_option(given), node) for given, node in _leaves(root))
    return {name: node.value for name, node in found if isinstance(node, yaml.ScalarNode) and node.tag != _NULL_TAG}


def _read_options(path: Path, prefix: str) -> dict[str, str]:
    """Returns the options in a file whose names begin with `prefix`, without it; the empty text for lists."""
    check_is_yaml(path)
    root = yaml.compose(read_file(path), RecipeLoader)
    assert root is not None, "it is a mapping"
    leaves = ((name, node.value if isinstance(node, yaml.ScalarNode) else "") for name, node in _leaves(root))
    return {name.removeprefix(prefix): value for name, value in leaves if name.startswith(prefix)}


def _check_file(command: str, path: Path, names: OptionNames) -> dict[str, str]:
    """Checks a file and returns the single values in it, as they are written."""
    check_is_yaml(path)
    root = yaml.compose(read_file(path), RecipeLoader)
    assert root is not None, "it is a mapping"
    check_imports(list_imports(root), str(path))
    values: dict[str, str] = {}
    for given, node in _leaves(root):
        name = rename_option(given)
        if names.is_unknown(name) and not is_removed(name) and not _is_declared(name):
            raise UserError(f"{path}: unknown key {name}{names.hint(name)}")
        if isinstance(node, yaml.ScalarNode):
            if name in names.types:
                check_value(f"{path}: ", name, node.value, names.types[name])
            if node.tag != _NULL_TAG:
                values[name] = node.value
    return values


def _leaves(node: yaml.Node, prefix: str = "", above: tuple[yaml.Node, ...] = ()) -> Iterator[tuple[str, yaml.Node]]:
    """Yields the dotted names of all values in a mapping, and the values.

    Merge keys (`<<`) and keys that are not text are skipped.
    """
    pairs = {key.value: value for key, value in node.value if key.tag == _TEXT_TAG}
    for key, value in pairs.items():
        name = prefix + key.removesuffix("+")
        if not isinstance(value, yaml.MappingNode):
            yield name, value
        elif value not in above:  # an anchor may contain itself
            yield from _leaves(value, f"{name}.", (*above, value))


def _is_declared(name: str) -> bool:
    """Returns whether our sources declare a parameter or a field of this name, which may be newer than the list."""
    declared = re.compile(rf"\b{re.escape(name.rpartition('.')[2])} *: *\S")
    return any(
        declared.search(path.read_text(encoding="utf-8"))
        for package in ("genesis", "genesis_callbacks")
        for folder in _folders(package)
        for path in folder.rglob("*.py")
    )


def _folders(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    yield from map(Path, (spec and spec.submodule_search_locations) or ())
