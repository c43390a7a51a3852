"""How charts look: figures of matplotlib that become SVG whose colours the page sets, or PNG.

In the SVG each colour is a variable of the page, so that one chart serves light and dark. Text stays text. Nothing in a
name is taken as a formula (`text.parse_math`), and matplotlib escapes what XML needs.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Palette(NamedTuple):
    """The colours of charts.

    Attributes:
        ink: Text.
        muted: Labels of axes.
        grid: Lines of the grid.
        good: What went well.
        bad: What went wrong.
        lines: Of runs, or of the lines of a chart where there is one run.
    """

    ink: str
    muted: str
    grid: str
    good: str
    bad: str
    lines: tuple[str, ...]

    @property
    def colours(self) -> tuple[str, ...]:
        """All colours."""
        return (*self[:5], *self.lines)


VARIABLES: Final = Palette(
    *("#01020a", "#01020b", "#01020c", "#01020d", "#01020e"), tuple(f"#0a0b{number:02x}" for number in range(1, 10))
)
"""Placeholders, which `to_svg` turns into variables of the page."""
LIGHT: Final = Palette(
    *("#1f2933", "#66727f", "#dfe4ea", "#2b8a3e", "#c92a2a"),
    ("#1c6dd0", "#d9480f", "#2b8a3e", "#9c36b5", "#0b7285", "#b08900", "#c2255c", "#5c677d", "#a0856c"),
)
DARK: Final = Palette(
    *("#e6e9ee", "#98a4b3", "#323b47", "#69db7c", "#ff8787"),
    ("#74b0ff", "#ffa066", "#7ddc8f", "#da9cf0", "#5fd0df", "#f0d060", "#ff8fb3", "#b4bfcd", "#c9b29b"),
)
_COLOUR: Final = re.compile("|".join(VARIABLES.colours))
_WIDTH_INCHES: Final = 4.7
_FONT: Final = re.compile(r"font: ([\d. a-z]*?)([\d.]+px) [^;\"]*")
_ID: Final = re.compile(r'(\bid="|href="#|url\(#)')
_RUN_ID: Final = re.compile(r'id="run-(\d+)[^"]*"')
_AXIS_ID: Final = re.compile(r'id="(area|axis|axis-label)"')
_AUTOMATIC_ID: Final = re.compile(r' id="(?:[a-zA-Z]+[a-z0-9]*_\d+)"')


def variables(palette: Palette) -> str:
    """Returns the page's variables for a palette, as CSS."""
    return ";".join(f"{variable(name)}:{value}" for name, value in zip(VARIABLES.colours, palette.colours, strict=True))


def variable(placeholder: str) -> str:
    """Returns the name of the page's variable for a placeholder."""
    return f"--c{placeholder[1:]}"


@contextmanager
def styled(palette: Palette) -> Iterator[None]:
    """Sets the parameters of matplotlib for charts in these colours, and restores them."""
    parameters: Any = {
        "axes.axisbelow": True,
        "axes.edgecolor": palette.grid,
        "axes.formatter.limits": (-3, 5),
        "axes.grid": True,
        "axes.labelcolor": palette.muted,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "font.family": "sans-serif",
        "font.size": 10.5,
        "grid.color": palette.grid,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 9.5,
        "legend.labelcolor": palette.ink,
        "lines.linewidth": 1.3,
        "svg.fonttype": "none",
        "svg.hashsalt": "genesis",
        "text.color": palette.ink,
        "text.parse_math": False,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
    }
    with matplotlib.rc_context(parameters), warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks: the browser has one.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(height_inches: float = 3.0, width_inches: float = _WIDTH_INCHES) -> Figure:
    """Returns an empty figure; a narrow one, because its text must be readable on a phone."""
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def to_svg(figure: Figure, name: str) -> str:
    """Returns an SVG element for a page.

    Its ids begin with `name`. Artists of run N have the class `run-N`, stacked areas `area`, axes `axis`,
    and labels of axes `axis-label`.
    """
    file = io.StringIO()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        axis.set_gid("axis")
        axis.label.set_gid("axis-label")
    with styled(VARIABLES):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img">', text, count=1)
    text = _AUTOMATIC_ID.sub("", _AXIS_ID.sub(r'class="\1"', _RUN_ID.sub(r'class="run-\1"', text)))
    text = _ID.sub(rf"\g<1>{name}-", text)
    text = _FONT.sub(r"font: \1\2 system-ui, sans-serif", text)
    return _COLOUR.sub(lambda found: f"var({variable(found[0])})", text)


def to_svg_file(figure: Figure) -> bytes:
    """Returns an SVG file of a figure in the colours `VARIABLES`; it follows the light or dark scheme of its reader."""
    text = to_svg(figure, "overview")
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)}; --card:#1a2028 }} }}"
    style = f"<style>:root {{ {variables(LIGHT)}; --card:#ffffff }} {dark} .ground {{ fill: var(--card) }}</style>"
    ground = '<rect class="ground" width="100%" height="100%" rx="8"/>'
    return re.sub("<svg ([^>]*)>", rf"<svg {names} \1>{style}{ground}", text, count=1).encode()


def to_png(figure: Figure, dpi: int = 110) -> bytes:
    """Returns a PNG of a figure that was drawn in the colours `LIGHT`."""
    file = io.BytesIO()
    with styled(LIGHT):
        figure.savefig(file, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return file.getvalue()
