"""Results as a table: a row for each measure, a column for each checkpoint."""

import re
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.table import Table

from genesis.evaluate.results import METRICS_NAME, Measure, Result

BITS: Final = "bits_per_byte"
MAX_COLUMNS: Final = 5


def select_shown(results: Sequence[Result]) -> list[tuple[Result, Measure]]:
    """Returns the measures that get a row in the table.

    A group of tasks has its own measures, if it has any, instead of those of its tasks. Text has bits per byte, if they
    are known.
    """
    shown = []
    for result in results:
        own = [measure for measure in result.measures if measure.subject == result.name]
        bits = [measure for measure in result.measures if measure.metric == BITS and measure.value is not None]
        is_text = result.question.get("kind") == "heldout"
        shown += [(result, measure) for measure in (bits if is_text else own) or result.measures]
    return shown


def build_table(results: Sequence[Result]) -> Table:
    """Returns the table of the last checkpoints of `results`, in their order; a value comes with its standard error."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for result, measure in select_shown(results):
        cells.setdefault((measure.subject, measure.metric), {})[result.checkpoint] = _format(measure)
    checkpoints = list(dict.fromkeys(result.checkpoint for result in results))
    num_hidden = max(0, len(checkpoints) - MAX_COLUMNS)
    table = Table(box=box.SIMPLE_HEAD, caption=f"and {num_hidden} earlier in {METRICS_NAME}" if num_hidden else None)
    table.add_column("", no_wrap=True)
    table.add_column("measure", no_wrap=True)
    for checkpoint in checkpoints[num_hidden:]:
        table.add_column(re.sub("step-0*(?=.)", "step ", checkpoint), justify="right", no_wrap=True)
    for (subject, metric), values in cells.items():
        table.add_row(subject, metric, *(values.get(checkpoint, "") for checkpoint in checkpoints[num_hidden:]))
    return table


def _format(measure: Measure) -> str:
    if measure.value is None:
        return "-"
    error = "" if measure.stderr is None else f" ±{measure.stderr:.3f}"
    return f"{measure.value:.4g}{error}" if abs(measure.value) >= 10 else f"{measure.value:.4f}{error}"
