"""Reads YAML whose aliases stay few: ten lines of them can stand for billions of values ("billion laughs").

YAML's own reader shares what an alias repeats, but whoever walks or copies the content meets each repetition.
"""

import os
from typing import Any, Final

import yaml

from genesis.errors import UserError

_MOST_REPEATED: Final = 100_000


def load_yaml(content: str | bytes, where: str | os.PathLike[str]) -> Any:
    """Returns the content of a YAML text, as `yaml.safe_load` does.

    Args:
        content: The text.
        where: Its file, for messages.

    Raises:
        UserError: Its aliases repeat too many values.
        yaml.YAMLError: It is not YAML.
        RecursionError: It is nested too deeply.
    """
    loader = yaml.SafeLoader(content)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        check_aliases(root, where)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def check_aliases(root: yaml.Node, where: str | os.PathLike[str]) -> None:
    """Refuses a document whose aliases repeat very many values.

    Raises:
        UserError: They do.
    """
    num_values: dict[int, int] = {}
    if _count_values(root, num_values) - len(num_values) > _MOST_REPEATED:
        raise UserError(
            f"{where} has aliases (*name) that repeat more than {_MOST_REPEATED:,} values: write what the recipe needs "
            "without them"
        )


def _count_values(node: yaml.Node, num_values: dict[int, int]) -> int:
    """Returns the number of nodes from `node` on, repetitions included, and notes it of each node."""
    found = num_values.get(id(node))
    if found is not None:
        return found
    num_values[id(node)] = 0  # an anchor may contain itself
    total = 1
    if isinstance(node, yaml.MappingNode):
        total += sum(_count_values(each, num_values) for pair in node.value for each in pair)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_count_values(each, num_values) for each in node.value)
    num_values[id(node)] = total
    return total
