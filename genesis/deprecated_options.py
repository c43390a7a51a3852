"""Options under the names that earlier versions gave them: one table, applied to command lines, YAML and recipes.

The command line renames an old option before it parses, and warns once; recipes that checkpoints and run directories
hold are compared under today's names. To rename an option, add a line to `RENAMED`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from genesis.errors import UserError

RENAMED: Final = {"trainer.strategy.forward_skew_seconds": "desync_seconds"}
"""Old dotted name, without the `init_args` of classes, to the new last part of that name."""

_CLASS_KEY: Final = "init_args"


def rename_option(name: str) -> str:
    """Returns the current name of an option; a current name is returned unchanged.

    Example:
        >>> rename_option("trainer.strategy.init_args.forward_skew_seconds")
        'trainer.strategy.init_args.desync_seconds'
    """
    parts = name.split(".")
    new = RENAMED.get(".".join(part for part in parts if part != _CLASS_KEY))
    return name if new is None else ".".join([*parts[:-1], new])


def rename_in_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of a command line under current names, and the old names that were among them."""
    renamed, found = [], []
    option = ""
    for word in arguments:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            option = name.removeprefix("--").removesuffix("+")
            new = rename_option(option)
            if new != option:
                found.append(option)
                name = name.replace(option, new)
        else:
            name, equals, value = "", "", word
        if ":" in value:  # an option of a class may be given as YAML or JSON
            value, old = rename_in_yaml(value, option)
            found += old
        renamed.append(f"{name}{equals}{value}")
    return renamed, found


def rename_in_yaml(text: str, prefix: str = "") -> tuple[str, list[str]]:
    """Returns a YAML text with current option names, and the old names that it had. All else in it stays as written.

    Args:
        text: A mapping of options; any other text is returned unchanged.
        prefix: The option whose value the text is; empty for a file of options.

    Raises:
        UserError: The text has an option under both names.
    """
    if not any(name.rpartition(".")[2] in text for name in RENAMED):
        return text, []
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return text, []  # the parser of the options refuses it, with the position
    found = dict(_old_keys(root, prefix)) if root is not None else {}
    for key in sorted(found, key=lambda key: key.start_mark.index, reverse=True):
        quote = key.style if key.style in ("'", '"') else ""
        new = f"{quote}{rename_option(found[key]).rpartition('.')[2]}{quote}"
        text = f"{text[: key.start_mark.index]}{new}{text[key.end_mark.index :]}"
    return text, list(found.values())


def rename_in_recipe(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a resolved recipe with current option names. A current name that is already there keeps its value."""
    renamed: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{prefix}.{key}" if prefix else key
        new = rename_option(name).rpartition(".")[2] if name.replace(f".{_CLASS_KEY}", "") in RENAMED else key
        if new == key or new not in recipe:
            renamed[new] = rename_in_recipe(value, name) if isinstance(value, Mapping) else value
    return renamed


def _old_keys(node: yaml.Node, prefix: str, above: tuple[yaml.Node, ...] = ()) -> Iterator[tuple[yaml.ScalarNode, str]]:
    """Yields the key nodes with an old name below `node`, each with its dotted name."""
    if not isinstance(node, yaml.MappingNode) or node in above:  # an anchor may contain an alias of itself
        return
    names = {key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name = f"{prefix}.{key.value}" if prefix else key.value
        new = rename_option(name)
        if new != name:
            if new.rpartition(".")[2] in names:
                raise UserError(f"both {new} and its old name {name} are given; remove {name}")
            yield key, name
        yield from _old_keys(value, name, (*above, node))
