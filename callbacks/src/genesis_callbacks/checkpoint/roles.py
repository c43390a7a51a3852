"""Finds a rank's section of a checkpoint's other state by what the rank does, not by its number. Pure.

A rank's role is (data rank, stage): which share of the data it reads, and which stage of a pipeline it holds. A section
records the role of the rank that saved it, as `{"role": {"data_rank": 3, "stage": 1}}`. Readers from before roles
ignore the key; sections from before have none, and are found by the rank's number.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .errors import CorruptCheckpointError

_KEY = "role"
_MAX_NUMBER = 1 << 20


@dataclass(frozen=True, order=True)
class RankRole:
    """What a rank does in a run.

    Attributes:
        data_rank: Which share of the data it reads. Ranks that read the same share have the same one.
        stage: Which stage of a pipeline it holds; 0 without a pipeline.
    """

    data_rank: int
    stage: int = 0


@dataclass(frozen=True)
class SectionMatch:
    """Which sections a rank restores from.

    Attributes:
        section: The section that gives this rank's state.
        is_same_role: Whether the ranks that restore have the roles of those that saved: then each rank has the section
            of its own role, and the random number generators in it are its own.
        is_same_data: Whether `section` was saved by a rank that read this rank's share of the data.
        by_data_rank: One section for each data rank that saved, in the order of the data ranks.
    """

    section: int
    is_same_role: bool
    is_same_data: bool
    by_data_rank: tuple[int, ...]


def record_role(role: RankRole) -> dict[str, Any]:
    """Returns what a section says about the role of its rank."""
    return {_KEY: asdict(role)}


def _read_role(section: Any, index: int) -> RankRole | None:
    content = section.get(_KEY) if isinstance(section, Mapping) else None
    if content is None:
        return None
    numbers = [content.get(name) for name in ("data_rank", "stage")] if isinstance(content, Mapping) else []
    known = [number for number in numbers if type(number) is int and 0 <= number < _MAX_NUMBER]
    if len(known) != 2:
        raise CorruptCheckpointError(
            f"section {index} of the state has the role {str(content)[:80]!r}: a data_rank and a stage are due"
        )
    return RankRole(*known)


def read_roles(sections: Sequence[Any]) -> tuple[RankRole, ...] | None:
    """Returns the role of the rank that saved each section; None where not all sections name theirs.

    Raises:
        CorruptCheckpointError: A section names something else than a role.
    """
    roles = [_read_role(section, index) for index, section in enumerate(sections)]
    known = tuple(role for role in roles if role is not None)
    return known if len(known) == len(roles) else None


def _find_first(saved: Sequence[RankRole]) -> dict[int, int]:
    """Returns each data rank, in order, with the section of its first stage."""
    first: dict[int, int] = {}
    for index in sorted(range(len(saved)), key=lambda index: (saved[index], index)):
        first.setdefault(saved[index].data_rank, index)
    return first


def pick_data_sections(sections: Sequence[Any]) -> list[Any]:
    """Returns one section for each data rank that saved: what all of them hold of the data, and nothing twice.

    Raises:
        CorruptCheckpointError: A section names something else than a role.
    """
    saved = read_roles(sections)
    return list(sections) if saved is None else [sections[index] for index in _find_first(saved).values()]


def match_sections(
    num_sections: int, saved: Sequence[RankRole] | None, live: Sequence[RankRole], rank: int
) -> SectionMatch:
    """Returns which sections the rank number `rank` restores from.

    Several ranks may have one role, as those of a tensor-parallel group do: the first of them takes the first section
    of that role, the second the second. Where the roles are others than those that were saved, a rank takes a section
    of its data rank, if the same data ranks saved, and otherwise the first section.

    Args:
        num_sections: As many ranks saved.
        saved: Their roles; None for a checkpoint that does not name them.
        live: The roles of the ranks that restore.
        rank: The rank that asks.
    """
    if saved is None:
        is_same = num_sections == len(live)
        return SectionMatch(rank if is_same else 0, is_same, is_same, tuple(range(num_sections)))
    first_by_data_rank = _find_first(saved)
    by_data_rank = tuple(first_by_data_rank.values())
    role = live[rank]
    of_role = [index for index, one in enumerate(saved) if one == role]
    if Counter(saved) == Counter(live):
        return SectionMatch(of_role[list(live[:rank]).count(role)], True, True, by_data_rank)
    if first_by_data_rank.keys() == {one.data_rank for one in live}:
        section = of_role[0] if of_role else first_by_data_rank[role.data_rank]
        return SectionMatch(section, False, True, by_data_rank)
    return SectionMatch(0, False, False, by_data_rank)
