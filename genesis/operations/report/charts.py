"""The charts of a report: what each shows, and the line that stands in its place where a run has no such values."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from genesis.base.errors import numbered
from genesis.operations.report.collect import Run
from genesis.operations.report.log import ALL_PARTS, STEP_TIME
from genesis.operations.report.series import Point
from genesis.operations.report.style import Palette, new_figure, styled

Clock = Literal["step", "tokens_seen", "tokens_updated"]
_CLOCK_LABELS: Final = {
    "step": "step",
    "tokens_seen": "tokens seen",
    "tokens_updated": "tokens updated (of steps that changed the parameters)",
}
_MAX_LABEL: Final = 34
_FEW_POINTS: Final = 60
_MAX_RESTARTS: Final = 200
_LINE_STYLES: Final = ("-", "--", ":", "-.")
_BYTES: Final = 1e9
_UNITS: Final = {"ms": "ms", "bytes": "bytes", "watts": "W", "seconds": "s"}
_SHORT: Final = re.compile(r"\b(lr|mfu|gpu|cpu)\b")


@dataclass(frozen=True)
class Line:
    """A metric in a chart.

    Attributes:
        key: The metric.
        label: Its name in the legend.
        is_sparse: Whether it has few values, which are marked.
        scale: What values are divided by.
    """

    key: str
    label: str
    is_sparse: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Chart:
    """A chart of metrics over a clock.

    Attributes:
        name: The name of its file, and of its place in the page.
        title: Its heading.
        unit: Label of the vertical axis.
        lines: The metrics.
        clock: The horizontal axis.
        is_log: Whether the vertical axis is logarithmic where all values are positive.
        note: One line below the heading.
        marks: Metrics that count something: a mark stands where they rise.
        has_restarts: Whether restarts are marked.
    """

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    clock: Clock = "step"
    is_log: bool = False
    note: str = ""
    marks: tuple[Line, ...] = ()
    has_restarts: bool = False

    def points(self, run: Run, line: Line) -> list[tuple[float, float]]:
        """Returns the points of a metric of a run in this chart."""
        series = run.log.series.get(line.key)
        found = (
            [] if series is None else [(_at(point, self.clock), point.value / line.scale) for point in series.points]
        )
        return [point for point in found if not math.isnan(point[0])]

    def is_in(self, run: Run) -> bool:
        """Returns whether a run has any point in this chart."""
        return any(self.points(run, line) for line in self.lines)

    def draw(self, axes: Axes, runs: Sequence[Run], palette: Palette) -> None:
        """Draws the runs that have these metrics."""
        drawn = []
        for number, run in enumerate(runs):
            for place, line in enumerate(self.lines):
                points = self.points(run, line)
                if points:
                    self._draw_line(axes, number, len(runs), place, points, run, palette)
                    drawn += [y for _, y in points]
            if self.has_restarts and self.clock == "step":
                _draw_restarts(axes, number, run, palette)
            for place, mark in enumerate(self.marks):
                self._draw_marks(axes, number, place, run, mark, palette)
        if self.is_log and drawn and min(drawn) > 0:
            axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(format_number)
        axes.yaxis.set_minor_formatter(NullFormatter() if drawn and max(drawn) > 10 * min(drawn) else format_number)
        axes.set(xlabel=_CLOCK_LABELS[self.clock], ylabel=self.unit)
        axes.margins(x=0.02)

    def _draw_line(
        self,
        axes: Axes,
        number: int,
        num_runs: int,
        place: int,
        points: list[tuple[float, float]],
        run: Run,
        palette: Palette,
    ) -> None:
        line = self.lines[place]
        colour = palette.lines[(number if num_runs > 1 else place) % len(palette.lines)]
        label = line.label if num_runs == 1 else run.name
        if num_runs > 1 and len(self.lines) > 1:
            label = f"{shorten(run.name)}: {line.label}"
        is_marked = line.is_sparse or len(points) == 1
        (drawn,) = axes.plot(
            *zip(*points, strict=True),
            color=colour,
            linestyle=_LINE_STYLES[place % len(_LINE_STYLES)] if num_runs > 1 else "-",
            marker="o" if is_marked and len(points) <= _FEW_POINTS else None,
            markersize=3.5,
            linewidth=1.2 if len(points) <= 2 * _FEW_POINTS or line.is_sparse else 0.9,
            label=shorten(label),
        )
        drawn.set_gid(f"run-{number}-{place}")

    def _draw_marks(self, axes: Axes, number: int, place: int, run: Run, mark: Line, palette: Palette) -> None:
        """Marks the log lines at which a count has risen, at the height of the chart's first metric."""
        series = run.log.series.get(mark.key)
        heights = dict(self.points(run, self.lines[0]))
        if series is None or not heights:
            return
        counts, top = series.points, max(heights.values())
        rises = [
            (_at(after, self.clock), heights.get(_at(after, self.clock), top))
            for before, after in zip([Point(0.0, 0.0, 0.0, 0.0), *counts], counts, strict=False)
            if after.value > before.value
        ]
        if rises:
            colour = palette.bad if place == 0 else palette.lines[5]
            shape = "^v"[place % 2]
            places, levels = zip(*rises, strict=True)
            drawn = axes.scatter(places, levels, color=colour, marker=shape, s=22, zorder=3, label=mark.label)
            drawn.set_gid(f"run-{number}-mark-{place}")


def _at(point: Point, clock: Clock) -> float:
    return float(getattr(point, clock))


def format_number(value: float, _: object = None) -> str:
    """Returns a number for an axis: 0.02, 12, 1.5M; formulas of matplotlib would be shown as their source.

    Example:
        >>> [format_number(value) for value in (0.0, 2e-5, 0.25, 1500.0, 2.5e6, 3e9)]
        ['0', '2e-05', '0.25', '1,500', '2.5M', '3G']
    """
    for bound, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def in_words(key: str) -> str:
    """Returns the name of a metric in words.

    Example:
        >>> [in_words(key) for key in ("time/data_wait_ms", "train/tokens_per_second", "optim/lr", "memory/peak_bytes")]
        ['Data wait (ms)', 'Tokens per second', 'Optim: LR', 'Memory: peak (bytes)']
    """
    area, _, name = key.rpartition("/")
    stem, _, unit = name.rpartition("_")
    if stem and unit in _UNITS:
        name = f"{stem} ({_UNITS[unit]})"
    words = _SHORT.sub(lambda found: str(found[0]).upper(), name.replace("_", " ").replace("/", " "))
    if area and area not in ("time", "train"):
        words = f"{area.replace('_', ' ').replace('/', ', ')}: {words}"
    return words[:1].upper() + words[1:]


def shorten(text: str) -> str:
    """Returns a label for a legend. matplotlib hides labels that begin with an underscore, hence the space."""
    shown = text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"
    return f" {shown}" if shown.startswith("_") else shown


def find_restarts(run: Run) -> list[int]:
    """Returns the steps from which the run continued after an end of an earlier attempt."""
    own = (event for event in run.events if event.kind == "restored" and "/" not in (event.checkpoint or ""))
    return sorted({event.step for event in own if event.step is not None})  # another run's is where this one began


def _draw_restarts(axes: Axes, number: int, run: Run, palette: Palette) -> None:
    for place, step in enumerate(find_restarts(run)[-_MAX_RESTARTS:]):
        is_first = "resumed" not in axes.get_legend_handles_labels()[1]
        line = axes.axvline(
            step,
            color=palette.muted,
            linestyle=(0, (1, 2)),
            linewidth=1,
            label="resumed" if is_first else None,
        )
        line.set_gid(f"run-{number}-restart-{place}")


_LOSS: Final = (Line("train/loss", "training"), Line("validation/loss", "held-out", is_sparse=True))
_MEMORY: Final = (
    Line("memory/reserved_bytes", "reserved on the device", scale=_BYTES),
    Line("memory/allocated_bytes", "allocated on the device", scale=_BYTES),
    Line("memory/peak_bytes", "peak", scale=_BYTES),
    Line("memory/resident_bytes", "resident on the host", scale=_BYTES),
)
CHARTS: Final = (
    Chart("loss", "Loss by step", "nats per token", _LOSS, has_restarts=True),
    Chart("loss-tokens-seen", "Loss by tokens seen", "nats per token", _LOSS, "tokens_seen"),
    Chart("loss-tokens-updated", "Loss by tokens updated", "nats per token", _LOSS, "tokens_updated"),
    Chart(
        "bits-per-byte",
        "Bits per byte",
        "bits per byte",
        (Line("train/bits_per_byte", "training"), Line("validation/bits_per_byte", "held-out", is_sparse=True)),
        note="comparable between tokenizers",
        has_restarts=True,
    ),
    Chart("learning-rate", "Learning rate", "", (Line("optim/lr", "first group"),)),
    Chart(
        "gradient-norm",
        "Gradient norm",
        "2-norm before the clip",
        (Line("train/grad_norm", "norm"),),
        is_log=True,
        note="markers sit at the step that logged them",
        marks=(Line("gradient/spikes", "spike"), Line("counters/skips", "skipped step")),
    ),
    Chart(
        "tokens-per-second", "Tokens per second", "valid tokens/s, all ranks", (Line("train/tokens_per_second", ""),)
    ),
    Chart("mfu", "MFU", "share of the device's dense peak", (Line("train/mfu", ""),)),
    Chart("memory", "Memory", "GB", _MEMORY),
    Chart(
        "device",
        "Device",
        "share of time",
        (
            Line("device/utilisation", "busy"),
            Line("device/idle_share", "idle"),
            Line("device/throttled", "throttled"),
        ),
    ),
    Chart("power", "Power", "W", (Line("device/power_watts", ""),)),
    Chart("temperature", "Temperature", "°C", (Line("device/temperature", ""),)),
    Chart("reward", "Reward of answers", "", (Line("train/reward", "training"), Line("validation/reward", "held-out"))),
)
OPTIONAL: Final = frozenset({"bits-per-byte", "device", "power", "temperature", "reward"})
"""Charts whose absence needs no line."""


@dataclass(frozen=True)
class Drawing:
    """A chart to be drawn in any colours.

    Attributes:
        name: The name of its file, and of its place in the page.
        title: Its heading.
        note: One line below the heading.
        build: Returns the figure, in the colours of a palette.
    """

    name: str
    title: str
    note: str
    build: Callable[[Palette], Figure]


def plan_lines(runs: Sequence[Run], charts: Sequence[Chart] = CHARTS) -> tuple[list[Drawing], list[str]]:
    """Returns the charts of metrics that at least one run has, and a line for each that is left out."""
    drawings, missing = [], []
    for chart in charts:
        having = [run for run in runs if chart.is_in(run)]
        keys = ", ".join(line.key for line in chart.lines)
        if not having:
            if chart.name not in OPTIONAL:
                missing.append(f"{chart.title}: no run has logged {keys}.")
            continue
        if chart.name == "loss-tokens-updated" and not any(map(_has_skips, runs)):
            continue  # the same as by tokens seen
        lacking = [run.name for run in runs if run not in having]
        note = chart.note
        if lacking:
            note = f"{note}; " if note else ""
            note += f"not logged by {', '.join(lacking)}"
        drawings.append(Drawing(chart.name, chart.title, note, _builder(chart, runs)))
    return drawings, missing


def _has_skips(run: Run) -> bool:
    series = run.log.series.get("counters/skips")
    return series is not None and series.last is not None and series.last.value > 0


def _builder(chart: Chart, runs: Sequence[Run]) -> Callable[[Palette], Figure]:
    def build(palette: Palette) -> Figure:
        num_lines = sum(bool(chart.points(run, line)) for run in runs for line in chart.lines)
        with styled(palette):
            figure = new_figure(2.9 + 0.2 * math.ceil(num_lines / 2))
            axes = figure.add_subplot()
            chart.draw(axes, runs, palette)
            add_legend(figure, axes)
        return figure

    return build


def add_legend(figure: Figure, axes: Axes) -> None:
    """Adds a legend below the axes, if it has more than one entry with a name."""
    handles, labels = axes.get_legend_handles_labels()
    named = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label]
    if len(named) > 1 or (named and len(axes.lines) + len(axes.collections) > 1):
        figure.legend(*zip(*named, strict=True), loc="outside lower center", ncols=2)


def plan_parts(runs: Sequence[Run]) -> tuple[list[Drawing], list[str]]:
    """Returns a chart of the parts of a step for each run that has them, and a line for each other run."""
    drawings, missing = [], []
    for number, run in enumerate(runs):
        if not run.log.part_rows:
            missing.append(f"Step time by part: {run.name} has not logged {STEP_TIME}.")
            continue
        title = "Step time by part" if len(runs) == 1 else f"Step time by part: {run.name}"
        every = "" if run.log.part_stride == 1 else f"every {run.log.part_stride:,}th row; "
        note = f"{every}medians are in the table below the charts"
        drawings.append(Drawing(f"step-time-{number}", title, note, _parts_builder(run)))
    return drawings, missing


def _parts_builder(run: Run) -> Callable[[Palette], Figure]:
    rows = run.log.part_rows
    present = [place for place in range(len(ALL_PARTS)) if any(row[1 + place] for row in rows)]

    def build(palette: Palette) -> Figure:
        with styled(palette):
            figure = new_figure(3.1 + 0.2 * math.ceil(len(present) / 3))
            axes = figure.add_subplot()
            steps = [row[0] for row in rows]
            parts = [[row[1 + place] for row in rows] for place in present]
            labels = [ALL_PARTS[place].replace("_", " ") for place in present]
            colours = [palette.lines[place % len(palette.lines)] for place in present]
            if len(rows) == 1:
                bottom = 0.0
                for values, label, colour in zip(parts, labels, colours, strict=True):
                    axes.bar(steps, values, bottom=bottom, label=label, color=colour)
                    bottom += values[0]
            else:
                for area in axes.stackplot(steps, *parts, labels=labels, colors=colours, linewidth=0):
                    area.set_gid("area")
            axes.set(xlabel=_CLOCK_LABELS["step"], ylabel="ms per step")
            axes.xaxis.set_major_formatter(format_number)
            axes.margins(x=0.0)
            handles, names = axes.get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=3)
        return figure

    return build


def plan_others(runs: Sequence[Run], max_charts: int, further: Sequence[Chart] = ()) -> tuple[list[Drawing], list[str]]:
    """Returns small charts of the metrics that no other chart shows, neither those of `CHARTS` nor `further` ones."""
    shown = {line.key for chart in (*CHARTS, *further) for line in (*chart.lines, *chart.marks)}
    keys = sorted({key for run in runs for key, series in run.log.series.items() if series.last} - shown)
    keys = [key for key in keys if not key.startswith(("time/", "counters/", "data/tokens_", "data/epochs_"))]
    charts = [
        Chart(f"other-{place}", in_words(key), "", (Line(key, ""),), note=key)
        for place, key in enumerate(keys[:max_charts])
    ]
    number = len(keys) - max_charts
    left = [f"Only in metrics.csv: {numbered(number, 'further metrics')}."] if number > 0 else []
    return plan_lines(runs, charts)[0], left
