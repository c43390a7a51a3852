"""Reads the rows of a user's task: JSONL files, strictly, without a copy in a cache."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import datasets
import pyarrow as pa
from blake3 import blake3

from genesis.base.errors import UserError
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import check_file, path_below, read_file

_MAX_BYTES: Final = 1 << 30
"""Limit of a file of rows: all of them are in memory."""

Splits = Mapping[str, Sequence[Path]]


def find_splits(folder: Path, data_files: Any = None) -> dict[str, list[Path]]:
    """Returns the files of each split.

    Args:
        folder: The task's folder.
        data_files: As in `datasets`: a name, a list of names (of the split `train`) or both by split, relative to the
            folder; None for all `SPLIT.jsonl` in the folder.

    Raises:
        UserError: A file is missing, or the folder has none.
    """
    if data_files is None:
        splits = {path.stem: [path] for path in sorted(folder.glob("*.jsonl"))}
    else:
        by_split: dict[str, Any] = data_files if isinstance(data_files, dict) else {"train": data_files}
        named = {split: [names] if isinstance(names, str) else names for split, names in by_split.items()}
        source = f"the task in {folder}"
        splits = {split: [path_below(folder, name, source) for name in names] for split, names in named.items()}
    for path in (path for paths in splits.values() for path in paths):
        if not path.is_file():
            raise UserError(
                f"no such file: {path}, listed as data by the task in {folder}; add the file or correct the task"
            )
    if not splits:
        raise UserError(
            f"{folder} has no rows; put them into files named after splits, such as {folder / 'test.jsonl'}"
        )
    return splits


def hash_own(folder: Path, splits: Splits) -> str:
    """Returns a BLAKE3 hex digest of everything in a folder that affects results: settings, code, rows by split."""
    digest = blake3()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".py") and path.is_file()):
        digest.update(f"{path.relative_to(folder)}:{path.stat().st_size}:".encode())
        digest.update(read_file(path))
    for split, paths in sorted(splits.items()):
        for path in paths:
            digest.update(f"{split}:{check_file(path)}:".encode())
            digest.update_mmap(path)
    return digest.hexdigest()


def read_split(paths: Sequence[Path]) -> datasets.Dataset:
    """Returns the rows of some files, one after the other.

    Raises:
        UserError: A line is not a JSON object, there are no rows, or rows differ in their fields or types.
    """
    rows = [row for path in paths for row in _read_rows(path)]
    names = ", ".join(map(str, paths))
    if not rows:
        raise UserError(f"{names} has no rows; add at least one")
    fields = dict.fromkeys(field for row in rows for field in row)
    for number, row in enumerate(rows, start=1):
        for field in fields.keys() - row.keys():  # lm-eval would silently insert None
            raise UserError(f"{names}: row {number} lacks the field {field!r}, which others have; write null if it may")
    try:
        return datasets.Dataset.from_dict({field: [row[field] for row in rows] for field in fields})
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise UserError(f"{names}: a field has other types in other rows ({' '.join(str(error).split())})") from None


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(read_file(path, _MAX_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = load_json(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number} is not JSON ({error}); fix or remove it") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number} is a JSON {type(row).__name__}, not an object; fix or remove it")
        rows.append(row)
    return rows
