"""the benchmark `recovery`: how it divides a recovery, and what it refuses."""

import json
import os
import signal
from pathlib import Path

import pytest

from benchmarks.recovery import Recovery, divide, main
from genesis.base.errors import UserError
from genesis_callbacks.base.events import Event
from genesis_callbacks.heartbeats import HeartbeatRecord


def test_the_parts_of_a_recovery_add_up_and_earlier_ones_do_not_count() -> None:
    moments = {"crashed": 10.5, "launched": 10.75, "started": 12.0}
    events = [Event(kind, 0.0, seconds, None) for kind, seconds in moments.items()]  # type: ignore[arg-type]
    events.insert(0, Event("crashed", 0.0, 9.0, None))
    milestones = {"created": 11.75, "setup": 11.8, "train": 12.5, "first_step": 13.0}
    slower = {**milestones, "first_step": 13.5}
    beats = [
        HeartbeatRecord(n, 2, n, "h", "train", 1, 0.0, 14.0, milestones=m) for n, m in enumerate((milestones, slower))
    ]
    recovery = divide(10.0, events, beats)
    assert (recovery.detect, recovery.clean_up, recovery.import_) == (0.5, 0.25, 1.0)
    assert (recovery.build, recovery.restore, recovery.first_step, recovery.total) == (0.25, 0.5, 1.0, 3.5)


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--kills", "0"], "--kills is 0"), (["--config", "none.yaml"], "no such recipe")]
)
def test_arguments_without_meaning_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(arguments)


def test_sigterm_removes_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(_: object, directory: Path) -> list[Recovery]:
        directories.append(directory)
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    directories: list[Path] = []
    monkeypatch.setattr("benchmarks.recovery.measure", measure)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{}")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(recipe)])
    assert caught.value.code == 143
    assert [path.exists() for path in directories] == [False]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.bench
@pytest.mark.process
def test_a_record_has_every_part_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kills", "1", "--out", str(tmp_path / "recovery.json")]) == 0
    record = json.loads((tmp_path / "recovery.json").read_text())
    assert record["recoveries"][0]["total"] == pytest.approx(sum(list(record["recoveries"][0].values())[:-1]))
    assert (tmp_path / "recovery.md").read_text() == capsys.readouterr().out
