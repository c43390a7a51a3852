"""Reads and writes the YAML of recipes and options.

Plain words have the types of YAML 1.2, as in other programs of today, and not those of 1.1, with which PyYAML reads
`no` as false, `1e-4` as a text, `010` as 8, `2024_01` as 202401 and `12:30:45` as 45045. In two things they differ from
1.2: `16_384`, thousands set apart, is a whole number, and `010` is a text, because readers differ about it.

A document has few aliases: ten lines of them can stand for billions of values ("billion laughs"). YAML's own reader
shares what an alias repeats, but whoever walks or copies the content meets each repetition.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import yaml

from genesis.base.errors import UserError, numbered
from genesis_callbacks.base.untrusted import read_file

_MOST_REPEATED: Final = 100_000
_TYPES: Final = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:_[0-9]{3})+)|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}
"""What a plain word is: the pattern of the whole word, and the characters with which it begins."""
_NO_SECTIONS: Final = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float"))
_CLASS_PATH: Final = "class_path"
_TAKES_BARE_PATH: Final = re.compile(r"trainer\.[^.]+|model\.objective")
"""The options that also take the path of a class as a text, or the name of a file."""
_FILE: Final = re.compile(r"\.(?:yaml|yml|json)\Z")


class _Strict:
    """Reports a tag that does not fit its value, such as `!!timestamp x`, as an error of YAML."""

    def construct_document(self, node: yaml.Node) -> Any:
        """Returns the value of a document."""
        try:
            return super().construct_document(node)  # type: ignore[misc]  # of the loader
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"a value does not fit its tag ({type(error).__name__}: {error})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


class RecipeLoader(_Strict, yaml.SafeLoader):
    """Loads YAML with the types of this module; errors have positions."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's


class FastRecipeLoader(_Strict, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same by libyaml, where it is installed: for text that is known not to be nested deeply."""

    yaml_implicit_resolvers = RecipeLoader.yaml_implicit_resolvers


_MAX_DIGITS: Final = 300
"""Of a whole number: one with more is no float either."""


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 takes for something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's
        first: list(patterns) for first, patterns in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text: str = loader.construct_scalar(node)
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    if len(text) > _MAX_DIGITS:
        mark = node.start_mark
        raise yaml.constructor.ConstructorError(None, None, f"a number has {numbered(len(text), 'digits')}", mark)
    return int(text.replace("_", ""), base)


for _name, (_pattern, _first) in _TYPES.items():
    for _class in (RecipeLoader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})\\Z"), ["" if c == "\0" else c for c in _first]
        )
for _class in (RecipeLoader, FastRecipeLoader):
    _class.add_constructor("tag:yaml.org,2002:int", _construct_int)


def load_yaml(content: str | bytes, where: str | os.PathLike[str]) -> Any:
    """Returns the content of a YAML text.

    Args:
        content: The text.
        where: Its file, for messages.

    Raises:
        UserError: Its aliases repeat too many values.
        yaml.YAMLError: It is not YAML.
        RecursionError: It is nested too deeply.
    """
    loader = RecipeLoader(content)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        check_aliases(root, where)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def dump_yaml(content: Any) -> str:
    """Returns the YAML text of plain values, in their order; every reader finds the same types in it."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def check_is_yaml(path: str | os.PathLike[str], sections: Collection[str] = ()) -> None:
    """Refuses a file that is not a mapping of options. Pipes are skipped, because they can be read only once.

    Args:
        path: The file.
        sections: Keys at its top whose values are mappings, or the names of other files.

    Raises:
        UserError: The file is not YAML, is not a mapping, has a key twice, where YAML would drop the first value, has
            aliases that repeat very many values, or has another value in the place of a section, which the parser may
            drop.
    """
    if not Path(path).is_file():
        return
    try:
        node = yaml.compose(read_file(path), RecipeLoader)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{path}{_place(error.problem_mark)} is not YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{path} has brackets nested too deeply for a recipe: remove them") from None
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path} has no options: write one 'name: value' per line")
    check_aliases(node, path)
    _check_keys_are_unique(path, node)
    for key, value in node.value:
        if key.value in sections and (isinstance(value, yaml.SequenceNode) or value.tag in _NO_SECTIONS):
            place = f"{path}{_place(value.start_mark)}"
            raise UserError(f"{place} has no options in the section {key.value}: write one 'name: value' per line")


def _check_keys_are_unique(path: str | os.PathLike[str], root: yaml.Node) -> None:
    waiting, seen_nodes = [root], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen_nodes:  # an anchor may contain itself
            continue
        seen_nodes.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        keys: set[str] = set()
        for key, value in node.value:
            waiting += (key, value)
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys and key.value != "<<":
                    raise UserError(f"{path}{_place(key.start_mark)} has the key {key.value!r} twice: merge the two")
                keys.add(key.value)


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1},"


def check_aliases(root: yaml.Node, where: str | os.PathLike[str]) -> None:
    """Refuses a document whose aliases repeat very many values.

    Raises:
        UserError: They do.
    """
    num_values: dict[int, int] = {}
    if _count_values(root, num_values) - len(num_values) > _MOST_REPEATED:
        raise UserError(
            f"{where} has aliases (*name) that repeat more than {_MOST_REPEATED:,} values: write what the recipe needs "
            "without them"
        )


def _count_values(node: yaml.Node, num_values: dict[int, int]) -> int:
    """Returns the number of nodes from `node` on, repetitions included, and notes it of each node."""
    found = num_values.get(id(node))
    if found is not None:
        return found
    num_values[id(node)] = 0  # an anchor may contain itself
    total = 1
    if isinstance(node, yaml.MappingNode):
        total += sum(_count_values(each, num_values) for pair in node.value for each in pair)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_count_values(each, num_values) for each in node.value)
    num_values[id(node)] = total
    return total


def find_imports(text: str) -> list[str]:
    """Returns the import paths that a recipe names, as far as they can be seen without its options' types.

    Args:
        text: YAML, or JSON; a text that is neither names none, and no command takes it for a recipe.
    """
    try:
        root = yaml.compose(text, RecipeLoader)
    except (yaml.YAMLError, RecursionError):
        return []
    return [] if root is None else list_imports(root)


def list_imports(root: yaml.Node) -> list[str]:
    """Returns what `find_imports` returns for the nodes of a document."""
    found: list[str] = []
    waiting, seen = [("", root)], set[int]()
    while waiting:
        name, node = waiting.pop()
        if isinstance(node, yaml.ScalarNode):
            is_bare = _TAKES_BARE_PATH.fullmatch(name) and not _FILE.search(node.value)
            if name.rpartition(".")[2] == _CLASS_PATH or is_bare:
                found.append(node.value)
        elif id(node) not in seen:  # an anchor may contain itself
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                waiting += [(name, each) for each in reversed(node.value)]
            else:
                waiting += [
                    (f"{name}.{key.value}".removeprefix(".").removesuffix("+"), value)
                    for key, value in reversed(node.value)
                    if isinstance(key, yaml.ScalarNode)
                ]
    return found
