"""Opens tables: parquet files, and Arrow, CSV and TSV files, whose rows are read in groups like those of parquet.

An Arrow file is a stream, as Hugging Face's `datasets` saves it, or has Arrow's file format, which polars, pandas and
others write under the same name. Its record batches are groups of rows. They are memory mapped and read when they are
used: opening a file reads only the beginning of each batch.
"""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

_FILE_MAGIC: Final = b"ARROW1"
_END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"
_FIRST_BLOCK_BYTES: Final = 1 << 20
_LARGEST_ROW_BYTES: Final = 64 << 20
_ROWS_PER_BATCH: Final = 64
"""Rows that are in memory at a time: a dictionary of one large text may stand for each of them."""


@dataclass(frozen=True)
class Table:
    """An open table.

    Args:
        schema: Arrow's schema of the columns.
        num_rows: Number of rows of each group; the most that there can be if it is unknown.
        num_bytes: Number of bytes of each group, over all columns.
        read: Yields the rows of a group, by its number and the names of columns, some rows at a time.
    """

    schema: Any
    num_rows: Sequence[int]
    num_bytes: Sequence[int]
    read: Callable[[int, Sequence[str]], Iterator[Any]]


@contextmanager
def open_parquet(path: Path, check: Callable[[int], None]) -> Iterator[Table]:
    """Opens a parquet file; `check` is called with the bytes of all groups, which may be compressed in the file.

    Raises:
        ArrowException: The file is damaged.
        OSError: The file cannot be read.
    """
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        num_bytes = [group.total_byte_size for group in groups]
        check(sum(num_bytes))

        def read(group: int, columns: Sequence[str]) -> Iterator[Any]:
            found: Iterator[Any] = file.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=list(columns))
            return found

        yield Table(file.schema_arrow, [group.num_rows for group in groups], num_bytes, read)


@contextmanager
def open_arrow(path: Path, check: Callable[[int], None]) -> Iterator[Table]:
    """Opens an Arrow stream or file; `check` is called with the bytes of the batches so far, as in `open_parquet`.

    Raises:
        ArrowException: The file is neither, or is damaged.
        OSError: The file cannot be read.
    """
    # Arrow keeps the memory map open as long as one of its batches is in use.
    with pa.memory_map(str(path)) as file:
        batches: list[Any] = []
        num_bytes = 0
        try:
            data = file.read_buffer()
            if data[: len(_FILE_MAGIC)].to_pybytes() == _FILE_MAGIC:
                reader = pa.ipc.open_file(data)
                found: Iterator[Any] = map(reader.get_batch, range(reader.num_record_batches))
            else:
                found = reader = open_stream(data)
            for batch in found:
                batches.append(batch)
                num_bytes += batch.nbytes
                check(num_bytes)
        except (pa.ArrowException, OSError) as error:
            raise pa.ArrowInvalid(str(error)) from None  # Arrow raises OSError for a truncated stream
        sizes = [batch.num_rows for batch in batches], [batch.nbytes for batch in batches]

        def read(group: int, columns: Sequence[str]) -> Iterator[Any]:
            chosen = batches[group].select(list(columns))
            chosen.validate(full=True)  # a file's offsets may lead anywhere in memory
            return _cut(chosen, columns)

        yield Table(reader.schema, *sizes, read)


def open_stream(data: Any) -> Any:
    """Returns the reader of the Arrow stream in a buffer.

    Raises:
        ArrowException: The buffer holds no stream, or a truncated one: Arrow's own reader would take a cut between two
            batches for the end of the stream.
    """
    if data.size < len(_END_OF_STREAM) or data[-len(_END_OF_STREAM) :].to_pybytes() != _END_OF_STREAM:
        raise pa.ArrowInvalid("the end of the stream is missing")
    return pa.ipc.open_stream(data)


def open_csv(path: Path, delimiter: str, open_expanded: Callable[[], io.RawIOBase] | None) -> Table:
    """Returns the rows of a text file as one group, whose number of rows is not known before they are read.

    The first line has the names of the columns. All values are texts, so that numbers and dates stay as they are
    written, and an empty one is no null; they are bytes, because the reader checks their encoding.

    Args:
        path: The file.
        delimiter: The character between two values.
        open_expanded: Opens the decompressed text; None for a file that is not compressed.

    Raises:
        ArrowException: The file has no columns.
        OSError: The file cannot be read.
    """

    def begin(types: dict[str, Any], block_bytes: int) -> Any:
        # Arrow's own decompression has no limit.
        stream = pa.input_stream(str(path) if open_expanded is None else open_expanded(), compression=None)
        return pyarrow.csv.open_csv(
            stream,
            pyarrow.csv.ReadOptions(use_threads=False, block_size=block_bytes),
            pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=types, check_utf8=True, strings_can_be_null=False),
        )

    try:
        head = begin({}, _FIRST_BLOCK_BYTES)
    except pa.ArrowInvalid:  # perhaps because the first rows are longer
        head = begin({}, _LARGEST_ROW_BYTES)
    with head:
        types = [(name, pa.binary()) for name in head.schema.names]

    def read(group: int, columns: Sequence[str]) -> Iterator[Any]:
        assert group == 0
        with begin(dict(types), _LARGEST_ROW_BYTES) as reader:
            for batch in reader:
                yield from _cut(batch, columns)

    return Table(pa.schema(types), [sys.maxsize], [path.stat().st_size], read)


def _cut(batch: Any, columns: Sequence[str]) -> Iterator[Any]:
    chosen = batch.select(list(columns))
    return (chosen.slice(start, _ROWS_PER_BATCH) for start in range(0, chosen.num_rows, _ROWS_PER_BATCH))
