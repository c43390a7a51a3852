"""Plots results over a run's checkpoints, with one panel for each kind of measure."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from genesis.evaluate.results import Result
from genesis.evaluate.table import select_shown
from genesis_callbacks.base.files import replace_file

PLOT_NAME = "evaluations.png"
_PANELS_ACROSS = 3
_LEGEND_ROWS = 10


def plot_results(results: Sequence[Result], out: Path) -> None:
    """Writes `out` (PNG): a panel for each kind of measure, over steps, with a band of one standard error."""
    panels = _group(results)
    if not panels:
        return
    across = min(_PANELS_ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(5 * across, 3.6 * down), layout="constrained")
    FigureCanvasAgg(figure)
    first = None
    for index, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, index + 1, sharex=first)
        first = first or axes
        for label, points in lines.items():
            steps, values, errors = np.array(points).T
            (line,) = axes.plot(steps, values, "o-", label=label)
            axes.fill_between(steps, values - errors, values + errors, color=line.get_color(), alpha=0.15)
        axes.set(xlabel="step", title=title)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(
                fontsize="small" if len(lines) <= _LEGEND_ROWS else "x-small", ncols=1 + len(lines) // _LEGEND_ROWS
            )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    replace_file(out, picture.getvalue(), has_rivals=True)


def _group(results: Sequence[Result]) -> dict[str, dict[str, list[tuple[int, float, float]]]]:
    """Returns by panel and line the step, value and standard error of each point.

    Accuracies share a panel, and so do sources of text; a measure with a scale of its own has its own panel.
    """
    panels: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
    for result, measure in select_shown(results):
        if measure.value is None:
            continue
        if result.question.get("kind") == "heldout":
            panel, line = f"{result.name}: {measure.metric}", measure.subject
        elif measure.is_higher_better:
            panel, line = measure.subject, measure.metric
        else:
            panel, line = f"{measure.subject}: {measure.metric}", measure.metric
        point = (result.step, measure.value, measure.stderr or 0.0)
        panels.setdefault(panel, {}).setdefault(line, []).append(point)
    return panels
