"""Lets jsonargparse import only what `genesis.recipe_imports` allows, in every parser of this process.

jsonargparse imports the path of a class, or of a function, before it compares it with the option's type, and it builds
any class for an option whose type is `Any`. Its modules do both by two functions, which this module replaces.
"""

import inspect
from typing import Any, Final

from jsonargparse import _actions, _completions, _from_config, _typehints
from jsonargparse._util import import_object

from genesis.recipe_imports import PACKAGES, check_imports, is_allowed, refuse

_BY_JSONARGPARSE: Final = "jsonargparse.ArgumentParser"
_IMPORTERS: Final[tuple[Any, ...]] = (_actions, _completions, _from_config, _typehints)
_HINTS: Final[Any] = _typehints
_build_any: Final = _HINTS.adapt_classes_any


def guard_imports() -> None:
    """Puts the functions of this module in the place of those of jsonargparse."""
    for module in _IMPORTERS:
        module.import_object = _import_object
    _HINTS.adapt_classes_any = _adapt_classes_any


def _import_object(name: Any) -> Any:
    """Returns the object of an import path.

    Raises:
        UserError: The path leads into another package, or to something else than a class, and is not allowed.
    """
    if name == _BY_JSONARGPARSE or not isinstance(name, str):
        return import_object(name)
    check_imports([name])
    found = import_object(name)
    package = name.partition(".")[0]
    # A module of a package has other modules, and their functions, among its names: torch.os.system.
    is_its_class = inspect.isclass(found) and found.__module__.partition(".")[0] in PACKAGES
    if callable(found) and not is_its_class and not is_allowed(name):
        raise refuse(f"code that is no class of {package}", [name], [name])
    return found


def _adapt_classes_any(value: Any, *args: Any) -> Any:
    """Returns a value for an option that takes any; a class in it has to be allowed by name.

    Raises:
        UserError: It is not.
    """
    path = value["class_path"] if _HINTS.is_subclass_spec(value) else None
    if isinstance(path, str) and not is_allowed(path):
        raise refuse("code for an option that takes no class", [path], [path])
    return _build_any(value, *args)
