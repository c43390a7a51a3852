"""Reads a column of tokens from a dataset that Hugging Face's `datasets` saved to disk.

DIRECTORY/state.json                          names the files, in their order
DIRECTORY/data-00000-of-00002.arrow ...       Arrow streams: batches of rows, each column of a batch in one piece
DIRECTORY/dataset_dict.json                   in a directory with one such directory per split

A row is a document. Ids are read in place from the Arrow file: nothing is decoded or copied.
"""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from genesis.base.errors import UserError, blaming
from genesis.data.foreign.token_file import TOKEN_DTYPES, Run, TokenFile, file_size
from genesis.data.sources.table_files import open_stream
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import path_below, read_file

STATE_NAME: Final = "state.json"
SPLITS_NAME: Final = "dataset_dict.json"


def list_arrow_files(directory: Path) -> list[Path]:
    """Returns the files of a saved dataset, in their order.

    Raises:
        UserError: The directory holds several splits, or its state file lists no data files.
    """
    if (directory / SPLITS_NAME).exists():
        with blaming(directory / SPLITS_NAME, "save the dataset again"):
            splits = _read_json(directory / SPLITS_NAME).get("splits", [])
            raise UserError(f"{directory} holds the splits {', '.join(splits)}; name one, as {directory / splits[0]}")
    state = directory / STATE_NAME
    with blaming(state, "save the dataset again"):
        try:
            return [path_below(directory, file["filename"], state) for file in _read_json(state)["_data_files"]]
        except (KeyError, TypeError):
            raise UserError(f"{state} names no data files; save the dataset again") from None


def read_arrow(path: Path, column: str) -> TokenFile:
    """Returns the content of the column `column` of an `.arrow` file.

    Raises:
        UserError: The file is damaged or compressed; the column is missing, does not hold lists of ids, or has rows
            without a value; rows are padded, or some of their labels are masked.
    """
    num_bytes = file_size(path)
    dtype = ""
    runs: list[Run] = []
    ends: list[NDArray[np.int64]] = []
    try:
        with pa.memory_map(str(path)) as file:
            whole = file.read_buffer()
            reader = open_stream(whole)
            dtype = _token_dtype(path, reader.schema, column)
            for batch in reader:
                batch.validate(full=True)
                _check_companions(path, batch)
                run, batch_ends = _locate(path, batch.column(column), whole.address, num_bytes)
                if run.num_tokens:
                    runs.append(run)
                    ends.append(batch_ends)
    except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for a truncated stream
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not an Arrow stream or is damaged ({reason}); save the dataset again") from None

    def read_ends() -> Iterator[NDArray[np.int64]]:
        starts = accumulate((run.num_tokens for run in runs), initial=0)
        return (batch_ends + start for batch_ends, start in zip(ends, starts, strict=False))

    return TokenFile(path, num_bytes, dtype, tuple(runs), read_ends)


def _locate(path: Path, rows: Any, address: int, num_bytes: int) -> tuple[Run, NDArray[np.int64]]:
    """Returns the run of tokens of a batch in the file, and the ends of the batch's rows in tokens."""
    values = rows.values
    if rows.null_count or values.null_count:
        raise UserError(f"{path} has rows or ids that are null; leave them out (Dataset.filter) and save it again")
    offsets = rows.offsets.to_numpy().astype(np.int64)
    count = int(offsets[-1] - offsets[0])
    buffer = values.buffers()[1]
    if not count or buffer is None:
        return Run(0, 0), offsets[:0]
    item_bytes = values.type.bit_width // 8
    byte_offset = buffer.address - address + (values.offset + int(offsets[0])) * item_bytes
    if not 0 <= byte_offset <= num_bytes - count * item_bytes:
        raise UserError(f"{path} is compressed, so its ids cannot be read in place; save it without compression")
    return Run(byte_offset, count), offsets[1:] - offsets[0]


def _token_dtype(path: Path, schema: Any, column: str) -> str:
    token_columns = [field.name for field in schema if _is_tokens(field.type)]
    if column in token_columns:
        return str(schema.field(column).type.value_type)
    found = (
        f"has no column {column!r}" if column not in schema.names else f"has {schema.field(column).type} in {column!r}"
    )
    if token_columns:
        raise UserError(f"{path} {found}; columns of ids: {', '.join(token_columns)}; give one as column")
    texts = [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]
    remedy = f"`genesis data prepare` tokenizes its text ({', '.join(texts)})" if texts else "tokenize it first"
    raise UserError(f"{path} {found} and no column of ids (lists of integers); {remedy}")


def _is_tokens(kind: Any) -> bool:
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and str(kind.value_type) in TOKEN_DTYPES


def _check_companions(path: Path, batch: Any) -> None:
    """Refuses rows with padding or with masked labels."""
    for name, fault in (
        ("attention_mask", "is 0 for some ids: rows are padded; tokenize without padding"),
        ("labels", "is negative for some ids: their loss is masked, which can't be kept; leave the column out"),
    ):
        if name not in batch.schema.names or not _is_tokens(batch.schema.field(name).type):
            continue
        values = batch.column(name).values.to_numpy(zero_copy_only=False)
        if len(values) and values.min() < (1 if name == "attention_mask" else 0):
            raise UserError(f"{path}: {name} {fault}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = load_json(read_file(path))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); give a directory that `save_to_disk` made"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); save the dataset again") from None
    return found
