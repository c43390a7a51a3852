"""Merges the files of a recipe of `genesis fit` and options of the command line into one mapping, without Lightning."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from genesis.base.errors import UserError
from genesis.recipe.deprecated import (
    check_beside_muon,
    check_optimizer_option,
    describe_deprecated,
    is_removed,
    rename_in_yaml,
    rename_option,
)
from genesis.recipe.yaml import load_yaml
from genesis_callbacks.base.untrusted import read_text

_CLASS_KEYS: Final = ("class_path", "init_args", "dict_kwargs")


def read_content(
    paths: Sequence[Path], overrides: Sequence[tuple[str, str]] = (), *, later: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """Returns the merged content of recipes and of options such as `("data.seq_len", "512")`.

    A decoder that is a path is read relative to the file that names it. Each file is read once: it may be a pipe.
    Options that the caller applies `later` are only checked beside the files.

    Raises:
        UserError: A file cannot be read, or is no mapping.
    """
    merged: dict[str, Any] = {}
    optimizers: list[tuple[str, Mapping[str, Any]]] = []
    for path in paths:
        content, optimizer = _read_mapping(path)
        optimizers.append((str(path), optimizer))
        decoder = content["model"].get("decoder") if isinstance(content.get("model"), dict) else None
        if isinstance(decoder, str):
            content["model"]["decoder"], _ = _read_mapping(_find_beside(decoder, path))
        _merge(merged, content)
    check_beside_muon(optimizers, [*overrides, *later])
    return apply_overrides(merged, overrides)


def apply_overrides(content: Mapping[str, Any], overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns a recipe's content with other values of some options; the given content stays as it is.

    As in `genesis fit`, an option of a class may leave out `init_args`: `trainer.strategy.shard`.

    Raises:
        UserError: A value is not YAML, or names a file that cannot be read.
    """
    merged = copy.deepcopy(dict(content))
    for name, text in overrides:
        check_optimizer_option(name)
        if rename_option(name) != name or is_removed(name):
            warnings.warn(describe_deprecated(name), FutureWarning, stacklevel=2)
        if is_removed(name):
            continue
        value = _parse_value(name, text)
        path = rename_option(name).split(".")
        last, target = path[-1], merged
        for depth, group in enumerate(path[:-1]):
            below = target.get(group)
            if not isinstance(below, dict):
                below = {} if below is None or not isinstance(below, str) else {"class_path": below}
                target[group] = below
            target = below
            following = path[depth + 1]
            if "class_path" in target and following not in _CLASS_KEYS:
                target = target.setdefault("init_args", {})
        if name == "model.decoder" and isinstance(value, str):
            value, _ = _read_mapping(Path(value))
        if isinstance(value, dict) and isinstance(target.get(last), dict):
            _merge(target[last], value)
        else:
            target[last] = value
    return merged


def _find_beside(name: str, recipe: Path) -> Path:
    beside = recipe.parent / name
    return beside if beside.exists() else Path(name)


def _read_mapping(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Returns the options in a file, and those of its optimizer as they are written, perhaps by an old spelling."""
    try:
        written = read_text(path)
        text, old = rename_in_yaml(written)
        content = load_yaml(text, path)
        before = load_yaml(written, path) if old else content
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read {path}: {reason}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} has no options: give a recipe of `genesis fit`, or a decoder's fields")
    for name in old:
        warnings.warn(describe_deprecated(name), FutureWarning, stacklevel=2)
    model = before.get("model")
    optimizer = model.get("optimizer") if isinstance(model, dict) else None
    return content, optimizer if isinstance(optimizer, dict) else {}


def _parse_value(name: str, text: str) -> Any:
    try:
        return load_yaml(text, f"--{name}")
    except (yaml.YAMLError, RecursionError):
        raise UserError(f"--{name} is {text!r}: it must be a value as YAML writes it") from None


def _merge(target: dict[str, Any], content: Mapping[str, Any]) -> None:
    for name, value in content.items():
        held = target.get(name)
        if isinstance(held, dict) and isinstance(value, Mapping):
            if "class_path" in value and value["class_path"] != held.get("class_path"):
                held.pop("init_args", None)  # they were the other class's
            _merge(held, value)
        else:
            target[name] = value
