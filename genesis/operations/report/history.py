"""Charts of what happened: attempts, checkpoints and crashes over time; data by source; evaluations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from genesis.base.errors import numbered
from genesis.evaluate.table import BITS, select_shown
from genesis.operations.report.charts import Drawing, add_legend, format_number, shorten
from genesis.operations.report.collect import Run
from genesis.operations.report.style import Palette, new_figure, styled
from genesis_callbacks.base.events import Event

_MAX_MARKS: Final = 400
_MAX_EVALUATIONS: Final = 12
_MAX_SOURCES: Final = 30
_ROWS: Final = ("crashed", "quarantined", "verified", "saved", "validated", "attempts")
_ENDS: Final = ("ended", "failed")


@dataclass(frozen=True)
class Attempt:
    """A fit from its start to its end, by the clock of rank 0.

    Attributes:
        begin_seconds: Unix time of the start.
        end_seconds: Unix time of the last sign of it.
        end: "ended", "failed", "killed", or "open" for the last attempt of a run that trains.
        text: The reason of the end.
    """

    begin_seconds: float
    end_seconds: float
    end: str
    text: str = ""


def find_attempts(run: Run) -> list[Attempt]:
    """Returns the attempts of a run. A start without an end of its own was killed."""
    attempts: list[Attempt] = []
    begin: float | None = None
    last = 0.0
    for event in run.events:
        if event.rank != 0:
            continue
        if event.kind == "started":
            if begin is not None:
                attempts.append(Attempt(begin, last, "killed"))
            begin = event.time_seconds
        elif begin is not None and event.kind in _ENDS and not (event.kind == "failed" and event.checkpoint):
            attempts.append(Attempt(begin, event.time_seconds, event.kind, event.text))
            begin = None
        last = event.time_seconds
    if begin is not None:
        is_live = run.summary.state in ("training", "waiting")
        attempts.append(Attempt(begin, last, "open" if is_live else "killed"))
    return attempts


def plan_timelines(runs: Sequence[Run]) -> tuple[list[Drawing], list[str]]:
    """Returns a timeline for each run with events, and a line for each other run."""
    drawings, missing = [], []
    for number, run in enumerate(runs):
        if not run.events:
            missing.append(f"Timeline: {run.name} has no events.")
            continue
        title = "Checkpoints and crashes" if len(runs) == 1 else f"Checkpoints and crashes: {run.name}"
        note = f"only every n-th mark is drawn, at most {_MAX_MARKS} of a kind" if _is_crowded(run) else ""
        drawings.append(Drawing(f"timeline-{number}", title, note, _timeline_builder(run)))
    return drawings, missing


def _is_crowded(run: Run) -> bool:
    return any(sum(event.kind == kind for event in run.events) > _MAX_MARKS for kind in _ROWS)


def _thin(times: Sequence[float]) -> list[float]:
    return list(times[:: -(-len(times) // _MAX_MARKS)]) if times else []


def _timeline_builder(run: Run) -> Callable[[Palette], Figure]:
    def build(palette: Palette) -> Figure:
        with styled(palette):
            figure = new_figure(2.7)
            draw_timeline(figure.add_subplot(), run, palette)
        return figure

    return build


def draw_timeline(axes: Axes, run: Run, palette: Palette) -> None:
    """Draws attempts as bars, and what happened to checkpoints as marks, over the time since the first event."""
    first = min(event.time_seconds for event in run.events)
    span = max(event.time_seconds for event in run.events) - first
    unit, divisor = ("hours", 3600.0) if span > 7200 else ("minutes", 60.0)
    looks = {
        "crashed": (palette.bad, "X"),
        "quarantined": (palette.bad, "s"),
        "verified": (palette.good, "o"),
        "saved": (palette.lines[0], "o"),
        "validated": (palette.lines[3], "D"),
    }
    for row, kind in enumerate(_ROWS[:-1]):
        times = [(seconds - first) / divisor for seconds in _thin(_times(run, kind))]
        colour, marker = looks[kind]
        if times:
            axes.scatter(times, [row] * len(times), color=colour, marker=marker, s=20, label=kind)
    top = len(_ROWS) - 1
    for attempt in find_attempts(run)[-_MAX_MARKS:]:
        begin, end = ((seconds - first) / divisor for seconds in (attempt.begin_seconds, attempt.end_seconds))
        axes.plot([begin, end], [top, top], color=palette.lines[0], linewidth=6, solid_capstyle="butt", alpha=0.75)
        if attempt.end in ("killed", "failed"):
            axes.scatter([end], [top], color=palette.bad, marker="X", s=48, zorder=3)
            axes.annotate(
                *(attempt.end, (end, top), (0, 8)),
                textcoords="offset points",
                color=palette.bad,
                fontsize=9,
                ha="center",
            )
    axes.set_yticks(range(len(_ROWS)), _ROWS)
    axes.set_ylim(-0.6, top + 0.9)
    axes.set(xlabel=f"{unit} since the first event")


def _times(run: Run, kind: str) -> list[float]:
    times = [event.time_seconds for event in run.events if event.kind == kind]
    if kind == "crashed" and not times:
        return [crash.time_seconds for crash in run.crashes]
    return times


def plan_data(runs: Sequence[Run]) -> tuple[list[Drawing], list[str]]:
    """Returns the chart of tokens by source, or the line in its place."""
    prefix = "data/tokens_"
    used = [
        {
            key.removeprefix(prefix): series.last.value
            for key, series in run.log.series.items()
            if key.startswith(prefix) and key != "data/tokens_per_second" and series.last is not None
        }
        for run in runs
    ]
    sources = sorted({source for tokens in used for source in tokens})
    if not sources:
        return [], ["Data by source: no run has logged data/tokens_SOURCE."]
    note = f"the first {_MAX_SOURCES:,} of {numbered(len(sources), 'sources')}" if len(sources) > _MAX_SOURCES else ""
    sources = sources[:_MAX_SOURCES]

    def build(palette: Palette) -> Figure:
        with styled(palette):
            figure = new_figure(1.4 + 0.3 * len(sources) * max(1.0, 0.6 * len(runs)))
            axes = figure.add_subplot()
            height = 0.8 / len(runs)
            for number, (run, tokens) in enumerate(zip(runs, used, strict=True)):
                places = [place + (number - (len(runs) - 1) / 2) * height for place in range(len(sources))]
                bars = axes.barh(
                    places,
                    [tokens.get(source, 0.0) for source in sources],
                    height * 0.9,
                    color=palette.lines[number],
                    label=shorten(run.name),
                )
                axes.bar_label(bars, fmt=format_number, padding=3, fontsize=9)
                for place, bar in enumerate(bars):
                    bar.set_gid(f"run-{number}-{place}")
            axes.set_yticks(range(len(sources)), [source[:28] for source in sources])
            axes.invert_yaxis()
            axes.xaxis.set_major_formatter(format_number)
            axes.margins(x=0.12)
            axes.set(xlabel="tokens consumed, without padding")
            if len(runs) > 1:
                figure.legend(loc="outside lower center", ncols=2)
        return figure

    return [Drawing("data", "Data by source", note, build)], []


def plan_evaluations(runs: Sequence[Run]) -> tuple[list[Drawing], list[str]]:
    """Returns a chart for each evaluated measure, or the line in their place."""
    lines: dict[str, dict[int, list[tuple[int, float, float]]]] = {}
    for number, run in enumerate(runs):
        for result, measure in select_shown(run.results):
            if measure.value is not None:
                metric = "bits per byte" if measure.metric == BITS else measure.metric
                points = lines.setdefault(f"{measure.subject}: {metric}", {}).setdefault(number, [])
                points.append((result.step, measure.value, measure.stderr or 0.0))
    if not lines:
        return [], ["Evaluations: there are none; `genesis evaluate RUN` makes them."]
    left = [f"Only in evaluations/metrics.csv: {numbered(len(lines) - _MAX_EVALUATIONS, 'further measures')}."]
    drawings = [
        Drawing(f"evaluation-{place}", title, "bars are standard errors", _evaluation_builder(points, runs))
        for place, (title, points) in enumerate(list(lines.items())[:_MAX_EVALUATIONS])
    ]
    return drawings, left if len(lines) > _MAX_EVALUATIONS else []


def _evaluation_builder(
    points: dict[int, list[tuple[int, float, float]]], runs: Sequence[Run]
) -> Callable[[Palette], Figure]:
    def build(palette: Palette) -> Figure:
        with styled(palette):
            figure = new_figure()
            axes = figure.add_subplot()
            for number, found in points.items():
                steps, values, errors = zip(*sorted(found), strict=True)
                drawn = axes.errorbar(
                    steps,
                    values,
                    yerr=errors,
                    color=palette.lines[number],
                    marker="o",
                    markersize=4,
                    label=shorten(runs[number].name),
                )
                for place, artist in enumerate(drawn.get_children()):
                    artist.set_gid(f"run-{number}-{place}")
            axes.set(xlabel="step")
            if len(points) > 1:
                add_legend(figure, axes)
        return figure

    return build


def list_milestones(run: Run, limit: int) -> list[Event]:
    """Returns the newest events that a reader looks for: ends, crashes, restores, quarantined and failed saves."""
    kinds = (
        *("started", "restored", "quarantined", "nonfinite_gradient", "failed", "hang", "ended"),
        *("crashed", "preempted", "recovered", "stopped", "completed"),
    )
    # Every rank records its start and its end; one of them is enough.
    found = [event for event in run.events if event.kind in kinds]
    return [event for event in found if event.rank in (0, None) or event.kind in ("nonfinite_gradient", "hang")][
        -limit:
    ]
