"""Finds the class of a recipe's objective, of which nothing is built."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from genesis.errors import UserError
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.objective import Objective
from genesis.recipe_imports import check_imports, import_allowed


def find_objective(given: Any) -> type[Objective]:
    """Returns the class that `model.objective` of a recipe names; that of the default for None.

    Args:
        given: The value: a mapping with `class_path`, or the path alone. A class of Genesis may be named without its
            module, as LightningCLI allows.

    Raises:
        UserError: The value names no objective, or one whose package is not allowed.
    """
    if given is None:
        return CrossEntropy
    path = str(given.get("class_path") if isinstance(given, Mapping) else given)
    import_allowed(path)
    known = next((one for one in _subclasses(Objective) if path in _names(one)), None)
    if known is not None:
        return known
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)  # a package may have the class of one of its modules
    if not (isinstance(found, type) and issubclass(found, Objective)):
        check_imports([path])
        raise UserError(f"model.objective is {path!r}, which is no objective: give the import path of its class")
    return found


def _names(objective: type[Objective]) -> tuple[str, ...]:
    """Returns the names under which a recipe may have a class."""
    name = objective.__qualname__
    own = (f"{__package__}.{name}", name) if objective.__module__.startswith(f"{__package__}.") else ()
    return (f"{objective.__module__}.{name}", *own)


def _subclasses(owner: type[Any]) -> Iterator[type[Objective]]:
    for subclass in owner.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
