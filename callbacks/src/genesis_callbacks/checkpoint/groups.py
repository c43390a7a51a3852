"""Matches the parameter groups of a live optimizer with those that were saved, by the names of the parameters. Pure.

Ranks may hold different parts of a model, as the stages of a pipeline do. Each rank then has groups over its own
parameters, and may lack a group that would be empty there. So the parameters are compared over all ranks together, and
each pair of a rank that saved and a rank that restores is compared by the parameters that both hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.checkpoint_errors import CheckpointError

GroupNames = tuple[tuple[str, ...], ...]
"""The names of the parameters of each group, in the order of the groups."""


def name_saved_groups(groups: Sequence[Mapping[str, Any]]) -> GroupNames:
    """Returns the parameter names of the groups in one section, which may be encoded or decoded."""
    return tuple(tuple(group["params"]) for group in groups)


def _flatten(groups_by_rank: Sequence[GroupNames]) -> set[str]:
    return {name for groups in groups_by_rank for names in groups for name in names}


def _restrict(groups: GroupNames, known: set[str]) -> list[list[str]]:
    """Returns the groups with only the parameters in `known`, without groups that become empty."""
    restricted = ([name for name in names if name in known] for names in groups)
    return [names for names in restricted if names]


def check_groups(index: int, live_by_rank: Sequence[GroupNames], saved_by_rank: Sequence[GroupNames]) -> None:
    """Compares the parameters of each group with those that were saved.

    Args:
        index: Number of the optimizer in the run.
        live_by_rank: The groups of each rank that restores.
        saved_by_rank: The groups of each rank that saved.

    Raises:
        CheckpointError: The parameters of all ranks together differ from the saved ones, or their grouping or order
            does.
    """
    difference = sorted(_flatten(live_by_rank) ^ _flatten(saved_by_rank))
    detail = f"such as {difference[0]}" if difference else None
    for live in () if difference else dict.fromkeys(live_by_rank):
        for saved in dict.fromkeys(saved_by_rank):
            common = _flatten([live]) & _flatten([saved])
            if _restrict(live, common) != _restrict(saved, common):
                detail = "in their order or grouping"
    if detail is not None:
        raise CheckpointError(
            f"optimizer {index} updates other parameters than the saved one ({detail}): use the same "
            "configure_optimizers"
        )


def find_options(
    index: int, live: GroupNames, own: Sequence[Mapping[str, Any]], others: Iterator[Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Returns the saved options of each live group, without its parameters.

    This rank's own section comes first; the other sections are used only for parameters that the own section lacks. A
    group without parameters gets the options of the empty group at the same index in the own section, or no options.

    Args:
        index: Number of the optimizer in the run.
        live: The groups of this rank, which `check_groups` has compared.
        own: The saved groups in this rank's section.
        others: The saved groups in all other sections.

    Raises:
        CheckpointError: Parameters of one live group were saved with different options.
    """
    sections = [own]
    lacking = _flatten([live]) - _flatten([name_saved_groups(own)])
    while lacking and (other := next(others, None)) is not None:
        sections.append(other)
        lacking -= _flatten([name_saved_groups(other)])
    found = [_find_empty(position, live, own) for position in range(len(live))]
    lacking = _flatten([live])
    for group in (group for section in sections for group in section):
        options = {key: value for key, value in group.items() if key != "params"}
        for position, names in enumerate(live):
            claimed = lacking.intersection(names, group["params"])
            if claimed:
                lacking -= claimed
                _check_same_options(index, min(claimed), found[position], options)
                found[position] = options
    return [options or {} for options in found]


def _find_empty(position: int, live: GroupNames, own: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    is_empty = not live[position] and len(own) == len(live) and not own[position]["params"]
    return {key: value for key, value in own[position].items() if key != "params"} if is_empty else None


def _check_same_options(index: int, name: str, before: dict[str, Any] | None, options: dict[str, Any]) -> None:
    if before is None:
        return
    for key in sorted(before.keys() | options.keys()):
        one, other = before.get(key), options.get(key)
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            is_same = torch.equal(one, other)
        else:
            is_same = type(one) is type(other) and one == other
        if not is_same:
            raise CheckpointError(
                f"optimizer {index} has {name} in a group whose other parameters have another saved {key} "
                f"({one} and {other}): use the same configure_optimizers"
            )
