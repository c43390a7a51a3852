"""The state other than shared tensors: one section for each rank that saved, and the parts that one rank restores.

Ranks may hold different parts of a model, as the stages of a pipeline do. Each rank then has groups over its own
parameters, and may lack a group that would be empty there. So the parameters of an optimizer's groups are compared by
name over all ranks together, and each pair of a rank that saved and a rank that restores by those that both hold.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.checkpoint_errors import CheckpointError
from ..base.manifest import Manifest
from .restore import read_recorded_tensors
from .state import RankRole, SectionMatch, match_sections, read_roles, read_state
from .tagged_json import decode_tagged, named_tensors

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


class SavedSections:
    """The sections of a checkpoint, as one rank sees them. No communication.

    Args:
        path: A checkpoint that verifies.
        manifest: Its manifest.
        live: The roles of the ranks that restore.
        rank: This rank.

    Attributes:
        match: Which sections this rank restores from.

    Raises:
        CorruptCheckpointError: The state differs from the saved one.
    """

    def __init__(self, path: Path, manifest: Manifest, live: Sequence[RankRole], rank: int) -> None:
        self._path, self._manifest = path, manifest
        self._sections = read_state(path, manifest)
        self.match: SectionMatch = match_sections(len(self._sections), read_roles(self._sections), live, rank)

    @property
    def own(self) -> dict[str, Any]:
        """The section that this rank restores from, encoded."""
        return dict(self._sections[self.match.section])

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks with different data that saved."""
        return len(self.match.by_data_rank)

    def decode(self, content: Any) -> Any:
        """Returns the decoded value of a part of a section, after comparing its tensors with their digests.

        Raises:
            CorruptCheckpointError: A tensor differs from the saved one.
        """
        names = sorted(named_tensors(content))
        return decode_tagged(content, read_recorded_tensors(self._path, self._manifest, names))

    def read_states(self, key: str) -> list[Any]:
        """Returns the entry `key` of the Trainer's state from one section for each data rank, in their order."""
        return [self.decode(self._sections[index]["trainer"][key]) for index in self.match.by_data_rank]

    def merge(self, key: str, also: Collection[str]) -> dict[str, Any]:
        """Returns the mapping `key` of this rank's section, and the entries named in `also` that other sections have.

        Ranks that hold different parts of a model save different entries.
        """
        encoded = dict(self._sections[self.match.section].get(key, {}))
        for section in self._sections:
            encoded = {name: value for name, value in section.get(key, {}).items() if name in also} | encoded
        merged: dict[str, Any] = self.decode(encoded)
        return merged

    # ---- optimizers

    @property
    def num_optimizers(self) -> int:
        """The number of optimizers of the run: the largest number on any rank."""
        return max(len(section["optimizers"]) for section in self._sections)

    def _optimizers(self, index: int) -> list[Any]:
        """Returns the encoded state of optimizer `index` from each rank that saved it; this rank's section first."""
        order = [self.match.section, *(other for other in range(len(self._sections)) if other != self.match.section)]
        optimizers = (self._sections[number]["optimizers"] for number in order)
        return [of_rank[index] for of_rank in optimizers if index < len(of_rank)]

    def name_groups(self, index: int) -> list[GroupNames]:
        """Returns the names of the parameters in the groups of optimizer `index`, of every rank that saved it.

        This rank's section comes first.
        """
        return [name_saved_groups(optimizer["groups"]) for optimizer in self._optimizers(index)]

    def read_groups(self, index: int) -> Iterator[list[dict[str, Any]]]:
        """Yields the groups of optimizer `index` of every rank that saved it, this rank's section first."""
        for optimizer in self._optimizers(index):
            yield self.decode(optimizer["groups"])

    def read_optimizer_values(self, index: int) -> dict[str, dict[str, Any]]:
        """Returns parameter name to key to value, for values that are not tensors.

        Each rank that held a part of the optimizer saved its own.
        """
        values: dict[str, dict[str, Any]] = {}
        for optimizer in self._optimizers(index):
            values.update(self.decode(optimizer["values"]))
        return values
