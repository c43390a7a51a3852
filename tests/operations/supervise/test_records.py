"""Crash records, snapshots and observers: written, read back, and safe against whatever the files hold."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.attempt import Sight
from genesis.operations.supervise.classify import Diagnosis
from genesis.operations.supervise.crashes import CrashRecord, read_crashes, write_crash
from genesis.operations.supervise.decide import Action, PastEnd
from genesis.operations.supervise.goodput import Goodput
from genesis.operations.supervise.observers import Launch, NullObserver, Observer, Observers
from genesis.operations.supervise.records import Records, SafeWriter
from genesis.operations.supervise.status import SupervisorStatus, read_status, write_status
from genesis_callbacks.base.event_reader import EventFollower, read_events
from genesis_callbacks.base.events import EventLog

CRASH = CrashRecord(
    *(1, 2, "lost_rank", 1, 40, 1_700_000_000.5, "rank 1 was killed by SIGKILL", "restart from the newest checkpoint"),
    *({"tokens_seen": 640}, {0: 70, 1: -9}, {"torch": "2.13.0"}),
)
STATUS = SupervisorStatus(
    *("recovering", 42, "node", 1_700_000_000.0, 1_700_000_100.0, 3, 2, {"lost_rank": 2}, {"lost_rank": 2}, 41, 40),
    *(Goodput(trained=80.0, start=10.0, down=10.0), "rank 1 was killed"),
)


def test_a_crash_comes_back_as_it_was_written_and_again_with_its_cost(tmp_path: Path) -> None:
    folder = write_crash(tmp_path, CRASH, {"rank-1.log": b"last words\n"})
    assert folder.name == "0001-lost_rank"
    assert (folder / "rank-1.log").read_bytes() == b"last words\n"
    assert read_crashes(tmp_path) == [CRASH]
    recovered = replace(CRASH, resumed_from=40, repeated_steps=1, lost_seconds=2.5, cost=0.01)
    assert write_crash(tmp_path, recovered) == folder
    write_crash(tmp_path, replace(CRASH, number=2, end_class="hang", rank=None, step=None))
    assert [each.number for each in read_crashes(tmp_path)] == [1, 2]
    assert read_crashes(tmp_path)[0] == recovered


def test_a_record_that_a_full_disk_did_not_take_is_written_with_its_files_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lines = tmp_path / "attempt-0001", list[str]()
    folder.mkdir()
    (folder / "rank-0.log").write_bytes(b"last words\n")
    attempt = SimpleNamespace(sight=Sight(), statuses={0: 1})
    diagnosis, past = Diagnosis("disk_full", None, "the disk is full"), PastEnd("disk_full", 3, 0)
    records = Records(tmp_path, [], SafeWriter(lines.append))
    with monkeypatch.context() as context:
        context.setattr("genesis.operations.supervise.records.write_crash", raise_disk_full)
        record = records.add(attempt, diagnosis, past, Action("restart", "wait"), folder)  # type: ignore[arg-type]
        records.replace_last(replace(record, resumed_from=0))
        records.write_lost()
        records.write_lost()
    assert read_crashes(tmp_path) == []
    assert len(lines) == 1
    records.write_lost()
    assert [(each.number, each.resumed_from) for each in read_crashes(tmp_path)] == [(1, 0)]
    assert (RunDirectory(tmp_path).crashes / "0001-disk_full" / "rank-0.log").read_bytes() == b"last words\n"


def raise_disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "crash.json")


@pytest.mark.parametrize("text", ["", "[]", '{"number": 3}', '{"number": "3"}', "[" * 5_000, "x" * (2 << 20)])
def test_a_folder_without_a_record_is_left_out(tmp_path: Path, text: str) -> None:
    write_crash(tmp_path, CRASH)
    forged = RunDirectory(tmp_path).crashes / "0002-hang"
    forged.mkdir()
    (forged / "crash.json").write_text(text)
    (RunDirectory(tmp_path).crashes / "notes").mkdir()
    assert read_crashes(tmp_path) == [CRASH]


def test_a_run_without_crashes_has_none(tmp_path: Path) -> None:
    assert read_crashes(tmp_path / "missing") == []


def test_the_texts_of_a_record_are_safe_to_print(tmp_path: Path) -> None:
    write_crash(tmp_path, replace(CRASH, reason="\x1b[2J\n"))
    assert read_crashes(tmp_path)[0].reason == "\\x1b[2J\\n"


def test_a_snapshot_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS
    assert (STATUS.num_crashes, STATUS.lost_seconds, STATUS.goodput.share) == (2, 20.0, 0.8)
    content = json.loads(RunDirectory(tmp_path).supervisor_status.read_text())
    RunDirectory(tmp_path).supervisor_status.write_text(json.dumps({**content, "state": "dancing"}))
    assert read_status(tmp_path) is None


def test_the_parts_of_goodput_add_up() -> None:
    total = Goodput(trained=1.0, saves=2.0).add(Goodput(trained=3.0, waiting=4.0))
    assert total == Goodput(trained=4.0, saves=2.0, waiting=4.0)
    assert Goodput().share == 0.0


def test_an_observer_that_fails_stops_neither_the_loop_nor_the_others(tmp_path: Path) -> None:
    class Broken(NullObserver):
        def on_launch(self, launch: Launch) -> None:
            raise OSError("no such host")

    class Listening(NullObserver):
        seen: int = 0

        def on_launch(self, launch: Launch) -> None:
            self.seen = launch.attempt

    lines: list[str] = []
    listening = Listening()
    known: list[Observer] = [Broken(), listening]
    Observers(known, lines.append).call(lambda each: each.on_launch(Launch(tmp_path, 3)))
    assert listening.seen == 3
    assert lines == ["Broken failed and is called again next time: OSError: no such host"]


def test_the_events_of_a_supervisor_are_those_of_the_run(tmp_path: Path) -> None:
    follower = EventFollower(tmp_path)
    EventLog(tmp_path, 0).write("started")
    log = EventLog(tmp_path, "supervisor")
    for kind in ("launched", "crashed", "recovered", "stopped", "completed"):
        log.write(kind)
    assert (tmp_path / "events" / "supervisor.jsonl").exists()
    found = read_events(tmp_path)
    assert [(each.kind, each.rank) for each in found[:2]] == [("started", 0), ("launched", None)]
    assert len(follower.poll()) == len(found) == 6
