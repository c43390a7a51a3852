"""What a picture of the loss really shows: its pixels are compared with the log that it was made from."""

from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from genesis.operations.demo.plot import HELD_OUT, KILL, RESUME, TRAINING, build_figure, read_curve

TOLERANCE = 0.2
"""Of a colour's components: lines are smoothed at their edges."""


class Picture:
    """The decoded pixels of `path`, and where the figure of `metrics` puts the data."""

    def __init__(self, path: Path, metrics: Path, *marks: int) -> None:
        self.pixels = np.asarray(imread(path))[..., :3]
        self.metrics = metrics
        figure = build_figure(metrics, *marks)
        figure.canvas.draw()
        (self.axes,) = figure.axes
        assert self.pixels.shape[:2] == tuple(reversed(figure.canvas.get_width_height()))
        legend = self.axes.get_legend()
        assert legend is not None
        self.legend = legend.get_window_extent()
        self.frame = self.axes.get_window_extent()

    def has(self, colour: str, x: float, y: float, reach: int = 2) -> bool:
        """Returns whether a pixel near the point (x, y) of the data has `colour`."""
        column, row = self.axes.transData.transform((x, y))
        row = self.pixels.shape[0] - row
        near = self.pixels[
            max(0, round(row) - reach) : round(row) + reach + 1,
            max(0, round(column) - reach) : round(column) + reach + 1,
        ]
        return bool((np.abs(near - to_rgb(colour)).max(axis=-1) < TOLERANCE).any())

    def is_under_legend(self, x: float, y: float) -> bool:
        """Returns whether the legend covers that point."""
        return bool(self.legend.padded(4).contains(*self.axes.transData.transform((x, y))))

    def shares(self, colour: str, column: str) -> float:
        """Returns the share of the points of a column of the log that the picture shows in `colour`."""
        points = list(zip(*read_curve(self.metrics, "step", column), strict=True))
        seen = [self.has(colour, *point) for point in points if not self.is_under_legend(*point)]
        assert seen, column
        return sum(seen) / len(seen)

    def share_of_upright(self, colour: str, x: float) -> float:
        """Returns the share of heights at `x` that have `colour`: about half where a dashed or dotted line stands."""
        low, high = self.axes.get_ylim()
        heights = [y for y in np.linspace(low, high, 200)[4:-4] if not self.is_under_legend(x, float(y))]
        return sum(self.has(colour, x, float(y), reach=1) for y in heights) / len(heights)


def check_picture(path: Path, metrics: Path, killed_at_step: int, resumed_from_step: int) -> None:
    """Checks that both curves, the kill and the resume are where the log has them, and that the loss falls."""
    picture = Picture(path, metrics, killed_at_step, resumed_from_step)
    assert picture.shares(TRAINING, "train/bits_per_byte") > 0.9
    assert picture.shares(HELD_OUT, "validation/bits_per_byte") > 0.9
    assert picture.share_of_upright(KILL, killed_at_step) > 0.3
    assert picture.share_of_upright(RESUME, resumed_from_step) > 0.2
    steps, losses = read_curve(metrics, "step", "train/bits_per_byte")
    third = len(losses) // 3
    assert np.mean(losses[-third:]) < np.mean(losses[:third]) - 0.5
    # By the pixels alone: on the left of the picture the curve stands higher than on the right.
    blue = (np.abs(picture.pixels - to_rgb(TRAINING)).max(axis=-1) < TOLERANCE).nonzero()
    rows, columns = (axis[_is_outside(picture, *blue)] for axis in blue)
    middle = (columns.min() + columns.max()) / 2
    assert rows[columns < middle].mean() < rows[columns > middle].mean()
    assert steps == sorted(steps)


def _is_outside(picture: Picture, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns which pixels are not the legend's."""
    box = picture.legend.padded(4)
    upright = picture.pixels.shape[0] - rows
    return ~((columns >= box.x0) & (columns <= box.x1) & (upright >= box.y0) & (upright <= box.y1))
