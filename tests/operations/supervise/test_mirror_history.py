"""The history of a run in its mirror: whole, up to the mirrored checkpoint, and back on an empty machine."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from genesis.cli.mirror import main as mirror_main
from genesis.data.store import StoreError
from genesis.operations.supervise.crashes import CrashRecord, read_crashes, write_crash
from genesis.operations.supervise.mirror import MirrorTakenError
from genesis.operations.supervise.mirror_directory import DirectoryPlace
from genesis.operations.supervise.mirror_history import HISTORY, HistoryMirror, find_history, plan_merge, verify_history
from genesis.operations.supervise.mirror_history_files import find_local_path
from genesis.operations.supervise.mirror_manifest import CheckpointListing
from genesis.operations.supervise.mirror_open import open_place
from genesis.operations.supervise.mirror_restore import restore_run
from genesis.operations.supervise.mirror_source import Pace
from genesis.operations.supervise.skips import Skips
from genesis.operations.supervise.state import read_skips, write_skips
from genesis_callbacks.base.event_reader import read_events
from genesis_callbacks.base.events import EventLog
from tests.operations.supervise.mirror_support import Run, open_mirror, sync


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
    (run.path / "chat").mkdir()
    (run.path / "chat" / "template.jinja").write_text("{{ messages }}")  # without a line break at its end
    with (run.path / "metrics.csv").open("a") as file:
        file.write("5,0.2\n6,0.1")  # beyond the checkpoint, and a row that is being written
    sync(run, place)
    events = read_events(run.path)
    shutil.rmtree(run.path)
    lines = restore(place, run.path)
    assert lines[-1].startswith("the history up to step 4 is restored: 5 files")
    assert run.rows == [1, 2, 3, 4]
    assert read_events(run.path) == events
    assert (run.path / "chat" / "template.jinja").read_text() == "{{ messages }}"
    assert [(run.path / name).read_text() for name in ("config.yaml", "config.resume-1.yaml")] == [
        "run: first\n",
        "run: second\n",
    ]
    assert not list(run.path.rglob("*.restoring"))


@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_recipe_that_names_code_of_others_comes_back_under_another_name(
    is_allowed: bool, run: LoggedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.train(1, 2)
    (run.path / "config.yaml").write_text("trainer: {callbacks: [{class_path: planted.Part}]}\n")
    (run.path / "config.resume-1.yaml").write_text("trainer: {callbacks: [{class_path: lightning.pytorch.Callback}]}\n")
    sync(run, tmp_path / "mirror")
    monkeypatch.setenv("GENESIS_ALLOW_IMPORTS", "planted" if is_allowed else "")
    lines = restore(tmp_path / "mirror", tmp_path / "b")
    apart = tmp_path / "b" / "config.yaml.unread"
    name = "config.yaml" if is_allowed else apart.name
    assert sorted(path.name for path in apart.parent.glob("*.y*")) == ["config.resume-1.yaml", name]
    named = [line for line in lines if "planted" in line]
    assert len(named) == (0 if is_allowed else 1)
    if not is_allowed:
        assert "config.yaml names code of other packages: planted.Part; " in named[0]
        assert "`--allow-imports planted`" in named[0]
        assert named[0].endswith(f"it is restored as {apart}: read it before you rename it")


def test_the_history_follows_the_checkpoints_and_only_what_is_new_is_written(run: LoggedRun, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    run.train(1, 1000)
    sync(run, place)
    log = (run.path / "metrics.csv").stat().st_size
    for last in (1002, 1004, 1006):
        run.train(last - 1, last)
        sync(run, place)
        copies = sorted((place / HISTORY).iterdir())
        assert json.loads((copies[-1] / "manifest.json").read_bytes())["step"] == last
        assert (
            b"".join((copy / "metrics.csv").read_bytes() for copy in copies) == (run.path / "metrics.csv").read_bytes()
        )
    assert (copies[0] / "metrics.csv").stat().st_size == log
    assert sum((copy / "metrics.csv").stat().st_size for copy in copies[1:]) < log / 50
    assert [path.name for copy in copies for path in copy.glob("config*")] == ["config.yaml"]
    sync(run, place)
    assert sorted((place / HISTORY).iterdir()) == copies, "nothing is copied twice"
    assert problems(place) == [None]
    shutil.rmtree(run.path)
    restore(place, run.path)
    assert run.rows == list(range(1, 1007))


def test_many_copies_of_a_long_log_write_each_byte_a_few_times(run: LoggedRun, tmp_path: Path, monkeypatch) -> None:
    place = tmp_path / "mirror"
    written = 0
    real = DirectoryPlace.write

    def write(self, path, blocks, num_bytes):
        nonlocal written
        written += num_bytes if "metrics.csv" in path else 0
        real(self, path, blocks, num_bytes)

    monkeypatch.setattr(DirectoryPlace, "write", write)
    run.train(1, 2)
    history = HistoryMirror(run.path, open_place(str(place)), Pace(None), lambda: None)
    for last in range(50, 3001, 50):
        with (run.path / "metrics.csv").open("a") as file:
            file.writelines(f"{step},{1 / step}\n" for step in range(last - 49, last + 1) if step > 2)
        history.update(CheckpointListing(f"blake3:{last}", last, last, 0.0, None, None, (), b""), is_last=False)
        assert len(list((place / HISTORY).iterdir())) < 10
    # A log that was copied whole each time would be written 30 times over.
    assert written < 7 * (run.path / "metrics.csv").stat().st_size
    assert problems(place) == [None]


def test_a_log_that_a_resume_has_cut_back_is_copied_as_it_is(run: LoggedRun, place: str) -> None:
    run.train(1, 400)
    with open_mirror(run, place) as mirror:
        mirror.sync()
        run.train(401, 404)
        mirror.sync()
        for first in (403, 150, 2):  # within the newest piece, within the first, and at the beginning
            lines = (run.path / "metrics.csv").read_text().splitlines(keepends=True)[:first]
            shutil.rmtree(run.directory)
            run.directory.mkdir()
            # Other rows of the same sizes: neither length nor name shows the difference.
            (run.path / "metrics.csv").write_text("".join(lines) + "".join(f"{n},9\n" for n in range(first, 411)))
            shutil.rmtree(run.path / "mirrors", ignore_errors=True)
            run.save(410 + first)
            mirror._contents = None
            mirror.sync()
            found = find_history(open_place(place))
            assert found is not None
            (log,) = [file for file in found.files if file.name == "metrics.csv"]
            assert log.hash == blake3((run.path / "metrics.csv").read_bytes()).hexdigest()
    log = (run.path / "metrics.csv").read_bytes()
    shutil.rmtree(run.path)
    restore(place, run.path)
    assert (run.path / "metrics.csv").read_bytes() == log


@pytest.mark.parametrize(
    ("folders", "num_new", "first"),
    [
        ([], 10, 0),
        ([(100, 100)], 10, 1),
        ([(100, 100)], 100, 0),
        ([(100, 100), (20, 20)], 20, 1),
        ([(100, 100), (60, 60)], 60, 0),
        ([(100, 300), (20, 20)], 1, 0),
        ([(1000, 1000), (100, 300), (20, 20)], 1, 1),
        ([(1000, 1000), (400, 400)], 0, 2),
    ],
)
def test_folders_are_merged_while_they_are_small_or_mostly_unused(
    folders: list[tuple[int, int]], num_new: int, first: int
) -> None:
    assert plan_merge(folders, num_new) == first


def test_crash_records_and_the_budget_of_skips_come_back_on_an_empty_machine(run: LoggedRun, place: str) -> None:
    run.train(1, 2)
    records = [CrashRecord(number, number, "non_finite", 0, 13, 1.7e9, "loss", "skip") for number in (1, 2)]
    for record in records:
        write_crash(run.path, record, {"rank-0.log": b"no line end", "rank-0.stacks": b"", "other": b"?"})
    with open_mirror(run, place) as mirror:
        mirror.sync()
        # The newest record changes when the run has recovered, and the budget when data are skipped.
        records[1] = replace(records[1], lost_seconds=3.0)
        write_crash(run.path, records[1])
        skips = Skips(((80, 104),), 3)
        write_skips(run.path, skips)
        mirror.sync()  # without a new checkpoint
    shutil.rmtree(run.path)
    restore(place, run.path)
    assert read_crashes(run.path) == records
    assert read_skips(run.path) == skips
    files = sorted(path.name for path in (run.path / "crashes" / "0001-non_finite").iterdir())
    assert files == ["crash.json", "rank-0.log", "rank-0.stacks"]
    assert (run.path / "crashes" / "0001-non_finite" / "rank-0.log").read_bytes() == b"no line end"


def test_a_history_of_an_earlier_version_is_restored_and_continued(run: LoggedRun, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    run.train(1, 2)
    sync(run, place)
    (copy,) = (place / HISTORY).iterdir()
    content = json.loads((copy / "manifest.json").read_bytes())
    for file in content["files"]:
        del file["pieces"]
    manifest = json.dumps({**content, "schema_version": 1}).encode()
    (copy / "manifest.json").write_bytes(manifest)
    (copy / "COMMITTED").write_bytes(b"blake3:" + blake3(manifest).hexdigest().encode())
    assert problems(place) == [None]
    run.train(3, 4)
    sync(run, place)
    assert problems(place) == [None]
    shutil.rmtree(run.path)
    restore(place, run.path)
    assert run.rows == [1, 2, 3, 4]


def test_a_damaged_piece_is_written_again_by_the_next_start_of_the_mirror(run: LoggedRun, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    run.train(1, 100)
    sync(run, place)
    run.train(101, 102)
    sync(run, place)
    first, _ = sorted((place / HISTORY).iterdir())
    data = (first / "metrics.csv").read_bytes()
    (first / "metrics.csv").write_bytes(bytes(len(data)))
    assert problems(place) == ["metrics.csv does not have the size and the hash that were saved"]
    run.train(103, 104)
    sync(run, place)
    assert problems(place) == [None]
    shutil.rmtree(run.path)
    restore(place, run.path)
    assert run.rows == list(range(1, 105))


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
    for allowed in range(4):  # two files, the manifest, and the commit; the recipe is there
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
    assert sorted(path.name for path in (place / HISTORY).iterdir())[-1] == "00000002"


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
    "name",
    [
        "../config.yaml",
        "/etc/passwd",
        "events.../x.jsonl",
        "config.yaml/../../x",
        "best.json",
        "events.x.jsonl",
        "crashes.0001-hang",
        "crashes.0001-hang.../crash.json",
        "crashes.../../x.crash.json",
        "crashes.0001-hang.x.log",
    ],
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
    log = (run.path / "metrics.csv").read_text()
    shutil.rmtree(run.path)
    restore(place, run.path)
    assert (run.path / "metrics.csv").read_text() == log


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
