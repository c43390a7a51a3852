"""The demo's picture, from the log of a run."""

from pathlib import Path

import pytest

from genesis.operations.demo.plot import KILL, RESUME, TRAINING, plot_loss, read_curve
from tests.operations.demo.picture import Picture, check_picture

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


def write_log(path: Path, num_steps: int) -> Path:
    rows = [f"{n},{2 + 6 * 0.9**n},{2.2 + 6 * 0.9**n if n % 10 == 0 else ''}" for n in range(1, num_steps + 1)]
    path.write_text("\n".join(["step,train/bits_per_byte,validation/bits_per_byte", *rows]) + "\n")
    return path


def test_the_picture_shows_both_curves_the_kill_and_the_resume(tmp_path: Path) -> None:
    metrics = write_log(tmp_path / "metrics.csv", 60)
    plot_loss(metrics, tmp_path / "loss.png", 33, 27)
    check_picture(tmp_path / "loss.png", metrics, killed_at_step=33, resumed_from_step=27)


def test_the_check_of_a_picture_sees_what_is_missing_or_misplaced(tmp_path: Path) -> None:
    metrics, png = write_log(tmp_path / "metrics.csv", 60), tmp_path / "loss.png"
    plot_loss(metrics, png)
    without = Picture(png, metrics)
    assert without.share_of_upright(KILL, 33) < 0.1
    assert without.share_of_upright(RESUME, 27) < 0.1
    plot_loss(metrics, png, 45, 27)
    assert Picture(png, metrics, 45, 27).share_of_upright(KILL, 33) < 0.1
    with pytest.raises(AssertionError):
        check_picture(png, metrics, killed_at_step=33, resumed_from_step=27)
    flat = tmp_path / "flat.csv"
    flat.write_text(metrics.read_text().splitlines()[0] + "".join(f"\n{n},4.0,4.0" for n in range(1, 61)) + "\n")
    plot_loss(flat, png, 33, 27)
    assert Picture(png, metrics, 33, 27).shares(TRAINING, "train/bits_per_byte") < 0.5
    with pytest.raises(AssertionError):
        check_picture(png, flat, killed_at_step=33, resumed_from_step=27)


def test_a_picture_of_an_empty_log_can_be_drawn(tmp_path: Path) -> None:
    plot_loss(write_log(tmp_path / "metrics.csv", 0), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
