"""Lets jsonargparse import and open only what a recipe may name, in every parser of this process.

jsonargparse imports the path of a class, or of a function, before it compares it with the option's type, and it builds
any class for an option whose type is `Any`. Its modules do both by two functions, which this module replaces;
`genesis.recipe.imports` has the rules. A value that names a file is read by a third, for regular files alone: a pipe
would be waited for, and an address asked for.
"""

import inspect
import os
from pathlib import Path
from typing import Any, Final

from jsonargparse import _actions, _completions, _from_config, _paths, _typehints, _util

from genesis.recipe.imports import PACKAGES, check_imports, find_remedy, is_allowed, refuse
from genesis_callbacks.base.untrusted import MAX_TEXT_BYTES

_BY_JSONARGPARSE: Final = "jsonargparse.ArgumentParser"
_IMPORTERS: Final[tuple[Any, ...]] = (_actions, _completions, _from_config, _typehints)
_HINTS: Final[Any] = _typehints
_VALUES: Final[Any] = _util
_find_object: Final = _util.import_object
_build_any: Final = _HINTS.adapt_classes_any


def guard_imports() -> None:
    """Puts the functions of this module in the place of those of jsonargparse."""
    for module in _IMPORTERS:
        module.import_object = _import_object
    _HINTS.adapt_classes_any = _adapt_classes_any
    _HINTS.Path = _VALUES.Path = _NamedFile


def _import_object(name: Any) -> Any:
    """Returns the object of an import path.

    Raises:
        UserError: The path leads into another package, or to something else than a class, and is not allowed.
        ModuleNotFoundError: A module is not there; as jsonargparse would raise it, with the remedy.
    """
    if name == _BY_JSONARGPARSE or not isinstance(name, str):
        return _find_object(name)
    check_imports([name])
    try:
        found = _find_object(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}{find_remedy(error)}", name=error.name) from error
    package = name.partition(".")[0]
    # A module of a package has other modules, and their functions, among its names: torch.os.system.
    is_its_class = inspect.isclass(found) and found.__module__.partition(".")[0] in PACKAGES
    if callable(found) and not is_its_class and not is_allowed(name):
        raise refuse(f"code that is no class of {package}", name)
    return found


def _adapt_classes_any(value: Any, *args: Any) -> Any:
    """Returns a value for an option that takes any; a class in it has to be allowed by name.

    Raises:
        UserError: It is not.
    """
    path = value["class_path"] if _HINTS.is_subclass_spec(value) else None
    if isinstance(path, str) and not is_allowed(path):
        raise refuse("code for an option that takes no class", path)
    return _build_any(value, *args)


class _IsPath(type):
    """Lets `issubclass` and `isinstance`, where jsonargparse asks for its own class of paths, see that class."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _paths.Path)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _paths.Path)


class _NamedFile(_paths.Path, metaclass=_IsPath):
    """The file that an option's value names.

    Raises:
        TypeError: It is no regular file, or too large for options; the parser takes the value for a text.
    """

    def __init__(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        file = Path(self.absolute)
        if not file.is_file() or file.stat().st_size > MAX_TEXT_BYTES:
            raise _paths.PathError(f"{path} is no file of options")
