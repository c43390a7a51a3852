"""What is seen of a training from outside is what that training did, not one before it."""

from pathlib import Path

import pytest

from genesis.operations.rehearse.watch import RunView
from genesis_callbacks.base.events import EventLog

HEADER = "step,train/loss\n"


def write_log(run_dir: Path, text: str) -> None:
    # As the log itself is replaced when a training begins to write.
    staging = run_dir / "metrics.csv.staging"
    staging.write_text(HEADER + text)
    staging.replace(run_dir / "metrics.csv")


def append(run_dir: Path, text: str) -> None:
    with (run_dir / "metrics.csv").open("a") as file:
        file.write(text)


def test_the_last_step_is_that_of_the_last_whole_row(tmp_path: Path) -> None:
    view = RunView(tmp_path)
    assert view.look().last_step is None
    write_log(tmp_path, "")
    assert view.look().last_step is None
    append(tmp_path, "1,5.0\n2,4.0\n")
    assert view.look().last_step == 2
    append(tmp_path, "3,4")
    assert view.look().last_step == 2
    append(tmp_path, ".5\n")
    assert view.look().last_step == 3


def test_rows_that_come_late_for_an_earlier_step_do_not_turn_it_back(tmp_path: Path) -> None:
    view = RunView(tmp_path)
    write_log(tmp_path, "1,5.0\n2,4.0\n3,3.0\n2,\n")
    assert view.look().last_step == 3
    # The last row is being written again.
    write_log(tmp_path, "1,5.0\n2,4.0\n3")
    assert view.look().last_step == 3


def test_what_a_training_before_has_logged_does_not_count(tmp_path: Path) -> None:
    write_log(tmp_path, "1,5.0\n2,4.0\n3,3.0\n")
    view = RunView(tmp_path)
    assert view.look().last_step is None
    assert view.first_step_seconds is None
    write_log(tmp_path, "1,5.0\n2,4.0\n")
    assert view.look().last_step == 2
    assert view.first_step_seconds is not None


def test_the_last_step_of_a_long_log_is_found(tmp_path: Path) -> None:
    view = RunView(tmp_path)
    write_log(tmp_path, "".join(f"{step},{step}.5\n" for step in range(1, 20_001)))
    assert view.look().last_step == 20_000


def test_saves_in_flight_are_seen_and_committed_ones_are_not(tmp_path: Path) -> None:
    view = RunView(tmp_path)
    assert view.look().staging == ()
    for name in ("step-00000010", "step-00000020.staging-ab12_1", ".trash"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert view.look().staging == ("step-00000020.staging-ab12_1",)


def test_the_pace_is_what_was_seen(tmp_path: Path) -> None:
    view = RunView(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    write_log(tmp_path, "1,5.0\n")
    begin = view.look().seconds
    for step in (2, 3, 4):
        append(tmp_path, f"{step},4.0\n")
        (tmp_path / "checkpoints" / f"step-0000000{step}.staging-a_1").mkdir()
        end = view.look().seconds
    view.look()
    pace, gaps = view.measure_pace(), view.seconds_by_step
    assert pace.start == begin
    assert list(gaps) == [1, 2, 3]
    assert sum(gaps.values()) == pytest.approx(end - begin)
    assert (pace.step, pace.slowest) == (sorted(gaps.values())[1], max(gaps.values()))
    assert pace.save > 0


def test_the_restored_step_is_that_of_the_event_since_the_launch(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    log.write("started")
    log.write("restored", step=10)
    view = RunView(tmp_path)
    view.look()
    assert (view.has_started, view.restored_step) == (False, None)
    EventLog(tmp_path, 1).write("started")
    log.write("saved", step=30)
    view.look()
    assert (view.has_started, view.restored_step) == (True, None)
    log.write("restored", step=20)
    view.look()
    assert (view.has_started, view.restored_step) == (True, 20)
