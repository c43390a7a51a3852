"""What the command line calls a checkpoint is found the same way by every command."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.generate.checkpoint_reference import find_checkpoint, find_export, find_run, read_reference
from genesis_callbacks.checkpoint.best import Measured, mark_best

NAMES = {step: f"step-{step:08d}" for step in (1, 2, 3)}


@pytest.fixture
def home(own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: it has `runs/demo` with three checkpoints, of which the second is the best."""
    home = tmp_path / "home"
    shutil.move(own_run, home / "runs/demo")
    mark_best(home / "runs/demo/checkpoints", (Measured(2, 1.0),), "loss", "min", count=1)
    monkeypatch.chdir(home)
    return home


@pytest.mark.parametrize(
    ("value", "step"),
    [
        ("demo", 3),
        ("runs/demo", 3),
        ("./runs/demo", 3),
        ("runs/demo/checkpoints", 3),
        ("demo/latest", 3),
        ("demo/checkpoints/latest", 3),
        ("demo/best", 2),
        ("runs/demo/best", 2),
        ("demo/1", 1),
        ("demo/step-00000001", 1),
        ("runs/demo/checkpoints/step-00000002", 2),
        ("demo/checkpoints/step-00000002", 2),
    ],
)
def test_a_checkpoint_is_found_by_run_name_path_mark_and_step(home: Path, value: str, step: int) -> None:
    for level in ("quick", None):
        found = find_checkpoint(value, level=level)
        assert found.resolve() == home / "runs/demo/checkpoints" / NAMES[step]
    absolute = home / value
    if absolute.exists():
        assert find_checkpoint(absolute) == absolute or step == 3


def test_a_run_is_given_for_words_that_mean_one_of_its_checkpoints(home: Path) -> None:
    run = Path("runs/demo")
    for value, step in (("latest", 3), ("last", 3), ("best", 2), ("1", 1), ("step-00000001", 1)):
        reference = read_reference(value, run_dir=run)
        assert (reference.kind, reference.path) == ("run", run)
        assert reference.find_checkpoint(level="quick").name == NAMES[step]
    assert read_reference("latest", run_dir=Path("runs/not-yet")).run.path == Path("runs/not-yet")
    Path("latest").mkdir()
    assert read_reference("./latest", run_dir=run).path == Path("latest")


def test_a_path_that_is_there_comes_before_a_name_in_runs(home: Path) -> None:
    Path("demo/checkpoints").mkdir(parents=True)
    assert find_run("demo") == Path("demo")
    # Something else of that name is no run, and the run is meant.
    shutil.rmtree("demo/checkpoints")
    assert find_run("demo") == Path("runs/demo")


def test_the_newest_is_found_from_within_the_run_and_its_checkpoints(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in ("runs/demo", "runs/demo/checkpoints"):
        monkeypatch.chdir(home / directory)
        assert find_checkpoint(".").resolve().name == NAMES[3]


def test_a_damaged_newest_is_passed_over_and_stays_but_is_what_an_inspection_means(home: Path) -> None:
    newest = Path("runs/demo/checkpoints") / NAMES[3]
    os.truncate(next(newest.glob("*.distcp")), 10)
    with pytest.warns(UserWarning, match="passed over"):
        assert find_checkpoint("demo").name == NAMES[2]
    assert find_checkpoint("demo", level=None) == newest
    assert newest.is_dir()


def test_an_export_is_known_as_one(home: Path, exported: Path) -> None:
    assert read_reference(exported).kind == "export"
    assert find_export(exported) == exported
    with pytest.raises(UserError, match="is an export, not a checkpoint; convert it with `genesis import`"):
        find_checkpoint(exported)
    with pytest.raises(UserError, match="demo is a run, not an export; `genesis export demo OUT`"):
        find_export("demo")


@pytest.mark.parametrize(
    ("find", "value", "message"),
    [
        (find_checkpoint, "dmeo", "no such directory: dmeo and runs/dmeo; give a run, RUN/best"),
        (find_checkpoint, "/no/where", "no such directory: /no/where; give a run"),
        (find_checkpoint, "dmeo/best", "no such directory: dmeo/best and runs/dmeo/best"),
        (find_checkpoint, "demo/4", "demo has no checkpoint of step 4; its steps are 1, 2, 3"),
        (find_checkpoint, "demo/fst", "no such directory: demo/fst"),
        (find_checkpoint, "latest", "no such directory: latest"),
        (find_checkpoint, "runs", "runs has no committed checkpoint"),
        (find_checkpoint, "empty/best", "empty has no best checkpoint; `genesis checkpoint list"),
        (find_checkpoint, "empty/7", "empty has no checkpoint of step 7; it has no checkpoint at all"),
        (find_checkpoint, "a.ckpt", "a.ckpt is a file: give a run's directory"),
        (find_run, "demo/best", "demo/best is one checkpoint, but the command needs all checkpoints of a run"),
        (find_run, "demo/checkpoints/step-00000001", "is one checkpoint"),
    ],
)
def test_an_error_is_one_line_with_the_value_and_the_places_that_were_looked_at(
    home: Path, find: Callable[[str], Path], value: str, message: str
) -> None:
    Path("runs/empty/checkpoints").mkdir(parents=True)
    Path("a.ckpt").touch()
    with pytest.raises(UserError, match=message) as refused:
        find(value)
    assert "\n" not in str(refused.value)


def test_the_checkpoint_of_a_named_run_is_not_taken_from_another(home: Path) -> None:
    with pytest.raises(UserError, match="is not a run, so that it has no best"):
        read_reference("demo/1").select("best")
    assert read_reference("demo").select("best").find_checkpoint(level=None).name == NAMES[2]
