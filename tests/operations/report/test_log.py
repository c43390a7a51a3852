"""The log of a run: torn, repeated, damaged, long, or none at all."""

import tracemalloc
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.operations.report import log as log_module
from genesis.operations.report.log import RunLog, read_log
from tests.operations.report.runs import KEYS, row_of, write_log


def losses(log: RunLog) -> dict[int, float]:
    return {int(point.step): point.value for point in log.series["train/loss"].points}


def test_a_line_that_a_kill_has_torn_is_no_row(tmp_path: Path) -> None:
    whole = read_log(write_log(tmp_path / "a", [row_of(1), row_of(2)]))
    for cut in (1, 5, 40):
        torn = read_log(write_log(tmp_path / "b", [row_of(1), row_of(2), row_of(3)[:-cut]], end=""))
        assert losses(torn) == losses(whole)
        assert torn.notes == []


def test_a_torn_line_in_the_middle_is_left_out_and_counted(tmp_path: Path) -> None:
    log = read_log(write_log(tmp_path, [row_of(1), row_of(2)[:9] + row_of(3), "x" + row_of(4), row_of(5)]))
    assert list(losses(log)) == [1, 5]
    assert log.notes == ["Left out: 2 damaged lines."]


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([1, 2, 3, 4, 3, 4, 5], [0, 1, 4, 5, 6]),
        ([1, 2, 3, 4, 5, 3, 4, 2, 3, 4], [0, 7, 8, 9]),
        ([1, 2, 3, 2, 5, 4, 6], [0, 3, 5, 6]),
        ([4, 3, 2, 1], [3]),
    ],
)
def test_the_later_rows_of_repeated_steps_win(tmp_path: Path, steps: list[int], kept: list[int]) -> None:
    rows = [row_of(step, **{"train/loss": str(100 + place)}) for place, step in enumerate(steps)]
    log = read_log(write_log(tmp_path, rows))
    assert losses(log) == {steps[place]: 100.0 + place for place in kept}
    assert log.notes == [f"Left out: {len(steps) - len(kept)} rows whose steps a resumed run logged again."]


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    log = read_log(
        write_log(tmp_path, [row_of(1), row_of(2, **{"train/loss": "nan"}), row_of(3, **{"train/loss": "inf"})])
    )
    assert list(losses(log)) == [1]
    assert log.notes == ["train/loss: 2 values infinite or not a number."]


def test_a_quoted_column_with_a_comma_does_not_shift_the_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text('step,"data/tokens_a,b",train/loss\n1,5,2.5\n"2",6,"1.5"\n')
    log = read_log(path)
    assert losses(log) == {1: 2.5, 2: 1.5}
    assert log.series["data/tokens_a,b"].last is not None


def test_a_log_that_has_only_begun_has_no_series(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for text in ("", "step,train/lo"):
        path.write_text(text)
        assert read_log(path).notes == ["The log has no complete row yet."]


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no column 'step'"):
        read_log(path)
    path.write_bytes(b"x" * (2 << 20))
    with pytest.raises(UserError, match="its first line has more than"):
        read_log(path)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    def measure(num_rows: int) -> int:
        path = write_log(tmp_path, [row_of(step) for step in range(1, num_rows + 1)])
        tracemalloc.start()
        read_log(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert measure(6_000) < 1.3 * measure(2_500)


def test_a_long_log_keeps_its_spike_and_says_how_it_was_thinned(tmp_path: Path) -> None:
    rows = [row_of(step, **({"train/loss": "99.5"} if step == 777 else {})) for step in range(1, 3001)]
    log = read_log(write_log(tmp_path, rows))
    assert losses(log)[777] == 99.5
    assert log.notes[0].startswith("thinned: 3,000 rows (0.")
    assert "of which the lowest and highest of each 8 values are drawn" in log.notes[0]
    assert len(log.part_rows) <= 600
    assert log.part_stride == 8


def test_a_line_without_end_of_any_length_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_MAX_LINE_BYTES", 1 << 12)
    path = write_log(tmp_path, [row_of(1), "9" * 50_000, row_of(2)])
    assert list(losses(read_log(path))) == [1, 2]
    path.write_text(",".join(KEYS) + "\n" + row_of(1) + "\n" + "9" * 50_000)
    assert list(losses(read_log(path))) == [1]
