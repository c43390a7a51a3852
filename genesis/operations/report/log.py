"""Reads the log of a run (`metrics.csv`) of any size, in bounded memory and also while the run writes.

The file is read as far as it went when it was opened, twice: for the steps, then for the values. A line without its end
is left out: a kill tore it, or its writer is about to finish it. Where steps go back, as in the log of a program that
appends after a resume, the later rows win: earlier rows of the same and of later steps are left out.
"""

import csv
import math
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from genesis.base.errors import UserError, numbered, printable
from genesis.operations.report.series import Point, Series
from genesis_callbacks.base.untrusted import RefusedFileError, open_file

AREAS: Final = (
    *("train", "validation", "optim", "counters", "time", "memory", "transfer", "disk", "device", "gradient", "data"),
    "checkpoint",
)
"""The areas of metrics that a report shows; statistics of single parts of a model are not among them."""
MAX_SERIES: Final = 300
_MAX_LINE_BYTES: Final = 1 << 20
_MAX_ROWS_OF_PARTS: Final = 600
_STEP, _SEEN, _UPDATED = "step", "counters/tokens_seen", "counters/tokens_updated"
PARTS: Final = ("data_wait", "transfer", "forward", "backward", "communication", "optimizer", "save_stall")
"""The parts of a step in their order, as `genesis_callbacks.StepTimer` logs them; two others follow."""
ALL_PARTS: Final = (*PARTS, "generation", "other")
STEP_TIME: Final = "time/step_ms"


@dataclass
class RunLog:
    """The log of a run, thinned.

    Attributes:
        series: By the name of the metric.
        part_rows: Rows of the parts of a step: the step, then milliseconds of each part of `ALL_PARTS`.
        part_stride: Every which row is among them.
        num_rows: Rows that were read.
        num_bytes: Size of the file.
        notes: What was left out and why, for the reader of the report.
    """

    series: dict[str, Series] = field(default_factory=dict)
    part_rows: list[tuple[float, ...]] = field(default_factory=list)
    part_stride: int = 1
    num_rows: int = 0
    num_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def sample(self) -> dict[str, list[float]]:
        """Returns values of each metric at equal distances."""
        return {name: series.sample for name, series in self.series.items()}


def read_log(path: Path) -> RunLog:
    """Returns the log in `path`.

    Raises:
        UserError: The file cannot be read, or is no log of a run.
    """
    try:
        with open_file(path) as file:
            return _read(path, file, os.fstat(file.fileno()).st_size)
    except RefusedFileError as error:
        raise UserError(f"{error}; give a run whose log is a file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; make it readable") from error


def _read(path: Path, file: BinaryIO, num_bytes: int) -> RunLog:
    log = RunLog(num_bytes=num_bytes)
    head = file.readline(_MAX_LINE_BYTES)
    if not head.endswith(b"\n"):
        if len(head) == _MAX_LINE_BYTES:
            raise UserError(f"{path} is no log of a run: its first line has more than {_MAX_LINE_BYTES:,} bytes")
        log.notes.append("The log has no complete row yet.")
        return log
    columns = [printable(name) for name in next(csv.reader([head.decode("utf-8-sig", errors="replace")]), [])]
    if _STEP not in columns:
        raise UserError(f"{path} is no log of a run: it has no column 'step'; remove it, or give another run")
    start = file.tell()
    cuts = _find_cuts(_read_rows(file, num_bytes, len(columns)), columns.index(_STEP))
    file.seek(start)
    _Reader(log, columns).read(_read_rows(file, num_bytes, len(columns)), cuts)
    return log


def _read_rows(file: BinaryIO, end: int, num_columns: int) -> Iterator[list[bytes] | None]:
    """Yields the cells of each complete line before `end`; None for one with another number of cells."""
    position = file.tell()
    while position < end:
        line = file.readline(_MAX_LINE_BYTES)
        position += len(line)
        if not line.endswith(b"\n"):
            if len(line) < _MAX_LINE_BYTES:
                return  # torn, or still being written
            while line and not line.endswith(b"\n"):
                line = file.readline(_MAX_LINE_BYTES)
                position += len(line)
            yield None
            continue
        cells = _split(line)
        yield cells if len(cells) == num_columns else None


def _split(line: bytes) -> list[bytes]:
    if b'"' not in line:
        return line.rstrip(b"\r\n").split(b",")
    try:
        row = next(csv.reader([line.decode("utf-8", errors="replace")]), [])
    except csv.Error:
        return []
    return [cell.encode() for cell in row]


def _parse_step(cell: bytes) -> float:
    """Returns the step of a cell; NaN if it is invalid."""
    try:
        step = float(cell)
    except ValueError:
        return math.nan
    return step if 0 <= step < 1 << 62 else math.nan


@dataclass(frozen=True)
class _Cuts:
    """Rows at which the steps went back. `least[i]` is the lowest step of those cuts from the i-th one on."""

    rows: Sequence[int]
    least: Sequence[float]


def _find_cuts(rows: Iterator[list[bytes] | None], column: int) -> _Cuts:
    """Returns where the steps go back: a row is superseded by a later cut to its step or an earlier one."""
    places, steps = array("q"), array("d")
    last = -1.0
    for number, cells in enumerate(rows):
        step = math.nan if cells is None else _parse_step(cells[column])
        if math.isnan(step):
            continue
        if step < last:
            while steps and steps[-1] >= step:  # superseded itself
                steps.pop()
                places.pop()
            steps.append(step)
            places.append(number)
        last = step
    # What is left rises, so that the first cut after a row has the least step of all after it.
    return _Cuts(places, steps)


class _Reader:
    """Adds rows to a log."""

    def __init__(self, log: RunLog, columns: Sequence[str]) -> None:
        self._log = log
        wanted = [(place, name) for place, name in enumerate(columns) if name.partition("/")[0] in AREAS]
        if len(wanted) > MAX_SERIES:
            log.notes.append(f"The log has {numbered(len(wanted), 'metrics')}; the first {MAX_SERIES} are shown.")
        self._series = [(place, log.series.setdefault(name, Series())) for place, name in wanted[:MAX_SERIES]]
        self._step = columns.index(_STEP)
        self._clocks = [columns.index(name) if name in columns else -1 for name in (_SEEN, _UPDATED)]
        names = [f"time/{part}_ms" for part in ALL_PARTS]
        has_parts = STEP_TIME in columns
        self._parts = [columns.index(name) if name in columns else -1 for name in names] if has_parts else []
        self._step_time = columns.index(STEP_TIME) if has_parts else -1
        self._num_part_rows = 0

    def read(self, rows: Iterator[list[bytes] | None], cuts: _Cuts) -> None:
        """Adds all rows but those that later ones supersede, and notes what was left out."""
        num_damaged = num_superseded = next_cut = 0
        for number, cells in enumerate(rows):
            step = math.nan if cells is None else _parse_step(cells[self._step])
            if cells is None or math.isnan(step):
                num_damaged += 1
                continue
            while next_cut < len(cuts.rows) and cuts.rows[next_cut] <= number:
                next_cut += 1
            if next_cut < len(cuts.rows) and step >= cuts.least[next_cut]:
                num_superseded += 1
                continue
            self._add(cells, step)
        self._finish(num_damaged, num_superseded)

    def _add(self, cells: list[bytes], step: float) -> None:
        self._log.num_rows += 1
        seen, updated = (_parse_step(cells[place]) if place >= 0 else math.nan for place in self._clocks)
        for place, series in self._series:
            cell = cells[place]
            if not cell:
                continue
            try:
                value = float(cell)
            except ValueError:
                value = math.nan
            if math.isfinite(value):
                series.add(Point(value, step, seen, updated))
            else:
                series.num_not_finite += 1
        if self._step_time >= 0 and cells[self._step_time]:
            self._add_parts(cells, step)

    def _add_parts(self, cells: list[bytes], step: float) -> None:
        if self._num_part_rows % self._log.part_stride == 0:
            values = [_parse_step(cells[place]) if place >= 0 else 0.0 for place in self._parts]
            self._log.part_rows.append((step, *(0.0 if math.isnan(value) else value for value in values)))
            if len(self._log.part_rows) > _MAX_ROWS_OF_PARTS:
                self._log.part_rows = self._log.part_rows[::2]
                self._log.part_stride *= 2
        self._num_part_rows += 1

    def _finish(self, num_damaged: int, num_superseded: int) -> None:
        log = self._log
        log.series = {name: series for name, series in log.series.items() if series.last or series.num_not_finite}
        widths = [series.width for series in log.series.values() if series.is_thinned]
        if widths:
            log.notes.append(
                f"thinned: {numbered(log.num_rows, 'rows')} ({log.num_bytes / 1e6:,.1f} MB), of which the lowest and "
                f"highest of each {numbered(max(widths), 'values')} are drawn."
            )
        if log.part_stride > 1:
            log.notes.append(f"The stacked parts of a step are those of every {log.part_stride:,}th row.")
        if num_superseded:
            log.notes.append(f"Left out: {numbered(num_superseded, 'rows')} whose steps a resumed run logged again.")
        if num_damaged:
            log.notes.append(f"Left out: {numbered(num_damaged, 'damaged lines')}.")
        for name, series in log.series.items():
            if series.num_not_finite:
                log.notes.append(f"{name}: {numbered(series.num_not_finite, 'values')} infinite or not a number.")
