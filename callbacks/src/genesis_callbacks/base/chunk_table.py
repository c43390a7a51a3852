"""The chunks of a tensor as rows of numbers: at a thousand ranks, objects for them take seconds and a gigabyte."""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Self, overload

import numpy as np
from numpy.typing import NDArray

from .checkpoint_errors import CorruptCheckpointError
from .manifest import ChunkRecord

_NUM_PLACES: Final = 4
"""The file's number, byte offset, number of bytes and data offset; a chunk's offsets and sizes follow."""


class ChunkTable(Sequence[ChunkRecord]):
    """The chunks of one tensor, each of which becomes a record when it is asked for.

    Args:
        files: The names of files.
        rows: `[chunk, 4 + 2 * dims]`: the number of the file in `files`, byte offset, number of bytes, data offset, and
            the offsets and sizes of the chunk.
    """

    def __init__(self, files: Sequence[str], rows: NDArray[np.int64]) -> None:
        self.files, self.rows = files, rows

    @classmethod
    def of(cls, chunks: Sequence[ChunkRecord]) -> Self:
        """Returns a table of these chunks, which may be one already."""
        if isinstance(chunks, cls):
            return chunks
        files = tuple(dict.fromkeys(chunk.file for chunk in chunks))
        numbers = {file: number for number, file in enumerate(files)}
        rows = [
            (numbers[it.file], it.byte_offset, it.num_bytes, it.data_offset, *it.offsets, *it.sizes) for it in chunks
        ]
        return cls(files, np.array(rows, dtype=np.int64).reshape(len(rows), -1 if rows else _NUM_PLACES))

    @property
    def offsets(self) -> NDArray[np.int64]:
        """`[chunk, dim]`."""
        return self.rows[:, _NUM_PLACES : (_NUM_PLACES + self.rows.shape[1]) // 2]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """`[chunk, dim]`."""
        return self.rows[:, (_NUM_PLACES + self.rows.shape[1]) // 2 :]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ChunkRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> ChunkRecord | Self:
        if isinstance(index, slice):
            return type(self)(self.files, self.rows[index])
        return next(iter(type(self)(self.files, self.rows[index][None])))

    def __iter__(self) -> Iterator[ChunkRecord]:
        middle = (_NUM_PLACES + self.rows.shape[1]) // 2
        for row in self.rows.tolist():
            file, byte_offset, num_bytes, data_offset = row[:_NUM_PLACES]
            offsets, sizes = tuple(row[_NUM_PLACES:middle]), tuple(row[middle:])
            yield ChunkRecord(offsets, sizes, self.files[file], byte_offset, num_bytes, data_offset)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def bytes_by_file(self) -> Iterator[tuple[str, int]]:
        """Yields the file and the number of bytes of each chunk."""
        return zip(map(self.files.__getitem__, self.rows[:, 0].tolist()), self.rows[:, 2].tolist(), strict=True)

    def encode(self, numbers: Mapping[str, int]) -> str:
        """Returns the rows as text, with each file's number in `numbers`."""
        rows = self.rows.astype("<i8")
        used, place = np.unique(rows[:, 0], return_inverse=True)  # few of a thousand files have chunks of a tensor
        rows[:, 0] = np.array([numbers[self.files[file]] for file in used.tolist()], dtype=np.int64)[place]
        return base64.b64encode(rows.tobytes()).decode()

    @classmethod
    def decode(cls, text: str, name: str, shape: tuple[int, ...], item_bytes: int, files: Mapping[str, int]) -> Self:
        """Returns the table in a text, after checking the range of each number.

        Args:
            text: The result of `encode`.
            name: The tensor's name, for messages.
            shape: Its shape, whose number of elements is less than 2^59.
            item_bytes: The size of an element.
            files: The names and the sizes of files, in the order of their numbers.

        Raises:
            CorruptCheckpointError: The text is no table of chunks of such a tensor in these files.
        """
        try:
            numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i8")
            rows = numbers.reshape(-1, _NUM_PLACES + 2 * len(shape)).astype(np.int64)
        except (binascii.Error, ValueError) as error:
            raise CorruptCheckpointError(f"the chunks of {name} are not a table of numbers: {error}") from error
        table = cls(tuple(files), rows)
        if (rows < 0).any() or (rows[:, 0] >= len(files)).any():
            raise CorruptCheckpointError(f"{name}: a chunk has a number below 0, or lies in a file that is not listed")
        # Every difference is of numbers that were compared before it, so that none overflows.
        _, start, num_bytes, data_start = rows[:, :_NUM_PLACES].T
        file_bytes = np.array([*files.values()], dtype=np.int64)[rows[:, 0]]
        if (start > file_bytes).any() or (num_bytes > file_bytes - start).any():
            raise CorruptCheckpointError(f"{name}: a chunk lies beyond the end of its file")
        whole = np.array(shape, dtype=np.int64)
        if (table.offsets > whole).any() or (table.sizes > whole - table.offsets).any():
            raise CorruptCheckpointError(f"{name}: a chunk lies outside of its shape {list(shape)}")
        end = start + num_bytes
        has_room = (start <= data_start) & (data_start <= end)
        if not (has_room & (table.sizes.prod(axis=1) <= (end - data_start) // item_bytes)).all():
            raise CorruptCheckpointError(f"{name}: a chunk's elements lie outside of its bytes")
        return table
