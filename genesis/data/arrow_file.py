"""Reads an Arrow stream on disk, as Hugging Face's `datasets` saves it, through the interface of a parquet file.

Arrow's file format, which polars, pandas and others write under the same name, is read, too.

Record batches take the place of row groups, so that code that reads parquet also reads these files. Batches are memory
mapped and read when they are used: opening a file reads only the beginning of each batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa

_FILE_MAGIC: Final = b"ARROW1"
_END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class RowGroup:
    """The part of parquet's metadata of a row group that sources use."""

    num_rows: int
    total_byte_size: int


def open_stream(data: Any) -> Any:
    """Returns the reader of the Arrow stream in a buffer.

    Raises:
        ArrowException: The buffer holds no stream, or a truncated one: Arrow's own reader would take a cut between two
            batches for the end of the stream.
    """
    if data.size < len(_END_OF_STREAM) or data[-len(_END_OF_STREAM) :].to_pybytes() != _END_OF_STREAM:
        raise pa.ArrowInvalid("the end of the stream is missing")
    return pa.ipc.open_stream(data)


class ArrowFile:
    """The part of the interface of `pyarrow.parquet.ParquetFile` that sources use, for an Arrow stream or file.

    Args:
        path: The file.
        check: Called with the bytes of the batches so far, which may be compressed in the file.

    Raises:
        ArrowException: The file is neither, or is damaged.
        OSError: The file cannot be read.
    """

    def __init__(self, path: str | Path, check: Callable[[int], None] = lambda _: None) -> None:
        self._file = pa.memory_map(str(path))
        self._batches: list[Any] = []
        num_bytes = 0
        try:
            data = self._file.read_buffer()
            if data[: len(_FILE_MAGIC)].to_pybytes() == _FILE_MAGIC:
                reader = pa.ipc.open_file(data)
                batches: Iterator[Any] = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = reader = open_stream(data)
            self.schema_arrow: Any = reader.schema
            for batch in batches:
                self._batches.append(batch)
                num_bytes += batch.nbytes
                check(num_bytes)
        except (pa.ArrowException, OSError) as error:
            self._file.close()
            raise pa.ArrowInvalid(str(error)) from None  # Arrow raises OSError for a truncated stream

    @property
    def num_row_groups(self) -> int:
        """Returns the number of batches."""
        return len(self._batches)

    @property
    def metadata(self) -> Self:
        """Returns the object that has `row_group`, which is the file itself."""
        return self

    def row_group(self, number: int) -> RowGroup:
        """Returns the number of rows and bytes of a batch, over all columns."""
        return RowGroup(self._batches[number].num_rows, self._batches[number].nbytes)

    def iter_batches(self, batch_size: int, row_groups: Sequence[int], columns: Sequence[str]) -> Iterator[Any]:
        """Yields the rows of the given batches, `batch_size` at a time."""
        for number in row_groups:
            batch = self._batches[number].select(list(columns))
            for start in range(0, batch.num_rows, batch_size):
                yield batch.slice(start, batch_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Arrow keeps the memory map open as long as one of its batches is in use.
        self._batches = []
        self._file.close()
