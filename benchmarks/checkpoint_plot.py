"""Plots the time of training steps around a save."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.checkpoint_modes import BASELINE


def median_by_position(turns: Sequence[Sequence[float]]) -> list[float]:
    """Returns, for each position in a turn, the median over turns of the window's seconds.

    Example:
        >>> median_by_position([[3.0, 1.0], [5.0, 1.0], [4.0, 2.0]])
        [4.0, 1.0]
    """
    return [statistics.median(seconds) for seconds in zip(*turns, strict=True)]


def plot_steps(step_seconds: Mapping[str, Sequence[Sequence[float]]], title: str, out: Path) -> None:
    """Writes a plot of the median step time at each position in a turn, with a line for each mode, to `out` (PNG).

    Args:
        step_seconds: Mode to the seconds of the windows of each turn; the first window of a turn ends with the save.
        title: Description of the training.
        out: The file to write.
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, turns in step_seconds.items():
        medians = median_by_position(turns)
        style = {"color": "black", "linestyle": "--"} if name == BASELINE else {"marker": "o", "markersize": 4}
        axes.plot(range(len(medians)), medians, label=name, linewidth=1.5, **style)
    num_windows = len(next(iter(step_seconds.values()))[0])
    axes.set(
        xlabel="windows after the one that ends with the save",
        ylabel="seconds (median over rounds)",
        title=f"Step time around a save\n{title}",
        xticks=range(num_windows),
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)
