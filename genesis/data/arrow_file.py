"""An Arrow stream on disk, as Hugging Face's `datasets` saves it, in the shape of a parquet file.

Its record batches stand for row groups, so that whoever reads parquet reads it, too. Batches are read from a memory map
where they are used: opening looks at their beginnings alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa

_END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class RowGroup:
    """What parquet's metadata says of a row group."""

    num_rows: int
    total_byte_size: int


def open_stream(data: Any) -> Any:
    """Returns the reader of the Arrow stream that a buffer holds.

    Raises:
        ArrowException: It holds none, or one that was cut short: the reader would take a cut between two batches for
            the end.
    """
    if data.size < len(_END_OF_STREAM) or data[-len(_END_OF_STREAM) :].to_pybytes() != _END_OF_STREAM:
        raise pa.ArrowInvalid("it does not end as a stream does")
    return pa.ipc.open_stream(data)


class ArrowFile:
    """The part of `pyarrow.parquet.ParquetFile` that sources use, of an Arrow stream.

    Raises:
        ArrowException: The file is no Arrow stream or is damaged.
        OSError: It can't be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = pa.memory_map(str(path))
        try:
            reader = open_stream(self._file.read_buffer())
            self.schema_arrow: Any = reader.schema
            self._batches: list[Any] = list(reader)
        except (pa.ArrowException, OSError) as error:
            self._file.close()
            raise pa.ArrowInvalid(str(error)) from None  # an OSError, where the stream breaks off

    @property
    def num_row_groups(self) -> int:
        """Returns how many batches there are."""
        return len(self._batches)

    @property
    def metadata(self) -> Self:
        """Returns what has `row_group`."""
        return self

    def row_group(self, number: int) -> RowGroup:
        """Returns rows and bytes of a batch, of all columns."""
        return RowGroup(self._batches[number].num_rows, self._batches[number].nbytes)

    def iter_batches(self, batch_size: int, row_groups: Sequence[int], columns: Sequence[str]) -> Iterator[Any]:
        """Yields the rows of some batches, `batch_size` at a time."""
        for number in row_groups:
            batch = self._batches[number].select(list(columns))
            for start in range(0, batch.num_rows, batch_size):
                yield batch.slice(start, batch_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Arrow keeps the map for as long as a batch of it is in use.
        self._batches = []
        self._file.close()
