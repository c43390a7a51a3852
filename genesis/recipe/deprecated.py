"""Options of earlier versions: tables, applied to command lines, YAML and recipes.

The command line renames an old option before it parses, or leaves it out, and warns once; recipes that checkpoints and
run directories hold are compared under today's names. To rename an option, add a line to `RENAMED`; to remove one whose
values all led to the same numbers, add it to `REMOVED`; one whose null alone can be left out is in `REFUSED`. An
optimizer that is given by its name becomes one that is given by its class (`convert_optimizer`).
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

REFUSED: Final = {
    "trainer.strategy.optimizer_offload_directory": "optimizer states are offloaded to the host's memory alone: leave "
    "it out and lower optimizer_offload, or shard over more ranks"
}
"""Dotted name, without the `init_args` of classes, to what to do instead."""

_CLASS_KEY: Final = "init_args"
_NO_VALUE: Final = {"null", "~", "None", ""}

_OPTIMIZER: Final = "model.optimizer"
_NAME: Final = f"{_OPTIMIZER}.name"
_OF_MUON: Final = {"muon_lr": "lr", "muon_momentum": "momentum", "muon_weight_decay": "weight_decay"} | {
    "muon_lr_scaling": "lr_scaling",
    "adapter_weight_decay": "adapter_weight_decay",
}
"""Old option to the field of `genesis.optim.Muon`; other options are those of the AdamW beside it."""
_ADAMW, _MUON = "genesis.optim.AdamW", "genesis.optim.Muon"


def is_removed(name: str) -> bool:
    """Returns whether an option no longer exists and is ignored."""
    return _without_classes(name) in (REMOVED | REFUSED)


def _check_removed(name: str, value: str) -> None:
    """Refuses a value of a removed option that must not be ignored."""
    remedy = REFUSED.get(_without_classes(name))
    if remedy is not None and value not in _NO_VALUE:
        raise UserError(f"{name} is {value}: {remedy}")


def is_named_optimizer(options: Mapping[str, Any]) -> bool:
    """Returns whether the options of an optimizer give it by its name, `adamw` or `muon`, and not by its class."""
    return "class_path" not in options and "name" in options


def convert_optimizer(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of an optimizer that is given by its name as those of its class.

    Example:
        >>> convert_optimizer({"name": "adamw", "lr": 0.1, "muon_lr": 0.02})
        {'class_path': 'genesis.optim.AdamW', 'init_args': {'lr': 0.1}}
    """
    given = {key: value for key, value in options.items() if key != "name"}
    if options["name"] == "adamw":
        own = {key: value for key, value in given.items() if not key.startswith("muon_")}
        return {"class_path": _ADAMW, "init_args": own}
    if options["name"] != "muon":
        raise UserError(f"{_NAME} is {options['name']!r}: give {_OPTIMIZER}.class_path, such as {_ADAMW} or {_MUON}")
    others = {key: value for key, value in given.items() if key not in _OF_MUON}
    own = {_OF_MUON[key]: value for key, value in given.items() if key in _OF_MUON}
    return {"class_path": _MUON, "init_args": {**own, "others": {"class_path": _ADAMW, "init_args": others}}}


def check_optimizer_option(name: str) -> None:
    """Refuses an option of an optimizer that was given by its name, where nothing says by which.

    Raises:
        UserError: The option is gone; the message has the new spelling.
    """
    option = name.removeprefix(f"{_OPTIMIZER}.")
    if name == _NAME:
        raise UserError(f"{name} is gone: give the class, as --{_OPTIMIZER} {_MUON}")
    if name.startswith(f"{_OPTIMIZER}.") and option in _OF_MUON and option.startswith("muon_"):
        new = f"{_OPTIMIZER}.{_OF_MUON[option]}"
        raise UserError(f"{name} is gone: with {_OPTIMIZER}.class_path {_MUON} it is {new}")


def check_beside_muon(files: Sequence[tuple[str, Mapping[str, Any]]], given: Sequence[tuple[str, str]] = ()) -> None:
    """Refuses options of an optimizer that are given without its class beside a file that names `muon`.

    Args:
        files: Each file, and its options of the optimizer as they are written.
        given: The options of the command line, and their values.

    Raises:
        UserError: An option meant AdamW's by the old spelling, and would mean Muon's, or nothing, by today's.
    """
    muon = next((where for where, options in files if options.get("name") == "muon"), None)
    if muon is None:
        return
    found = [f"--{name}" for name, _ in given if name.startswith(f"{_OPTIMIZER}.")]
    found += [
        f"--{name} {value}"
        for name, value in given
        if name == _OPTIMIZER and ":" in value and "class_path" not in value
    ]
    for where, options in files:
        if where != muon and "class_path" not in options:
            found += [f"{_OPTIMIZER}.{name} of {where}" for name in options if name != "name"]
    if found:
        raise UserError(
            f"{muon} has {_NAME} muon, under which {found[0]} meant AdamW's option, which it no longer does: write "
            f"{_OPTIMIZER}.class_path {_MUON} into the file, whose AdamW has its options below others"
        )


def describe_deprecated(name: str) -> str:
    """Returns what a user should know of an option that has another name, or is ignored."""
    if name.startswith(f"{_OPTIMIZER}."):
        return (
            f"{_NAME} is deprecated; write {_OPTIMIZER}.class_path, and options below init_args, as config.yaml has it"
        )
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
            _check_removed(option, word)
            continue  # its value
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            option = name.removeprefix("--").removesuffix("+")
            check_optimizer_option(option)
            if is_removed(option):
                if equals:
                    _check_removed(option, value)
                found += [option] if _without_classes(option) in REMOVED else []
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
        UserError: The text has an option under both names, or one that is refused.
    """
    text, converted = _convert_in_yaml(text, prefix)
    if not any(name.rpartition(".")[2] in text for name in (*RENAMED, *REMOVED, *REFUSED)):
        return text, converted
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return text, converted  # the parser of the options refuses it, with the position
    found = list(_old_keys(root, prefix)) if root is not None else []
    for key, value, node, name in sorted(found, key=lambda one: one.key.start_mark.index, reverse=True):
        if is_removed(name):
            _check_removed(name, value.value if isinstance(value, yaml.ScalarNode) else "a structure")
            before, after = text[: key.start_mark.index], text[value.end_mark.index :]
            if node.flow_style:
                after = re.sub(r"^\s*,", "", after)
            # A block of nothing would be null, and no mapping.
            text = before + ("{}" if len(node.value) == 1 and not node.flow_style else "") + after
        else:
            quote = key.style if key.style in ("'", '"') else ""
            new = f"{quote}{rename_option(name).rpartition('.')[2]}{quote}"
            text = f"{text[: key.start_mark.index]}{new}{text[key.end_mark.index :]}"
    return text, [*converted, *(old.name for old in found if _without_classes(old.name) not in REFUSED)]


def _convert_in_yaml(text: str, prefix: str) -> tuple[str, list[str]]:
    """Returns a YAML text whose optimizer is given by its class, and the old option by which it was given."""
    if "optimizer" not in (*prefix.split("."), *re.findall(r"\w+", text)):
        return text, []
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return text, []
    path = f"{_OPTIMIZER}.".removeprefix(f"{prefix}." if prefix else "").split(".")[:-1]
    for key in path:
        items = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for one, value in items if one.value == key), None)
    if not isinstance(node, yaml.MappingNode):
        return text, []
    options = {key.value: _in_one_line(value, text) for key, value in node.value}
    if not is_named_optimizer(options):
        if "class_path" not in options:
            for name in options:
                check_optimizer_option(f"{_OPTIMIZER}.{name}")
        return text, []
    options["name"] = next(value.value for key, value in node.value if key.value == "name")
    old = f"{_OPTIMIZER}.muon_lr" if options["name"] == "muon" else _NAME
    new = _write_in_one_line(convert_optimizer(options))
    return f"{text[: node.start_mark.index]}{new}{text[_find_end(node) :]}", [old]


def _in_one_line(node: yaml.Node, text: str) -> str:
    """Returns a node of a YAML text in the form that needs no lines of its own."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(_in_one_line(one, text) for one in node.value)}]"
    if isinstance(node, yaml.MappingNode):
        return _write_in_one_line({key.value: _in_one_line(value, text) for key, value in node.value})
    return text[node.start_mark.index : node.end_mark.index] or "null"


def _write_in_one_line(options: Mapping[str, Any]) -> str:
    items = (
        f"{key}: {_write_in_one_line(value) if isinstance(value, dict) else value}" for key, value in options.items()
    )
    return f"{{{', '.join(items)}}}"


def _find_end(node: yaml.Node) -> int:
    """Returns where a node's text ends: the mark of a block is at the beginning of what follows."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _find_end(last[1] if isinstance(node, yaml.MappingNode) else last)


def rename_in_recipe(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a resolved recipe with current options. A current name that is already there keeps its value."""
    renamed: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{prefix}.{key}" if prefix else key
        if is_removed(name):
            continue
        if name == _OPTIMIZER and isinstance(value, Mapping) and is_named_optimizer(value):
            value = convert_optimizer(value)
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
