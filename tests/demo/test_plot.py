"""The demo's picture, from the log of a run."""

from pathlib import Path

import pytest

from genesis.demo.plot import plot_loss, read_curve

PNG = b"\x89PNG\r\n\x1a\n"
LOG = """step,train/bits_per_byte,validation/bits_per_byte
5,4.5,
10,3.5,3.75
15,2.5,
20,2.25,2.5
"""


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.csv"
    path.write_text(LOG)
    return path


def test_a_curve_has_the_rows_that_have_both(metrics: Path) -> None:
    assert read_curve(metrics, "step", "train/bits_per_byte") == ([5, 10, 15, 20], [4.5, 3.5, 2.5, 2.25])
    assert read_curve(metrics, "step", "validation/bits_per_byte") == ([10, 20], [3.75, 2.5])


def test_a_column_that_was_never_logged_is_an_empty_curve(metrics: Path) -> None:
    assert read_curve(metrics, "step", "train/loss") == ([], [])


def test_a_row_torn_by_a_kill_is_no_point(metrics: Path) -> None:
    metrics.write_text(LOG + "25")
    assert read_curve(metrics, "step", "train/bits_per_byte")[0] == [5, 10, 15, 20]


@pytest.mark.parametrize("marks", [(), (17, 15)])
def test_the_picture_is_a_png(metrics: Path, tmp_path: Path, marks: tuple[int, ...]) -> None:
    plot_loss(metrics, tmp_path / "loss.png", *marks)
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
