"""Refuses misspelt options and wrong values of `genesis fit` and `genesis validate` before Lightning is imported.

Only what is certainly wrong by the record of options (`genesis.recipe.options`) is refused. All else is left to the
real parser: abbreviations, keys below an option whose class is not ours, and names that our sources declare.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from genesis.base.errors import UserError
from genesis.data.manifest import MANIFEST_NAME, NotPreparedError
from genesis.recipe.deprecated import is_removed, rename_in_arguments, rename_option
from genesis.recipe.imports import check_imports
from genesis.recipe.options import Options, is_current, is_declared
from genesis.recipe.resolved import ResolvedRecipe, list_steps
from genesis.recipe.values import explain_text, fits
from genesis.recipe.yaml import RecipeLoader, check_is_yaml, list_imports
from genesis_callbacks.base.untrusted import read_file

_CORPUS: Final = "data.corpus"
_RESTORE: Final = "ckpt_path"
_PRINT: Final = "print_config"
_TEXT_TAG: Final = "tag:yaml.org,2002:str"
_NULL_TAG: Final = "tag:yaml.org,2002:null"


def check_fit(arguments: Sequence[str]) -> None:
    """Refuses `genesis fit` without a recipe, a misspelt option, a wrong value, and a missing corpus; see `check`."""
    _check_command("fit", arguments)


def check_validate(arguments: Sequence[str]) -> None:
    """Refuses `genesis validate` without a recipe, a misspelt option, a wrong value, and a missing corpus."""
    _check_command("validate", arguments)


def _check_command(command: str, arguments: Sequence[str]) -> None:
    values = check(command, arguments)
    is_run = not any(_name_of(word) == _PRINT for word in _option_words(arguments))
    if is_run:
        _check_corpus(values)
    _check_has_recipe(command, arguments)
    recipe = _read_recipe(command, arguments) if is_run else None
    if recipe is not None:
        recipe.count_devices()
        recipe.check_run(is_fit=command == "fit")


def _check_corpus(values: Mapping[str, str]) -> None:
    """Refuses a corpus that does not exist, unless a checkpoint is given, whose run knows where its corpus lies.

    Raises:
        NotPreparedError: There is no corpus.
    """
    given = values.get(_CORPUS)
    if given is None or _RESTORE in values or not all(map(str.strip, values.values())):
        return  # the real parser reports an empty value
    if not (Path(given) / MANIFEST_NAME).exists():
        raise NotPreparedError(Path(given))


def check(command: str, arguments: Sequence[str]) -> dict[str, str]:
    """Refuses what `check_names` refuses, and options that the recipe's classes do not have.

    Raises:
        UserError: There is one.
    """
    values = check_names(command, arguments)
    recipe = _read_recipe(command, arguments)
    if recipe is not None:
        recipe.check_classes()
    return values


def check_names(command: str, arguments: Sequence[str]) -> dict[str, str]:
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
    words = [word for word in _option_words(arguments) if " " not in word]  # with a space it may be a value
    names = Options.read(command)
    if not is_current() or any(_may_ask_for_help(word, names) for word in words):
        return {}
    for word in words:
        name = _name_of(word)
        if names.is_unknown(name) and not names.is_abbreviated(name) and not is_declared(name):
            raise UserError(f"unrecognized arguments: {word}{names.hint(name)}")
    values: dict[str, str] = {}
    steps = list_steps(arguments)
    for path in (step for step in steps if isinstance(step, Path) and step.is_file()):  # one reader alone reads a pipe
        values |= _check_file(path, names)
    for name, value in (step for step in steps if not isinstance(step, Path)):
        _check_value("", name.removesuffix("+"), value, names)
        values[name.removesuffix("+")] = value
    return values


def _check_value(where: str, name: str, text: str, names: Options) -> None:
    option = names.find(name)
    if option is not None and not fits(text, option.types):
        raise UserError(f"{where}{explain_text(name, text, option.types)}")


def _read_recipe(command: str, arguments: Sequence[str]) -> ResolvedRecipe | None:
    """Returns the recipe; None if only the real parser can read it."""
    steps, names = list_steps(arguments), Options.read(command)
    is_left = not is_current() or any(_may_ask_for_help(word, names) for word in _option_words(arguments))
    if is_left or not all(step.is_file() for step in steps if isinstance(step, Path)):
        return None  # a pipe can be read once, by the real parser
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the real parser warns of deprecated options
        return ResolvedRecipe.read(steps)


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


def _may_ask_for_help(word: str, names: Options) -> bool:
    """Returns whether `word` may be `--help`, or the help of one class (`--trainer.logger.help`), in full or short."""
    name = _name_of(word)
    if name in names.names | names.groups and not name.endswith("help"):
        return False
    return any(option.endswith("help") and option.startswith(name) for option in names.names)


def _check_file(path: Path, names: Options) -> dict[str, str]:
    """Checks a file and returns the single values in it, as they are written."""
    check_is_yaml(path)
    root = yaml.compose(read_file(path), RecipeLoader)
    assert root is not None, "it is a mapping"
    check_imports(list_imports(root), str(path))
    values: dict[str, str] = {}
    for given, node in _leaves(root):
        name = rename_option(given)
        if names.is_unknown(name) and not is_removed(name) and not is_declared(name):
            raise UserError(f"{path}: unknown key {name}{names.hint(name)}")
        if isinstance(node, yaml.ScalarNode):
            _check_value(f"{path}: ", name, node.value, names)
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
