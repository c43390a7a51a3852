"""The state of a checkpoint beside its tensors: one section for each rank that saved. Imports no torch.

A rank restores the section of its role, (data rank, stage): its share of the data, and its stage of a pipeline. A
section records the role of the rank that saved it, as `{"role": {"data_rank": 3, "stage": 1}}`. Earlier versions ignore
the key. Sections that earlier versions wrote have no role and are matched by the rank's number.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.checkpoint_errors import CorruptCheckpointError
from ..base.hashing import hash_bytes
from ..base.manifest import STATE_NAME, Manifest
from ..base.safe_read import MAX_DOCUMENT_BYTES, parse_json, read_file

_KEY = "role"
_MAX_NUMBER = 1 << 20


@dataclass(frozen=True, order=True)
class RankRole:
    """The role of a rank in a run.

    Attributes:
        data_rank: Number of the rank's share of the data; ranks that read the same share have the same number.
        stage: Number of the rank's pipeline stage; 0 without a pipeline.
    """

    data_rank: int
    stage: int = 0


@dataclass(frozen=True)
class SectionMatch:
    """The sections from which a rank restores.

    Attributes:
        section: The section with this rank's state.
        is_same_role: Whether the restoring ranks have the roles of the ranks that saved. If so, each rank restores the
            section of its own role, including the random number generators.
        is_same_data: Whether `section` was saved by a rank that read this rank's share of the data.
        by_data_rank: One section for each data rank that saved, in the order of the data ranks.
    """

    section: int
    is_same_role: bool
    is_same_data: bool
    by_data_rank: tuple[int, ...]


def record_role(role: RankRole) -> dict[str, Any]:
    """Returns the entry of a section that records the role of its rank."""
    return {_KEY: asdict(role)}


def _read_role(section: Any, index: int) -> RankRole | None:
    content = section.get(_KEY) if isinstance(section, Mapping) else None
    if content is None:
        return None
    numbers = [content.get(name) for name in ("data_rank", "stage")] if isinstance(content, Mapping) else []
    known = [number for number in numbers if type(number) is int and 0 <= number < _MAX_NUMBER]
    if len(known) != 2:
        raise CorruptCheckpointError(
            f"section {index} of the state has the role {str(content)[:80]!r}, but must have a data_rank and a stage"
        )
    return RankRole(*known)


def read_roles(sections: Sequence[Any]) -> tuple[RankRole, ...] | None:
    """Returns the role of the rank that saved each section; None if a section has no role.

    Raises:
        CorruptCheckpointError: The role in a section is invalid.
    """
    roles = [_read_role(section, index) for index, section in enumerate(sections)]
    known = tuple(role for role in roles if role is not None)
    return known if len(known) == len(roles) else None


def _find_first(saved: Sequence[RankRole]) -> dict[int, int]:
    """Returns each data rank, in order, with the section of its first pipeline stage."""
    first: dict[int, int] = {}
    for index in sorted(range(len(saved)), key=lambda index: (saved[index], index)):
        first.setdefault(saved[index].data_rank, index)
    return first


def pick_data_sections(sections: Sequence[Any]) -> list[Any]:
    """Returns one section for each data rank that saved: together the whole state of the data, without duplicates.

    Raises:
        CorruptCheckpointError: The role in a section is invalid.
    """
    saved = read_roles(sections)
    return list(sections) if saved is None else [sections[index] for index in _find_first(saved).values()]


def match_sections(
    num_sections: int, saved: Sequence[RankRole] | None, live: Sequence[RankRole], rank: int
) -> SectionMatch:
    """Returns the sections from which the rank number `rank` restores.

    Several ranks may have one role, such as the ranks of a tensor-parallel group: the first of them restores the first
    section of that role, the second the second. If the roles differ from the saved ones, a rank restores a section of
    its data rank, provided that the same data ranks saved, and otherwise the first section.

    Args:
        num_sections: Number of ranks that saved.
        saved: Roles of the ranks that saved; None for a checkpoint without roles.
        live: Roles of the ranks that restore.
        rank: The restoring rank.
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


def read_state(path: Path, manifest: Manifest) -> list[Any]:
    """Returns the encoded state sections, one per saving rank, after comparing the file's hash. No communication.

    Raises:
        CorruptCheckpointError: The file differs from the saved one, or an optimizer's state is missing.
        UnreadableCheckpointError: The file cannot be read.
    """
    record = next((file for file in manifest.files if file.name == STATE_NAME), None)
    if record is None:
        raise CorruptCheckpointError(f"{path}: the manifest lists no {STATE_NAME}")
    # Read once, hashed, then parsed from the same bytes: a second read could return others.
    data = read_file(path / STATE_NAME, MAX_DOCUMENT_BYTES)
    if hash_bytes(data, manifest.hash_algorithm) != record.hash:
        raise CorruptCheckpointError(
            f"{path / STATE_NAME} does not have the hash that was saved: its bytes have changed"
        )
    content = parse_json(data, f"{path / STATE_NAME}")
    sections = content.get("sections") if isinstance(content, dict) else None
    if not isinstance(sections, list) or not sections:
        raise CorruptCheckpointError(f"{path / STATE_NAME} has no list of sections")
    _check_optimizers(path, manifest, sections)
    return sections


def _check_optimizers(path: Path, manifest: Manifest, sections: Sequence[Any]) -> None:
    """Refuses an emptied optimizer: its record has state, but the checkpoint has neither tensors nor values of it."""
    filled = {name.split(".", 2)[1] for name in manifest.tensors if name.startswith("optimizer.")}
    for section in sections:
        optimizers = section.get("optimizers", []) if isinstance(section, dict) else []
        if not isinstance(optimizers, list) or not all(isinstance(each, dict) for each in optimizers):
            raise CorruptCheckpointError(f"{path / STATE_NAME} has no list of optimizers")
        for index, optimizer in enumerate(optimizers):
            if optimizer.get("has_state") and not optimizer.get("values") and str(index) not in filled:
                raise CorruptCheckpointError(f"{path}: optimizer {index} had state, but the checkpoint has none of it")
