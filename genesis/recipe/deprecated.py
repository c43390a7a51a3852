"""Options of earlier versions: two tables, applied to command lines, YAML and recipes.

The command line renames an old option before it parses, or leaves it out, and warns once; recipes that checkpoints and
run directories hold are compared under today's names. To rename an option, add a line to `RENAMED`; to remove one whose
values all led to the same numbers, add it to `REMOVED`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import yaml

from genesis.base.errors import UserError

RENAMED: Final = {"trainer.strategy.forward_skew_seconds": "desync_seconds"}
"""Old dotted name, without the `init_args` of classes, to the new last part of that name."""

REMOVED: Final = {"model.gradient_norm": "every run reads the norm on the host, with the same numbers"}
"""Dotted name, without the `init_args` of classes, to why the option can be ignored."""

_CLASS_KEY: Final = "init_args"


def is_removed(name: str) -> bool:
    """Returns whether an option no longer exists and is ignored."""
    return _without_classes(name) in REMOVED


def describe_deprecated(name: str) -> str:
    """Returns what a user should know of an option that has another name, or is ignored."""
    reason = REMOVED.get(_without_classes(name))
    return f"{name} is deprecated; write {rename_option(name)}" if reason is None else f"{name} is ignored: {reason}"


def rename_option(name: str) -> str:
    """Returns the current name of an option; a current name is returned unchanged.

    Example:
        >>> rename_option("trainer.strategy.init_args.forward_skew_seconds")
        'trainer.strategy.init_args.desync_seconds'
    """
    parts = name.split(".")
    new = RENAMED.get(_without_classes(name))
    return name if new is None else ".".join([*parts[:-1], new])


def rename_in_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of a command line under current names, and the old names that were among them."""
    renamed, found = [], []
    option = ""
    for word in arguments:
        if is_removed(option) and not word.startswith("--"):
            continue  # its value
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            option = name.removeprefix("--").removesuffix("+")
            if is_removed(option):
                found.append(option)
                continue
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
    """Returns a YAML text with current options, and the old names that it had. All else in it stays as written.

    Args:
        text: A mapping of options; any other text is returned unchanged.
        prefix: The option whose value the text is; empty for a file of options.

    Raises:
        UserError: The text has an option under both names.
    """
    if not any(name.rpartition(".")[2] in text for name in (*RENAMED, *REMOVED)):
        return text, []
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return text, []  # the parser of the options refuses it, with the position
    found = list(_old_keys(root, prefix)) if root is not None else []
    for key, value, node, name in sorted(found, key=lambda one: one.key.start_mark.index, reverse=True):
        if is_removed(name):
            before, after = text[: key.start_mark.index], text[value.end_mark.index :]
            if node.flow_style:
                after = re.sub(r"^\s*,", "", after)
            # A block of nothing would be null, and no mapping.
            text = before + ("{}" if len(node.value) == 1 and not node.flow_style else "") + after
        else:
            quote = key.style if key.style in ("'", '"') else ""
            new = f"{quote}{rename_option(name).rpartition('.')[2]}{quote}"
            text = f"{text[: key.start_mark.index]}{new}{text[key.end_mark.index :]}"
    return text, [old.name for old in found]


def rename_in_recipe(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a resolved recipe with current options. A current name that is already there keeps its value."""
    renamed: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{prefix}.{key}" if prefix else key
        if is_removed(name):
            continue
        new = rename_option(name).rpartition(".")[2] if _without_classes(name) in RENAMED else key
        if new == key or new not in recipe:
            renamed[new] = rename_in_recipe(value, name) if isinstance(value, Mapping) else value
    return renamed


def _without_classes(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _CLASS_KEY)


class _OldKey(NamedTuple):
    key: yaml.ScalarNode
    value: yaml.Node
    node: yaml.MappingNode
    name: str


def _old_keys(node: yaml.Node, prefix: str, above: tuple[yaml.Node, ...] = ()) -> Iterator[_OldKey]:
    """Yields the keys with an old name below `node`, each with its dotted name."""
    if not isinstance(node, yaml.MappingNode) or node in above:  # an anchor may contain an alias of itself
        return
    names = {key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name = f"{prefix}.{key.value}" if prefix else key.value
        new = rename_option(name)
        if is_removed(name):
            yield _OldKey(key, value, node, name)
        elif new != name:
            if new.rpartition(".")[2] in names:
                raise UserError(f"both {new} and its old name {name} are given; remove {name}")
            yield _OldKey(key, value, node, name)
        yield from _old_keys(value, name, (*above, node))
