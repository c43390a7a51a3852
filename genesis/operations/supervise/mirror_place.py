"""The second place of a mirror: a directory, or a prefix in a store. A folder appears in it whole or not at all.

A folder is uncommitted until its marker is there. In a directory, an uncommitted folder has another name and is
renamed. A store cannot rename: there, the marker is the last object to be written and the first to be removed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

BLOCK_BYTES: Final = 8 << 20

Blocks = Callable[[int], Iterator[bytes]]
"""Returns the content of a file in blocks of a given size, from its beginning at each call."""


@dataclass(frozen=True)
class Folder:
    """A folder of a place: its name, whether it is committed, and the sizes of its files by name."""

    name: str
    is_committed: bool
    files: dict[str, int]


class Place(Protocol):
    """Where a mirror keeps its copies. Paths are relative, with slashes. One process writes to a place.

    Every method raises `StoreError` or `OSError` if the place does not work now, and `UserError` if it refuses.

    Attributes:
        url: The place as messages name it.
    """

    url: str

    def list_folders(self, parent: str) -> list[Folder]:
        """Returns the folders in `parent`; none if it does not exist."""

    def read(self, path: str) -> bytes | None:
        """Returns the content of a small file; None if there is no such file."""

    def replace(self, path: str, data: bytes) -> None:
        """Writes a small file that belongs to no folder, atomically."""

    def file_path(self, folder: str, name: str, *, is_committed: bool) -> str:
        """Returns the path of a file of a folder."""

    def write(self, path: str, blocks: Blocks, num_bytes: int) -> None:
        """Writes a file of an uncommitted folder; the file is stored when the call returns."""

    def read_blocks(self, path: str, num_bytes: int) -> Iterator[bytes]:
        """Yields the content of a file of known size in blocks; a file that is missing has none."""

    def commit(self, folder: str, marker: bytes) -> None:
        """Makes a folder whose files are all written visible."""

    def remove(self, folder: str, *, is_committed: bool) -> None:
        """Removes a folder; its marker goes first."""

    def clean(self) -> None:
        """Removes what interrupted writes have left and no listing shows."""
