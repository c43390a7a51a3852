"""The state other than shared tensors: one section for each rank that saved, and the parts that one rank restores."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..base.manifest import Manifest
from .groups import GroupNames, name_saved_groups
from .restore import read_recorded_tensors
from .roles import RankRole, SectionMatch, match_sections, read_roles
from .state import read_state
from .tagged_json import decode_tagged, named_tensors


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
