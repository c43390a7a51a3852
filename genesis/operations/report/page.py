"""Puts the page together: one file, whose policy allows no request, and no script but the page's own by its digest."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from genesis import __version__
from genesis.base.errors import numbered
from genesis.operations.report.charts import Drawing, format_number, in_words, plan_lines, plan_others, plan_parts
from genesis.operations.report.collect import Run
from genesis.operations.report.episodes import lay_out_episodes, plan_charts, plan_rewards
from genesis.operations.report.history import list_milestones, plan_data, plan_evaluations, plan_timelines
from genesis.operations.report.log import ALL_PARTS, STEP_TIME
from genesis.operations.report.memory import plan_memory
from genesis.operations.report.plot import read_plot
from genesis.operations.report.recipes import compare_recipes
from genesis.operations.report.style import DARK, LIGHT, VARIABLES, to_svg, variable, variables
from genesis.operations.report.tiles import count_interruptions, plan_tiles
from genesis_callbacks.base.errors import printable
from genesis_callbacks.symptoms import find_symptoms, summarize_series

_MAX_OTHERS: Final = 24
_MAX_EVENTS: Final = 30


@dataclass(frozen=True)
class Section:
    """Charts below one heading.

    Attributes:
        title: The heading.
        drawings: The charts.
        missing: A line for each chart that is left out.
        is_closed: Whether the reader opens it first.
    """

    title: str
    drawings: Sequence[Drawing]
    missing: Sequence[str] = ()
    is_closed: bool = False


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        title: The heading.
        columns: Names of the columns.
        rows: The cells.
        numbers: Places of the columns with numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = field(default_factory=tuple)


def plan_sections(runs: Sequence[Run]) -> list[Section]:
    """Returns the charts of a report in their order."""
    lines, missing = plan_lines(runs)
    parts, no_parts = plan_parts(runs)
    memory, no_plan = plan_memory(runs)
    timelines, no_events = plan_timelines(runs)
    data, no_data = plan_data(runs)
    evaluations, no_evaluations = plan_evaluations(runs)
    others, left = plan_others(runs, _MAX_OTHERS, plan_charts(runs))
    return [
        Section("Training", [*lines, *memory, *parts], [*missing, *no_plan, *no_parts]),
        Section("Rewards and answers", plan_rewards(runs)),
        Section("Checkpoints, crashes and restarts", timelines, no_events),
        Section("Data", data, no_data),
        Section("Evaluations", evaluations, no_evaluations),
        Section("Other metrics", others, left, is_closed=True),
    ]


def render_page(runs: Sequence[Run], sections: Sequence[Section], written_seconds: float) -> str:
    """Returns the page.

    Args:
        runs: The runs.
        sections: The charts, of `plan_sections`.
        written_seconds: Unix time that the page shows as that of its writing.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    files = resources.files(__package__)
    template = environment.from_string(files.joinpath("page.html.j2").read_text("utf-8"))
    script = files.joinpath("page.js").read_text("utf-8")
    names = [run.name for run in runs]
    title = runs[0].name if len(runs) == 1 else f"{numbered(len(runs), 'runs')}"
    return template.render(
        title=title,
        written=_format_time(written_seconds),
        version=__version__,
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        is_live=any(run.summary.state == "training" for run in runs),
        light=Markup(variables(LIGHT)),
        dark=Markup(variables(DARK)),
        ink=variable(VARIABLES.ink),
        muted=variable(VARIABLES.muted),
        grid=variable(VARIABLES.grid),
        bad=variable(VARIABLES.bad),
        runs=[_describe(number, run) for number, run in enumerate(runs)],
        symptoms=[row for run in runs for row in _list_symptoms(run)],
        tiles=plan_tiles(runs[0]) if len(runs) == 1 else [],
        sections=[_draw(section, names) for section in sections],
        tables=_build_tables(runs),
        episodes=lay_out_episodes(runs),
        notes=[note if len(runs) == 1 else f"{run.name}: {note}" for run in runs for note in run.notes],
    )


def _draw(section: Section, names: Sequence[str]) -> dict[str, Any]:
    charts = [_draw_chart(drawing, names) for drawing in section.drawings]
    return {"title": section.title, "charts": charts, "missing": section.missing, "is_closed": section.is_closed}


def _draw_chart(drawing: Drawing, names: Sequence[str]) -> dict[str, Any]:
    figure = drawing.build(VARIABLES)
    # matplotlib has escaped all texts of the chart.
    svg = Markup(to_svg(figure, drawing.name))
    plot = read_plot(figure, names)
    return {
        "name": drawing.name,
        "title": drawing.title,
        "note": drawing.note,
        "svg": svg,
        "plot": "" if plot is None else json.dumps(plot, ensure_ascii=False, separators=(",", ":")),
    }


def _describe(number: int, run: Run) -> dict[str, Any]:
    summary = run.summary
    return {
        "name": run.name,
        "recipe_line": summary.recipe,
        "state": summary.state,
        "step": "" if summary.step is None else f"{summary.step:,}",
        "tokens": "" if summary.tokens is None else f"{summary.tokens:,}",
        "loss": "" if summary.loss is None else f"{summary.loss:.4f}",
        "interruptions": count_interruptions(run).value,
        "saved": str(summary.num_checkpoints),
        "colour": variable(VARIABLES.lines[number]),
        "samples": run.samples,
        "recipe": run.recipe,
    }


def _list_symptoms(run: Run) -> list[dict[str, str]]:
    return [
        {
            "run": run.name,
            "text": symptom.text,
            "condition": "; ".join(condition.text for condition in symptom.conditions),
            "bottleneck": symptom.bottleneck,
            "remedies": "; ".join(symptom.remedies),
        }
        for symptom in find_symptoms(summarize_series(run.log.sample()))
    ]


def _build_tables(runs: Sequence[Run]) -> list[Table]:
    medians = [summarize_series(run.log.sample()) for run in runs]
    names = [run.name for run in runs]
    columns = tuple(range(1, 1 + len(runs)))
    keys = [STEP_TIME, *(f"time/{part}_ms" for part in ALL_PARTS), "train/tokens_per_second", "train/mfu"]
    keys += sorted({key for each in medians for key in each if key.startswith(("parallel/", "communication/"))})
    speed = [
        [in_words(key), *("" if key not in each else format_number(each[key]) for each in medians)]
        for key in keys
        if any(key in each for each in medians)
    ]
    several = len(runs) > 1
    events = [
        [
            *([run.name] if several else []),
            _format_time(event.time_seconds),
            event.kind,
            "" if event.step is None else f"{event.step:,}",
            event.checkpoint or "",
            printable(event.text)[:200],
        ]
        for run in runs
        for event in list_milestones(run, _MAX_EVENTS)
    ]
    crashes = [
        [
            *([run.name] if several else []),
            _format_time(crash.time_seconds),
            crash.end_class,
            "" if crash.step is None else f"{crash.step:,}",
            "" if crash.rank is None else str(crash.rank),
            printable(crash.action)[:200],
            printable(crash.reason)[:200],
        ]
        for run in runs
        for crash in run.crashes[-_MAX_EVENTS:]
    ]
    first = ["run"] if several else []
    return [
        Table("Medians of speed", ["metric", *names], speed, columns),
        Table(
            f"Events (the newest {_MAX_EVENTS})", [*first, "time (UTC)", "event", "step", "checkpoint", "text"], events
        ),
        Table("Crashes", [*first, "time (UTC)", "class", "step", "rank", "action", "reason"], crashes),
        Table("Settings that differ", ["setting", *names], compare_recipes(runs) if several else []),
    ]


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
