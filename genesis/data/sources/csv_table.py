"""Reads CSV and TSV files by pyarrow, through the interface of a parquet file."""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.csv

from genesis.data.arrow_file import RowGroup

_FIRST_BLOCK_BYTES: Final = 1 << 20
_LARGEST_ROW_BYTES: Final = 64 << 20


class CsvFile:
    """The part of the interface of `pyarrow.parquet.ParquetFile` that sources use, for a text file of rows.

    The file is one row group, whose number of rows is not known before they are read. The first line has the names of
    the columns. All values are texts, so that numbers and dates stay as they are written, and an empty one is no null;
    they are bytes, because the reader checks their encoding.

    Args:
        path: The file.
        delimiter: The character between two values.
        open_expanded: Opens the decompressed text; None for a file that is not compressed.

    Raises:
        ArrowException: The file has no columns.
        OSError: The file cannot be read.
    """

    def __init__(self, path: str | Path, delimiter: str, open_expanded: Callable[[], io.RawIOBase] | None) -> None:
        self._path, self._delimiter, self._open_expanded = str(path), delimiter, open_expanded
        self._num_bytes = Path(path).stat().st_size
        try:
            reader = self._open({}, _FIRST_BLOCK_BYTES)
        except pa.ArrowInvalid:  # perhaps because the first rows are longer
            reader = self._open({}, _LARGEST_ROW_BYTES)
        with reader:
            names = reader.schema.names
        self.schema_arrow: Any = pa.schema([(name, pa.binary()) for name in names])

    @property
    def num_row_groups(self) -> int:
        """Returns 1."""
        return 1

    @property
    def metadata(self) -> Self:
        """Returns the object that has `row_group`, which is the file itself."""
        return self

    def row_group(self, number: int) -> RowGroup:
        """Returns the number of bytes of the file, and of rows the most that there can be."""
        assert number == 0
        return RowGroup(sys.maxsize, self._num_bytes)

    def iter_batches(self, batch_size: int, row_groups: Sequence[int], columns: Sequence[str]) -> Iterator[Any]:
        """Yields the rows, at most `batch_size` at a time."""
        assert row_groups == [0]
        types = {column.name: column.type for column in self.schema_arrow}
        with self._open(types, _LARGEST_ROW_BYTES) as reader:
            for batch in reader:
                chosen = batch.select(list(columns))
                for start in range(0, chosen.num_rows, batch_size):
                    yield chosen.slice(start, batch_size)

    def _open(self, types: dict[str, Any], block_bytes: int) -> Any:
        # Arrow's own decompression has no limit.
        stream = pa.input_stream(self._path if self._open_expanded is None else self._open_expanded(), compression=None)
        return pyarrow.csv.open_csv(
            stream,
            pyarrow.csv.ReadOptions(use_threads=False, block_size=block_bytes),
            pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=types, check_utf8=True, strings_can_be_null=False),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass
