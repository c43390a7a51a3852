"""Finds the class of a recipe's objective, of which nothing is built."""

from collections.abc import Mapping
from typing import Any

from genesis.base.errors import UserError
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.objective import Objective
from genesis.recipe.imports import check_imports, find_class


def find_objective(given: Any) -> type[Objective]:
    """Returns the class that `model.objective` of a recipe names; that of the default for None.

    Args:
        given: The value: a mapping with `class_path`, or the path alone, which may be the name of one of Genesis.

    Raises:
        UserError: The value names no objective, or one whose package is not allowed.
    """
    if given is None:
        return CrossEntropy
    path = str(given.get("class_path") if isinstance(given, Mapping) else given)
    found = find_class(path if "." in path else f"{__package__}.{path}")
    if not (isinstance(found, type) and issubclass(found, Objective)):
        check_imports([path])
        raise UserError(f"model.objective is {path!r}, which is no objective: give the import path of its class")
    return found
