"""A training of a rehearsal begins alone, and its phases are seen from outside."""

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from genesis.base.errors import RunEndedError
from genesis.base.processes import Mark, end_all
from genesis.operations.rehearse.launch import MARK_NAME, Launcher, Start, Training
from genesis.operations.rehearse.watch import RunView
from genesis_callbacks.base.events import EventLog

# Stands in for `python -m genesis fit` by its command line alone.
WAIT = "import sys, time\nprint('up', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def mark() -> Iterator[Mark]:
    mark = Mark(MARK_NAME, uuid.uuid4().hex)
    yield mark
    end_all(mark)


def test_a_training_does_not_begin_while_a_rank_of_an_earlier_one_runs(mark: Mark, tmp_path: Path) -> None:
    (tmp_path / "genesis.py").write_text(WAIT)
    command = ["env", "-C", str(tmp_path), sys.executable, "-m", "genesis", "fit"]
    training = Training(command, tmp_path / "log", mark)
    while not training.ranks():
        assert training.poll() is None
    launcher = Launcher(("fit",), tmp_path, mark)
    with pytest.raises(RunEndedError, match=r"rank 0 \(process \d+\)"):
        launcher.launch(tmp_path / "run", "killed-start-2")
    assert not (tmp_path / "killed-start-2.log").exists()
    training.kill_ranks()
    assert training.wait_ended(60) is not None


def test_the_phase_of_a_start_follows_the_events_of_the_run(mark: Mark, tmp_path: Path) -> None:
    log = tmp_path / "log"
    training = Training([sys.executable, "-c", "pass"], log, mark)
    start = Start(training, RunView(tmp_path / "run"), log)
    assert start.look_at_start(None).phase == "imports"
    events = EventLog(tmp_path / "run", 0)
    events.write("started")
    assert start.look_at_start(None).phase == "restore"
    events.write("restored", step=10)
    assert start.look_at_start(None).phase == "first step"
    assert training.wait_ended(60) is not None
