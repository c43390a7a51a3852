"""What the page's script needs of a chart, to show values under the pointer and to draw a part of the chart larger."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from genesis.operations.report.style import VARIABLES, variable

_GID: Final = re.compile(r"run-(\d+)-([\w-]+)")
_POINTS_PER_INCH: Final = 72.0
_DIGITS: Final = 6


def read_plot(figure: Figure, names: Sequence[str]) -> dict[str, Any] | None:
    """Returns the curves of a chart as plain values; None for a chart without curves.

    Args:
        figure: The chart in the colours `VARIABLES`, after it was written as SVG, which places its axes.
        names: Names of the runs.

    Returns:
        `box`: the axes in the SVG's units, as left, top, width and height; `x` and `y`: the limits of the axes;
        `is_log`: whether the vertical one is logarithmic; `clock`: the name of the horizontal one; `has_zoom`; and
        `series`: label, number of the run (-1 for none), kind ("line", "marks", "edge" or "area"), colour, and points
        as a flat list of x and y.
    """
    axes = figure.axes[0]
    series = [*_read_lines(axes, names), *_read_marks(axes), *_read_areas(axes)]
    if not series:
        return None
    width, height = (float(inches) * _POINTS_PER_INCH for inches in figure.get_size_inches())
    place = axes.get_position()
    return {
        "box": [place.x0 * width, (1 - place.y1) * height, place.width * width, place.height * height],
        "x": list(axes.get_xlim()),
        "y": list(axes.get_ylim()),
        "is_log": axes.get_yscale() == "log",
        "clock": axes.get_xlabel().partition(" (")[0],
        # A timeline's vertical axis has names instead of numbers.
        "has_zoom": any(one["kind"] in ("line", "area") for one in series),
        "series": series,
    }


def _read_lines(axes: Axes, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for line in axes.lines:
        found = _GID.fullmatch(line.get_gid() or "")
        if found is None:
            continue
        label, number = str(line.get_label()).strip(), int(found[1])
        kind = "edge" if found[2].startswith("restart") else "line"
        if label.startswith("_") or not label:
            label = "resumed" if kind == "edge" else names[number] if len(names) > 1 else "value"
        yield _describe(label, number, kind, line.get_color(), np.asarray(line.get_xydata()))


def _read_marks(axes: Axes) -> Iterator[dict[str, Any]]:
    for marks in axes.collections:
        label = str(marks.get_label())
        if isinstance(marks, PathCollection) and not label.startswith("_"):
            found = _GID.match(marks.get_gid() or "")
            number = -1 if found is None else int(found[1])
            yield _describe(label, number, "marks", marks.get_facecolor()[0], np.asarray(marks.get_offsets()))


def _read_areas(axes: Axes) -> Iterator[dict[str, Any]]:
    """Yields the heights of stacked areas: at each place, the distance of an outline's highest and lowest point."""
    for area in axes.collections:
        if isinstance(area, PolyCollection) and not isinstance(area, PathCollection):
            outline = np.asarray(area.get_paths()[0].vertices)
            places = np.unique(outline[:, 0])
            heights = [float(np.ptp(outline[outline[:, 0] == place, 1])) for place in places]
            colour = area.get_facecolor()[0]
            yield _describe(str(area.get_label()), -1, "area", colour, np.column_stack([places, heights]))


def _describe(label: str, run: int, kind: str, colour: Any, points: Any) -> dict[str, Any]:
    shade = to_hex(colour)
    return {
        "label": label,
        "run": run,
        "kind": kind,
        "colour": variable(shade if shade in VARIABLES.colours else VARIABLES.ink),
        "points": [float(f"{value:.{_DIGITS}g}") for value in np.asarray(points, dtype=float).ravel()],
    }
