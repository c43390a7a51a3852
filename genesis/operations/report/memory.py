"""The chart of a run's memory against the plan of its recipe (`genesis.operations.plan`)."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import yaml
from matplotlib.figure import Figure

from genesis.operations.plan.bill import PHASES
from genesis.operations.plan.recipe import Recipe, read_recipe
from genesis.operations.plan.timeline import Timeline, play_step
from genesis.operations.report.charts import Drawing
from genesis.operations.report.collect import Run
from genesis.operations.report.runs import parse_recipe
from genesis.operations.report.style import Palette, new_figure, styled
from genesis.recipe.resolved import ResolvedRecipe
from genesis_callbacks.base.errors import printable

_GB: Final = 1e9
_MAX_LAYERS: Final = 1000
_MAX_REASON: Final = 300
_MEASURED: Final = "memory/peak_bytes"
_DEVICE: Final = "memory/reserved_bytes"


def plan_memory(runs: Sequence[Run]) -> tuple[list[Drawing], list[str]]:
    """Returns a chart of the planned memory for each run with a recipe, and a line for each other run."""
    drawings, missing = [], []
    for number, run in enumerate(runs):
        title = "Memory against the plan" if len(runs) == 1 else f"Memory against the plan: {run.name}"
        try:
            recipe = read_run_recipe(run)
            timeline = play_step(recipe.workload, recipe.layout)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, yaml.YAMLError) as error:
            missing.append(f"{title}: no plan of config.yaml: {printable(str(error))[:_MAX_REASON]}")
            continue
        series = run.log.series.get(_MEASURED)
        measured = None if series is None else max((point.value for point in series.points), default=None)
        drawings.append(Drawing(f"memory-plan-{number}", title, _describe(run, measured), _builder(timeline, measured)))
    return drawings, missing


def read_run_recipe(run: Run) -> Recipe:
    """Returns the recipe of a run, as `genesis plan` reads it.

    Raises:
        ValueError: There is no recipe; any error of Python where the file holds something else than a recipe.
    """
    content: Any = parse_recipe(run.recipe.encode()) if run.recipe else None
    if not isinstance(content, dict):
        raise ValueError("there is no recipe")
    layers = content["model"]["decoder"]["num_layers"]
    if not isinstance(layers, int) or not 0 < layers <= _MAX_LAYERS:
        raise ValueError(f"num_layers is {layers!r}")
    return read_recipe(ResolvedRecipe.complete(content, "config.yaml"))


def _describe(run: Run, measured: float | None) -> str:
    bars = "planned tensors of a rank's device at the highest point of each phase"
    if measured is None:
        return f"{bars}; {_MEASURED} was not logged"
    if _DEVICE not in run.log.series:
        return f"{bars}; the line is the peak of the whole process on the CPU, with Python and its libraries"
    return f"{bars}; the line is the measured peak of rank 0"


def _builder(timeline: Timeline, measured: float | None) -> Callable[[Palette], Figure]:
    phases = [phase for phase in PHASES if phase in timeline.peaks]
    totals: dict[str, int] = {}
    for terms in timeline.peaks.values():
        for term, num_bytes in terms.items():
            totals[term] = max(totals.get(term, 0), num_bytes)
    shown = sorted((term for term in totals if totals[term]), key=lambda term: -totals[term])

    def build(palette: Palette) -> Figure:
        with styled(palette):
            figure = new_figure(3.0 + 0.2 * math.ceil((1 + len(shown)) / 2))
            axes = figure.add_subplot()
            bottoms = [0.0] * len(phases)
            for place, term in enumerate(shown):
                heights = [timeline.peaks[phase].get(term, 0) / _GB for phase in phases]
                axes.bar(phases, heights, 0.7, bottoms, label=term, color=palette.lines[place % len(palette.lines)])
                bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
            if measured is not None:
                axes.axhline(measured / _GB, color=palette.bad, linestyle="--", linewidth=1.4, label="measured peak")
            axes.set(ylabel="GB")
            axes.grid(visible=False, axis="x")
            figure.legend(loc="outside lower center", ncols=2)
        return figure

    return build
