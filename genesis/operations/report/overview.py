"""One picture of a run's main charts, for a README or a message."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from genesis.operations.report.charts import CHARTS
from genesis.operations.report.collect import Run
from genesis.operations.report.history import draw_timeline
from genesis.operations.report.style import Palette, new_figure, styled

_MAIN = ("bits-per-byte", "loss", "gradient-norm", "tokens-per-second", "learning-rate")


def build_overview(runs: Sequence[Run], palette: Palette) -> Figure:
    """Returns loss, gradient norm and speed of the runs, and the timeline of the first one."""
    charts = [chart for chart in CHARTS if chart.name in _MAIN and any(chart.is_in(run) for run in runs)]
    charts = sorted(charts, key=lambda chart: _MAIN.index(chart.name))
    charts = [chart for chart in charts if chart.name != "loss" or charts[0] is chart][:3]
    has_timeline = bool(runs[0].events)
    num_panels = max(1, len(charts) + has_timeline)
    with styled(palette):
        figure = new_figure(3.0 * -(-num_panels // 2), 10.0)
        for place, chart in enumerate(charts):
            axes = figure.add_subplot(-(-num_panels // 2), 2, place + 1)
            chart.draw(axes, runs, palette)
            axes.set_title(chart.title, fontsize=11)
            if any(label for label in axes.get_legend_handles_labels()[1]):
                axes.legend(loc="best")
        if has_timeline:
            axes = figure.add_subplot(-(-num_panels // 2), 2, num_panels)
            draw_timeline(axes, runs[0], palette)
            axes.set_title("Checkpoints and crashes", fontsize=11)
    return figure
