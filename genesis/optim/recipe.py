"""Reads the optimizer's algorithm from a recipe, without Lightning, and writes it in the form that runs compare."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, Literal, get_args, get_origin

from genesis.base.errors import UserError, numbered
from genesis.model.recipe import build_dataclass
from genesis.optim.adamw import AdamW
from genesis.optim.algorithm import Algorithm
from genesis.recipe.deprecated import convert_optimizer, is_named_optimizer
from genesis.recipe.imports import check_imports, find_class

DEFAULT: Final = "genesis.optim.AdamW"
"""The class of a recipe that names none."""


def read_algorithm(content: Any, where: str) -> Algorithm:
    """Returns the algorithm of a recipe; AdamW if it has none.

    Args:
        content: The recipe's `model.optimizer`.
        where: The recipe's files and this option, for messages.

    Raises:
        UserError: The class may not be imported, or is no algorithm, or an option is invalid.
    """
    if content is None:
        return AdamW()
    if isinstance(content, str):
        content = {"class_path": content}
    if not isinstance(content, Mapping) or not isinstance(content.get("init_args") or {}, Mapping):
        raise UserError(f"{where} is {content!r}: it must be a mapping of class_path, init_args")
    options = _flatten(content)
    algorithm = _find_class(options.pop("class_path"), where)
    types = {field.name: field.type for field in fields(algorithm)}
    for name, value in options.items():
        if types.get(name) is Algorithm:
            options[name] = read_algorithm(value, f"{where}.{name}")
        elif name in types:
            options[name] = _check(value, types[name], f"{where}.{name}")
    built: Algorithm = build_dataclass(algorithm, options, where)
    return built


def unify_optimizer(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a recipe whose optimizer has its options beside its class, so that names are short: `model.optimizer.lr`.

    Args:
        recipe: Plain JSON, as a manifest has it.
    """
    model = recipe.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("optimizer"), Mapping):
        return recipe
    return {**recipe, "model": {**model, "optimizer": _flatten(model["optimizer"])}}


def read_adapter_decay(recipe: Mapping[str, Any]) -> float:
    """Returns the weight decay of adapters in the recipe of a checkpoint; if it has none, that of matrices."""
    options = _flatten((recipe.get("model") or {}).get("optimizer") or {})
    given = options.get("adapter_weight_decay")
    return float(options.get("weight_decay", Algorithm.weight_decay) if given is None else given)


def _flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    if is_named_optimizer(content):
        content = convert_optimizer(content)
    own = content.get("init_args") or {}
    options = {key: value for key, value in {**content, **own}.items() if key != "init_args"}
    return {
        "class_path": DEFAULT,
        **{key: _flatten(value) if _is_class(value) else value for key, value in options.items()},
    }


def _is_class(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _find_class(path: Any, where: str) -> type[Algorithm]:
    text = path if isinstance(path, str) else ""
    check_imports([text], where)
    found = find_class(text)
    if not (isinstance(found, type) and issubclass(found, Algorithm) and is_dataclass(found)) or found is Algorithm:
        raise UserError(
            f"{where}: class_path is {path!r}: it must be an algorithm, such as {DEFAULT}, genesis.optim.Muon or one "
            "of your own"
        )
    return found


def _check(value: Any, wanted: Any, where: str) -> Any:
    """Returns the value of a field that is a choice or has several numbers; others are checked where it is built."""
    if get_origin(wanted) is Literal and value not in get_args(wanted):
        raise UserError(f"{where} is {value!r}: it must be {' or '.join(get_args(wanted))}")
    if get_origin(wanted) is not tuple:
        return value
    count = len(get_args(wanted))
    try:
        numbers = tuple(map(float, value))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != count:
        raise UserError(f"{where} is {value!r}: it must be {numbered(count, 'numbers')}, such as [0.9, 0.95]")
    return numbers
