"""The run's own log: one CSV file that a resumed run continues instead of deleting."""

import csv
import io
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from genesis.base.errors import naming
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.untrusted import open_file


class CSVLog(Logger):
    """Writes metrics to one CSV file: a row per step, a column per metric.

    A resumed run replaces the rows that it repeats, because a killed run may have logged beyond its last checkpoint:
    those after the step given to `continue_after` are cut; without it, those from the first logged step on.

    The file may be read meanwhile, as far as it goes when it is opened: new columns replace the file, and what is
    logged later for the last step lengthens that row in place. A last line without its end is not complete.

    Args:
        path: The file; it is created with its directory when the first row is written.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__()
        self._path = Path(path)
        self._columns: list[str] = ["step"]
        self._row: dict[str, Any] = {}
        self._row_offset_bytes = 0
        self._has_begun = False
        self._resumed_step: int | None = None

    def continue_after(self, step: int) -> None:
        """Keeps the rows up to a step, the one that the run resumes from; call it before the first row.

        What is then logged for that step, such as a validation of the restored weights, joins its row.
        """
        self._resumed_step = step

    @property
    def name(self) -> str:
        """Returns the file's stem."""
        return self._path.stem

    @property
    def version(self) -> str:
        """Returns nothing: one file serves all attempts of a run."""
        return ""

    @property
    def save_dir(self) -> str:
        """Returns the directory of the file."""
        return str(self._path.parent)

    @property
    def log_dir(self) -> str:
        """Returns the directory of the file."""
        return str(self._path.parent)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing, because the resolved recipe is in the same directory as the log."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes `metrics` into the row of `step`, which is the last row or a new one."""
        assert step is not None
        is_new_row = self._row.get("step") != step
        self._row = {"step": step, **metrics} if is_new_row else {**self._row, **metrics}
        new_columns = [column for column in self._row if column not in self._columns]
        if new_columns or not self._has_begun:
            kept = self._read_rows_before(step) if self._has_begun else self._read_rows_of_earlier_runs(step)
            self._columns += [column for column in new_columns if column not in self._columns]
            with naming(self._path):
                self._rewrite(kept)
            self._has_begun = True
        with naming(self._path):
            self._write_last_row(is_new_row)

    def _write_last_row(self, is_new_row: bool) -> None:
        line = io.StringIO()
        csv.writer(line).writerow([self._row.get(column, "") for column in self._columns])
        data = line.getvalue().encode()
        # Training waits for this write, and opening a descriptor takes a fraction of a file object's time.
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            if is_new_row:
                self._row_offset_bytes = os.lseek(descriptor, 0, os.SEEK_END)
            # Validation's metrics come after training's for the same step, so they are added to the existing row.
            os.pwrite(descriptor, data, self._row_offset_bytes)
            if not is_new_row:
                os.ftruncate(descriptor, self._row_offset_bytes + len(data))
        finally:
            os.close(descriptor)

    def _read_rows_of_earlier_runs(self, step: int) -> list[dict[str, Any]]:
        """Returns the rows to keep before the first row; the resumed step's own row joins the one at hand."""
        if self._resumed_step is None:
            return self._read_rows_before(step)
        kept = self._read_rows_before(min(step, self._resumed_step) + 1)
        if kept and int(kept[-1]["step"]) == step:
            earlier = {column: cell for column, cell in kept.pop().items() if cell and column != "step"}
            self._row = {"step": step, **earlier, **self._row}
        return kept

    def _read_rows_before(self, step: int) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with io.TextIOWrapper(open_file(self._path), encoding="utf-8", newline="") as file:
            lines = file.readlines()
        # A line truncated by a kill has no newline, and may look like the beginning of another step's row.
        reader = csv.DictReader(line for line in lines if line.endswith("\n"))
        written = list(reader.fieldnames or ["step"])
        self._columns = written + [column for column in self._columns if column not in written]
        return [row for row in reader if int(row["step"]) < step]

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        data = text.getvalue().encode()
        replace_file(self._path, data)
        self._row_offset_bytes = len(data)
