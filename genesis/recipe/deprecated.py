"""Options of earlier versions: tables, applied to command lines, YAML and recipes.

The command line renames an old option before it parses, or leaves it out, and warns once; recipes that checkpoints and
run directories hold are compared under today's names. To rename an option, add a line to `RENAMED`; to remove one whose
values all led to the same numbers, add it to `REMOVED`; one whose null alone can be left out is in `REFUSED`. An
optimizer that is given by its name becomes one that is given by its class (`convert_optimizer`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from genesis.base.errors import UserError
from genesis.recipe.yaml import dump_yaml, load_yaml

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
    """Returns a YAML text with current options, and the old names that it had. A text without any is not changed.

    Args:
        text: A mapping of options; any other text is returned unchanged.
        prefix: The option whose value the text is; empty for a file of options.

    Raises:
        UserError: The text has an option under both names, or one that is refused.
    """
    try:
        content = load_yaml(text, prefix or "the recipe")
        if not isinstance(content, Mapping):
            return text, []
        spread = spread_keys(content)
        renamed, found = rename_options(spread, prefix)
        return (text, found) if renamed == spread else (dump_yaml(renamed), found)
    except (yaml.YAMLError, RecursionError):
        return text, []  # the parser of the options refuses it, with the position


def spread_keys(content: Mapping[Any, Any], *, is_recipe: bool = True) -> dict[str, Any]:
    """Returns options of a file as a mapping of mappings: a key of the recipe or of a section may have dots.

    Args:
        content: The options.
        is_recipe: Whether the keys are those of the whole recipe, which may have sections.

    Example:
        >>> spread_keys({"data.seq_len": 8, "data": {"seed": 1}})
        {'data': {'seq_len': 8, 'seed': 1}}
    """
    spread: dict[str, Any] = {}
    for key, value in content.items():
        first, *others = str(key).split(".") if all(str(key).split(".")) else [str(key)]
        for name in reversed(others):
            value = {name: value}
        if is_recipe and isinstance(value, Mapping):
            value = spread_keys(value, is_recipe=False)  # below an option of a section, keys are names of others
        spread[first] = _join(spread.get(first), value)
    return spread


def _join(held: Any, more: Any) -> Any:
    if not isinstance(held, dict) or not isinstance(more, Mapping):
        return more
    return {**held, **{key: _join(held.get(key), value) for key, value in more.items()}}


def rename_options(
    options: Mapping[str, Any], prefix: str = "", *, is_strict: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Returns options under their current names, and the old names that were among them.

    Args:
        options: A mapping of options, of which some are mappings.
        prefix: The dotted name of the option whose value it is; empty for a recipe.
        is_strict: Whether a user may still change them: options that are gone are refused with the new spelling, and an
            option under both names, too. Otherwise a current name keeps its value.

    Raises:
        UserError: An option is refused.
    """
    renamed: dict[str, Any] = {}
    found: list[str] = []
    if prefix == _OPTIMIZER and is_named_optimizer(options):
        found.append(_NAME)
        options = convert_optimizer(options)
    for key, value in options.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if is_strict and "class_path" not in options:
            check_optimizer_option(name)
        if is_removed(name):
            if is_strict:
                _check_removed(name, "null" if value is None else value if isinstance(value, str) else repr(value))
            found += [name] if _without_classes(name) in REMOVED else []
            continue
        new = rename_option(name).rpartition(".")[2] if _without_classes(name) in RENAMED else key
        if new != key:
            found.append(name)
            if new in options and is_strict:
                raise UserError(f"both {rename_option(name)} and its old name {name} are given; remove {name}")
        if new == key or new not in options:
            renamed[new] = value
            if isinstance(value, Mapping):
                renamed[new], below = rename_options(value, name, is_strict=is_strict)
                found += below
    return renamed, found


def rename_in_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a resolved recipe with current options. A current name that is already there keeps its value."""
    return rename_options(recipe, is_strict=False)[0]


def _without_classes(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _CLASS_KEY)
