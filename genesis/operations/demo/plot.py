"""Plots the loss of a run."""

import csv
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TRAINING, HELD_OUT, KILL, RESUME = "#8fb8de", "#c0392b", "black", "gray"


def read_curve(metrics: Path, x: str, y: str) -> tuple[list[float], list[float]]:
    """Returns the columns `x` and `y` of a run's CSV log, from the rows that have both values."""
    with metrics.open(newline="", encoding="utf-8") as file:
        points = [(float(row[x]), float(row[y])) for row in csv.DictReader(file) if row.get(x) and row.get(y)]
    return [point[0] for point in points], [point[1] for point in points]


def build_figure(metrics: Path, killed_at_step: int | None = None, resumed_from_step: int | None = None) -> Figure:
    """Returns a figure of the training and validation loss over steps, with the kill and the resume marked."""
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*read_curve(metrics, "step", "train/bits_per_byte"), color=TRAINING, linewidth=1, label="training")
    axes.plot(*read_curve(metrics, "step", "validation/bits_per_byte"), "o-", color=HELD_OUT, label="held-out text")
    if killed_at_step is not None:
        axes.axvline(killed_at_step, color=KILL, linestyle="--", linewidth=1, label=f"killed at step {killed_at_step}")
    if resumed_from_step is not None:
        axes.axvline(
            resumed_from_step,
            color=RESUME,
            linestyle=":",
            linewidth=1.5,
            label=f"resumed from step {resumed_from_step}",
        )
    axes.set(xlabel="step", ylabel="bits per byte", title="Genesis demo: Python's own sources")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def plot_loss(
    metrics: Path, out: Path, killed_at_step: int | None = None, resumed_from_step: int | None = None
) -> None:
    """Writes the figure of the loss to `out` (PNG)."""
    build_figure(metrics, killed_at_step, resumed_from_step).savefig(out)
