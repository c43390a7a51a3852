"""The history of a run in its mirror: whole, up to the mirrored checkpoint, and back on an empty machine."""

import json
import shutil
from pathlib import Path

import pytest

from genesis.cli.mirror import main as mirror_main
from genesis.data.store import StoreError
from genesis.supervise.mirror import MirrorTakenError
from genesis.supervise.mirror_directory import DirectoryPlace
from genesis.supervise.mirror_history import HISTORY, find_history, find_local_path, verify_history
from genesis.supervise.mirror_open import open_place
from genesis.supervise.mirror_restore import restore_run
from genesis.supervise.mirror_source import Pace
from genesis_callbacks.event_reader import read_events
from genesis_callbacks.events import EventLog
from tests.supervise.mirror_support import Run, open_mirror, sync


class LoggedRun(Run):
    """A run with events, a log and recipes."""

    def train(self, first: int, last: int) -> None:
        """Logs steps, and saves after the last one."""
        self.path.mkdir(parents=True, exist_ok=True)
        metrics = self.path / "metrics.csv"
        if not metrics.exists():
            metrics.write_text("step,train/loss\n")
            (self.path / "config.yaml").write_text("run: first\n")
        with metrics.open("a") as file:
            file.writelines(f"{step},{1 / step}\n" for step in range(first, last + 1))
        EventLog(self.path, 0).append("started", text=f"from {first}")
        self.save(last)
        EventLog(self.path, 0).append("saved", step=last)

    @property
    def rows(self) -> list[int]:
        """The steps in the log."""
        return rows_of(self.path)


def rows_of(path: Path) -> list[int]:
    header, *lines = (path / "metrics.csv").read_text().splitlines()
    assert header == "step,train/loss"
    return [int(line.split(",")[0]) for line in lines]


def restore(place: Path | str, path: Path) -> list[str]:
    lines: list[str] = []
    restore_run(open_place(str(place)), path, report=lines.append)
    return lines


def problems(place: Path) -> list[str | None]:
    return [problem for _, problem in verify_history(open_place(str(place)), Pace(None))]


@pytest.fixture
def run(tmp_path: Path) -> LoggedRun:
    return LoggedRun(tmp_path / "runs" / "a")


@pytest.fixture(params=["directory", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "mirror") if request.param == "directory" else f"local://{tmp_path / 'mirror'}"


def test_a_run_on_an_empty_machine_has_its_history_up_to_the_mirrored_checkpoint(run: LoggedRun, place: str) -> None:
    run.train(1, 4)
    (run.path / "config.resume-1.yaml").write_text("run: second\n")
    with (run.path / "metrics.csv").open("a") as file:
        file.write("5,0.2\n6,0.1")  # beyond the checkpoint, and a row that is being written
    sync(run, place)
    events = read_events(run.path)
    shutil.rmtree(run.path)
    lines = restore(place, run.path)
    assert lines[-1].startswith("the history up to step 4 is restored: 4 files")
    assert run.rows == [1, 2, 3, 4]
    assert read_events(run.path) == events
    assert [(run.path / name).read_text() for name in ("config.yaml", "config.resume-1.yaml")] == [
        "run: first\n",
        "run: second\n",
    ]
    assert not list(run.path.rglob("*.restoring"))


def test_the_history_follows_the_checkpoints_and_one_copy_stays(run: LoggedRun, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    for last in (2, 4, 6):
        run.train(last - 1, last)
        sync(run, place)
        (copy,) = (place / HISTORY).iterdir()
        assert json.loads((copy / "manifest.json").read_bytes())["step"] == last
        assert rows_of(copy) == list(range(1, last + 1))
    names = sorted(path.name for path in copy.iterdir())
    assert names == ["COMMITTED", "config.yaml", "events.rank-0.jsonl", "manifest.json", "metrics.csv"]
    sync(run, place)
    assert list((place / HISTORY).iterdir()) == [copy], "nothing is copied twice"
    assert problems(place) == [None]


def test_the_last_look_takes_the_events_after_the_last_checkpoint(run: LoggedRun, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    run.train(1, 2)
    sync(run, place)
    EventLog(run.path, "supervisor").append("completed")
    with open_mirror(run, place) as mirror:
        mirror.sync()
        mirror.sync(is_last=True)
        mirror.sync(is_last=True)
    shutil.rmtree(run.path)
    restore(place, run.path)
    assert [event.kind for event in read_events(run.path)] == ["started", "saved", "completed"]


def test_a_restore_of_an_older_checkpoint_has_the_history_up_to_this_one(run: LoggedRun, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    run.train(1, 2)
    run.train(3, 4)
    sync(run, place)
    shard = next((place / "checkpoints" / "step-00000004").glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    shutil.rmtree(run.path)
    lines = restore(place, run.path)
    assert run.rows == [1, 2]
    restored = [run.path / "metrics.csv", run.path / "config.yaml", run.path / "events" / "rank-0.jsonl"]
    num_bytes = sum(path.stat().st_size for path in restored)
    assert f"the history up to step 2 is restored: 3 files, {num_bytes:,} bytes" in lines


def test_a_kill_at_any_write_leaves_a_whole_history(run: LoggedRun, tmp_path: Path, monkeypatch) -> None:
    class Killed(BaseException):
        pass

    place = tmp_path / "mirror"
    run.train(1, 2)
    sync(run, place)
    run.train(3, 4)
    real_write, real_commit = DirectoryPlace.write, DirectoryPlace.commit
    num_left = 0

    def count() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise Killed

    def write(self, path, blocks, num_bytes):
        if HISTORY in path:
            count()
        real_write(self, path, blocks, num_bytes)

    def commit(self, folder, marker):
        if HISTORY in folder:
            count()
        real_commit(self, folder, marker)

    monkeypatch.setattr(DirectoryPlace, "write", write)
    monkeypatch.setattr(DirectoryPlace, "commit", commit)
    for allowed in range(5):  # three files, the manifest, and the commit
        num_left = allowed
        with pytest.raises(Killed), open_mirror(run, place) as mirror:
            mirror.sync()
        assert problems(place) == [None]
        found = find_history(open_place(str(place)))
        assert found is not None
        assert found.step == 2
    num_left = 99
    sync(run, place)
    assert problems(place) == [None]
    assert [path.name for path in (place / HISTORY).iterdir()] == ["00000002"]


def test_a_damaged_file_of_the_history_is_left_out_and_found_by_a_verification(
    run: LoggedRun, tmp_path: Path, capsys
) -> None:
    place = tmp_path / "mirror"
    run.train(1, 2)
    sync(run, place)
    (copy,) = (place / HISTORY).iterdir()
    data = (copy / "metrics.csv").read_bytes()
    (copy / "metrics.csv").write_bytes(data[:-2] + b"9\n")
    assert problems(place) == ["metrics.csv does not have the size and the hash that were saved"]
    assert mirror_main([str(place), "--verify"]) == 1
    assert "history/00000001: metrics.csv does not have" in capsys.readouterr().out
    shutil.rmtree(run.path)
    lines = restore(place, run.path)
    assert any("metrics.csv is damaged, and is left out" in line for line in lines)
    assert not (run.path / "metrics.csv").exists()
    assert (run.path / "config.yaml").exists()
    # The checkpoint matters more: without any history the run continues, too.
    (copy / "manifest.json").write_bytes(b"{}")
    shutil.rmtree(run.path)
    lines = restore(place, run.path)
    assert any(
        "a copy of the history is left out: " in line and "has no manifest with the hash" in line for line in lines
    )
    assert not (run.path / "config.yaml").exists()
    assert (run.directory / "step-00000002").exists()


@pytest.mark.parametrize(
    "name", ["../config.yaml", "/etc/passwd", "events.../x.jsonl", "config.yaml/../../x", "best.json", "events.x.jsonl"]
)
def test_a_forged_name_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    assert find_local_path(tmp_path, name) is None


def test_files_of_the_run_are_never_replaced(run: LoggedRun, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    run.train(1, 2)
    sync(run, place)
    shutil.rmtree(run.directory)
    (run.path / "config.yaml").write_text("mine\n")
    lines = restore(place, run.path)
    assert (run.path / "config.yaml").read_text() == "mine\n"
    assert any("config.yaml exists, and is not replaced" in line for line in lines)


def test_a_log_that_changes_its_columns_is_copied_as_it_was(run: LoggedRun, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    run.train(1, 2)
    with open_mirror(run, place) as mirror:
        mirror.sync()
        run.train(3, 4)
        # A new column rewrites the log; the copy is of one moment, before or after it.
        (run.path / "metrics.csv").write_text("step,train/loss,validation/loss\n1,1,\n2,1,\n3,1,\n4,1,2\n")
        mirror.sync()
    (copy,) = (place / HISTORY).iterdir()
    assert (copy / "metrics.csv").read_text() == (run.path / "metrics.csv").read_text()


def test_a_place_that_changes_bytes_gets_no_history_and_one_that_was_taken_neither(
    run: LoggedRun, tmp_path: Path, monkeypatch
) -> None:
    place = tmp_path / "mirror"
    run.train(1, 2)
    real = DirectoryPlace.read_blocks

    def read_blocks(self, path, num_bytes):
        for block in real(self, path, num_bytes):
            yield bytes(len(block)) if HISTORY in path else block

    monkeypatch.setattr(DirectoryPlace, "read_blocks", read_blocks)
    with pytest.raises(StoreError, match=r"has other bytes than were written, 3 times"):
        sync(run, place)
    assert (place / "checkpoints" / "step-00000002" / "COMMITTED").exists(), "checkpoints come first"
    assert find_history(open_place(str(place))) is None
    monkeypatch.setattr(DirectoryPlace, "read_blocks", real)
    with open_mirror(run, place) as mirror:
        mirror._look(mirror._read_run())  # this run's
        (place / "mirror.json").write_text(json.dumps({"owner": "other"}))
        with pytest.raises(MirrorTakenError):
            mirror.sync()
    assert find_history(open_place(str(place))) is None
