"""A mirror in a directory: what is copied, removed and refused, and how a run continues from it."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.operations.mirror.contents import read_contents, verify_contents
from genesis.operations.mirror.metrics import measure_lag
from genesis.operations.mirror.mirror import MirrorTakenError
from genesis.operations.mirror.places import open_place
from genesis.operations.mirror.restore import restore_run
from genesis.operations.mirror.status import read_mirror_statuses
from genesis.operations.mirror.transfer import HeldCheckpoint, Pace
from genesis_callbacks.checkpoint import CorruptCheckpointError, list_committed, verify
from genesis_callbacks.checkpoint.commit import discard, supersede
from tests.forged.checkpoints import reseal
from tests.operations.mirror.support import Run, open_mirror, save_base, sync


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "a")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def steps(place: Path) -> list[int]:
    return [manifest.step for _, manifest in list_committed(place)]


def restore(place: Path, path: Path, **options):
    return restore_run(open_place(str(place)), path, report=lambda line: None, **options)


def test_the_newest_checkpoints_are_mirrored_byte_for_byte_and_older_ones_leave(run: Run, place: Path):
    for step in (1, 2, 3):
        run.save(step)
    lines = sync(run, place)
    assert steps(place) == [2, 3]
    assert lines[0].startswith("step 3:")  # the newest first: it matters most if the disk is lost meanwhile
    run.save(4)
    sync(run, place)
    assert steps(place) == [3, 4]
    for path, _ in list_committed(place):
        verify(path, "deep")
        for file in path.iterdir():
            assert file.read_bytes() == (run.directory / path.name / file.name).read_bytes()
    assert sync(run, place) == []  # nothing is copied twice


def test_retention_keeps_multiples_and_the_best(run: Run, place: Path):
    for step in range(1, 7):
        run.save(step)
    marker = (run.directory / "step-00000002" / "COMMITTED").read_text()
    best = {"name": "step-00000002", "manifest_hash": marker, "monitor": "loss", "mode": "min", "value": 1.0}
    (run.directory / "best.json").write_text(json.dumps(best))
    sync(run, place, keep_last=1, keep_every_n_steps=3)
    assert steps(place) == [2, 3, 6]
    assert (place / "checkpoints" / "best.json").read_bytes() == (run.directory / "best.json").read_bytes()


def test_a_run_on_an_empty_machine_continues_from_its_mirror(run: Run, place: Path, tmp_path: Path):
    for step in (1, 2):
        run.save(step)
    sync(run, place)
    shutil.rmtree(run.path)
    assert restore(place, run.path).step == 2
    verify(run.directory / "step-00000002", "deep")
    assert [path.name for path, _ in list_committed(run.path)] == ["step-00000002"]
    assert restore(place, run.path).restored == ()  # it has what the mirror has
    assert restore(place, run.path, has_all=True).restored == (1,)
    assert steps(run.path) == [1, 2]


def test_a_damaged_copy_is_passed_over_and_found_by_a_verification(run: Run, place: Path, tmp_path: Path):
    for step in (1, 2):
        run.save(step)
    sync(run, place)
    file = next((place / "checkpoints" / "step-00000002").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    opened = open_place(str(place))
    problems = dict(verify_contents(opened, read_contents(opened), Pace(None)))
    assert problems["checkpoints/step-00000001"] is None
    assert file.name in str(problems["checkpoints/step-00000002"])
    outcome = restore(place, tmp_path / "b")
    assert outcome.step == 1
    assert outcome.passed_over[0][0] == 2
    shutil.rmtree(place / "checkpoints" / "step-00000001")
    with pytest.raises(CorruptCheckpointError, match=r"none of the 1 checkpoint .* verifies"):
        restore(place, tmp_path / "c")
    assert list((tmp_path / "c" / "checkpoints").glob("step-*")) == []


def test_a_damaged_checkpoint_of_the_run_never_reaches_the_mirror(run: Run, place: Path):
    run.save(1)
    path = run.save(2)
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    lines = sync(run, place)
    assert steps(place) == [1]
    assert any("does not have the hash that was saved" in line for line in lines)
    assert [found.name for found in (place / "checkpoints").iterdir()] == ["step-00000001"]


def test_what_the_run_removes_during_a_copy_is_copied_nevertheless(run: Run, place: Path, monkeypatch):
    path = run.save(1)
    run.save(2)
    real = HeldCheckpoint.read_blocks

    def remove_first(self, *arguments):
        if path.exists() and self._path == path:
            discard(path)
        return real(self, *arguments)

    monkeypatch.setattr(HeldCheckpoint, "read_blocks", remove_first)
    sync(run, place)
    assert not path.exists()
    assert steps(place) == [1, 2]
    verify(place / "checkpoints" / "step-00000001", "deep")


def test_a_checkpoint_that_is_removed_while_its_disk_is_full_is_abandoned_without_an_error(
    run: Run, place: Path, monkeypatch
):
    path = run.save(1)
    run.save(2)
    usage = shutil.disk_usage(run.path)
    real = HeldCheckpoint.read_blocks

    def remove_first(self, *arguments):
        if path.exists() and self._path == path:
            discard(path)
        return real(self, *arguments)

    monkeypatch.setattr(HeldCheckpoint, "read_blocks", remove_first)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=0))
    lines = sync(run, place)
    assert any("was removed by the run before its copy was made" in line for line in lines)
    assert [found.name for found in (place / "checkpoints").iterdir()] == ["step-00000002"]


def test_checkpoints_before_which_the_run_went_back_leave_the_mirror(run: Run, place: Path):
    for step in (1, 2, 3, 4):
        run.save(step)
    sync(run, place, keep_last=3)
    assert steps(place) == [2, 3, 4]
    again = Run(run.path)
    found = {manifest.step: (path, manifest) for path, manifest in list_committed(run.path)}
    again.target.continue_from(found[3][1].previous, 2)  # as a restart from step 2 does
    supersede([found[3][0], found[4][0]])
    again.save(3)
    sync(run, place, keep_last=3)
    assert steps(place) == [1, 2, 3]
    fresh = (run.directory / "step-00000003" / "COMMITTED").read_text()
    assert (place / "checkpoints" / "step-00000003" / "COMMITTED").read_text() == fresh


def test_a_run_that_lost_its_newest_checkpoints_does_not_remove_them_from_the_mirror(run: Run, place: Path):
    for step in (1, 2, 3):
        run.save(step)
    sync(run, place)
    for step in (2, 3):
        shutil.rmtree(run.directory / f"step-0000000{step}")
    sync(run, place)
    assert 3 in steps(place)
    assert restore(place, run.path).step == 3


def test_another_run_and_a_second_copy_of_the_run_are_refused(run: Run, place: Path, tmp_path: Path):
    run.save(1)
    sync(run, place)
    other = Run(tmp_path / "other")
    other.save(5)
    with pytest.raises(MirrorTakenError, match="does not descend from"):
        sync(other, place)
    with pytest.raises(UserError, match="mirror of another run"):
        restore(place, other.path)
    # A machine that was taken for lost comes back, while the run continues from the mirror on another one.
    moved = tmp_path / "moved"
    restore(place, moved)
    sync(moved, place)
    run.save(2)
    with pytest.raises(MirrorTakenError, match="another copy of this run"):
        sync(run, place)
    assert steps(place) == [1]


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_copy_of_the_run_that_is_no_mirror_is_refused_and_keeps_its_checkpoints(
    run: Run, place: Path, is_committed: bool
):
    for step in (1, 2, 3):
        run.save(step)
    shutil.copytree(run.directory, place / run.directory.name)
    if not is_committed:
        for marker in place.rglob("COMMITTED"):
            marker.unlink()
    before = sorted(place.rglob("*"))
    with pytest.raises(MirrorTakenError, match="not a mirror, because it has no"):
        sync(run, place)
    assert sorted(place.rglob("*")) == before


def test_an_empty_run_claims_nothing_and_removes_nothing(run: Run, place: Path, tmp_path: Path):
    run.save(1)
    sync(run, place)
    assert sync(tmp_path / "empty", place) == []
    assert steps(place) == [1]
    sync(run, place)


def test_one_process_at_a_time_works_for_a_mirror(run: Run, place: Path):
    with open_mirror(run, place), pytest.raises(UserError, match="another process mirrors this run"):
        open_mirror(run, place)


@pytest.fixture
def with_base(place: Path, tmp_path: Path) -> Run:
    """A run with a base outside of it, both in the mirror alone."""
    base = save_base(tmp_path / "runs" / "base" / "checkpoints")
    run = Run(tmp_path / "runs" / "a", base=base)
    run.save(1)
    lines = sync(run, place)
    assert [line.split()[0] for line in lines] == ["base", "step"]
    shutil.rmtree(tmp_path / "runs")
    return run


def test_a_base_is_mirrored_first_and_is_restored_into_the_run_where_every_reader_finds_it(
    with_base: Run, place: Path, tmp_path: Path
):
    elsewhere = tmp_path / "elsewhere" / "a"
    assert restore(place, elsewhere).step == 1
    verify(elsewhere / "checkpoints" / "step-00000001", "deep")
    assert len(list_committed(elsewhere / "checkpoints")) == 1
    assert (elsewhere / "bases" / next((place / "bases").iterdir()).name / "COMMITTED").exists()
    assert [line.split()[0] for line in sync(elsewhere, tmp_path / "second")] == ["base", "step"]


def test_a_base_is_restored_outside_of_the_run_only_into_the_directory_that_the_user_gives(
    with_base: Run, place: Path, tmp_path: Path, monkeypatch
):
    lines: list[str] = []
    restore_run(open_place(str(place)), with_base.path, bases=tmp_path / "shared", report=lines.append)
    (home,) = (tmp_path / "shared").iterdir()
    assert any(f"GENESIS_BASE_CHECKPOINTS={home}" in line for line in lines)
    assert not (with_base.path / "bases").exists()
    monkeypatch.setenv("GENESIS_BASE_CHECKPOINTS", str(home))
    verify(with_base.directory / "step-00000001", "deep")


@pytest.mark.parametrize("relative", ["../../victim/checkpoints/step-00009999", "step-00009999", "", "~/x", "/etc/x"])
def test_no_path_that_a_mirror_names_is_written(with_base: Run, place: Path, tmp_path: Path, relative: str):
    victim = Run(tmp_path / "runs" / "victim")
    victim.save(1)
    forged = place / "checkpoints" / "step-00000001"
    manifest = json.loads((forged / "manifest.json").read_text())
    manifest["base"] |= {"relative_path": relative, "path": str(victim.directory / "step-00009999")}
    reseal(forged, manifest)
    before = sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(with_base.path))
    assert restore(place, with_base.path).step == 1
    assert sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(with_base.path)) == before
    assert [path.name for path in with_base.directory.glob("step-*")] == ["step-00000001"]
    assert [len(path.name) for path in (with_base.path / "bases").iterdir()] == [16]


def put_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def put_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def put_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def put_endless(file: Path) -> None:
    os.truncate(file, 1 << 40)


@pytest.mark.parametrize("put", [put_fifo, put_device, put_directory, put_endless])
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", ["manifest.json", "COMMITTED", "*.distcp"])
def test_a_mirror_with_something_else_than_a_file_is_refused_and_leaves_nothing(
    with_base: Run, place: Path, put, is_there: bool, name: str
):
    if is_there:
        with_base.path.mkdir(parents=True)
    (file,) = (place / "checkpoints" / "step-00000001").glob(name)
    put(file)
    with pytest.raises(CorruptCheckpointError, match="none of the 1 checkpoint"):
        restore(place, with_base.path)
    assert with_base.path.exists() == is_there
    assert list(with_base.path.rglob("*")) == []
    contents = read_contents(open_place(str(place)))
    problems = dict(verify_contents(open_place(str(place)), contents, Pace(None)))
    assert problems["checkpoints/step-00000001"] is not None


def test_retention_never_removes_a_base(place: Path, tmp_path: Path):
    base = save_base(tmp_path / "runs" / "base" / "checkpoints")
    run = Run(tmp_path / "runs" / "a", base=base)
    for step in (1, 2, 3):
        run.save(step)
        lines = sync(run, place, keep_last=1)
    assert not any(line.startswith("base") for line in lines)
    assert len(list((place / "bases").iterdir())) == 1
    contents = read_contents(open_place(str(place)))
    assert [listing.step for listing in contents.checkpoints.values()] == [3]


def test_a_base_that_is_gone_is_one_line(place: Path, tmp_path: Path):
    base = save_base(tmp_path / "runs" / "base" / "checkpoints")
    run = Run(tmp_path / "runs" / "a", base=base)
    run.save(1)
    shutil.rmtree(base)
    with pytest.raises(UserError, match=r"leaves 1 tensor to the base .* there is no such directory.*: restore it"):
        sync(run, place)


def test_a_base_is_not_written_where_the_mirror_says_if_that_is_no_place_of_a_checkpoint(place: Path, tmp_path: Path):
    base = save_base(tmp_path / "base")
    (tmp_path / "base" / "home").mkdir()
    moved = base.rename(tmp_path / "base" / "home" / "config")
    run = Run(tmp_path / "runs" / "a", base=moved)
    run.save(1)
    sync(run, place)
    shutil.rmtree(tmp_path / "base")
    restore(place, tmp_path / "elsewhere" / "runs" / "a")
    assert not (tmp_path / "elsewhere" / "base").exists()
    assert len(list((tmp_path / "elsewhere" / "runs" / "a" / "bases").iterdir())) == 1


def test_leftovers_are_removed_or_continued_and_foreign_directories_stay(run: Run, place: Path):
    run.save(2)
    sync(run, place)
    checkpoints = place / "checkpoints"
    (checkpoints / "step-00000001.staging-mirror").mkdir()
    (checkpoints / "step-00000001.staging-mirror" / "x").write_text("half")
    (checkpoints / "notes").mkdir()
    run.save(3)
    (checkpoints / "step-00000003.staging-mirror").mkdir()
    source = next((run.directory / "step-00000003").glob("*.distcp"))
    shutil.copy(source, checkpoints / "step-00000003.staging-mirror" / source.name)
    before = (checkpoints / "step-00000003.staging-mirror" / source.name).stat().st_ino
    sync(run, place)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["notes", "step-00000002", "step-00000003"]
    assert (checkpoints / "step-00000003" / source.name).stat().st_ino == before


def test_the_lag_is_known_even_if_the_mirror_is_gone(run: Run, place: Path):
    run.save(1)
    sync(run, place)
    (status,) = read_mirror_statuses(run.path)
    assert status.newest_step == 1
    assert measure_lag(run.path, status, time.time() + 100) == 0.0
    path = run.save(2)
    committed = (path / "COMMITTED").stat().st_mtime
    run.save(3)
    assert measure_lag(run.path, status, committed + 100) == pytest.approx(100, abs=1)


def test_forged_statuses_and_marks_are_ignored(run: Run, place: Path):
    run.save(1)
    sync(run, place)
    (path,) = (run.path / "mirrors").glob("*.json")
    for text in ("[]", "{}", "[" * 100_000, '{"url": 1e999}', "\x00"):
        path.write_text(text)
        assert read_mirror_statuses(run.path) == []
    for text in ("[]", '{"name": 1, "others": 5}', '{"name": ["x"]}', "{"):
        (run.directory / "best.json").write_text(text)
        (run.path / "mirrors").joinpath(path.name).unlink(missing_ok=True)
        sync(run, place)


def test_the_bandwidth_is_limited():
    times = [0.0]
    pace = Pace(100.0, clock=lambda: times[0], sleep=lambda seconds: times.append(times.pop() + seconds))
    for _ in range(11):
        pace.spend(50)
    assert times[0] == pytest.approx(5.0)


def test_a_full_second_disk_is_one_error_and_leaves_only_whole_checkpoints(run: Run, place: Path, monkeypatch):
    run.save(1)
    sync(run, place)
    run.save(2)
    real_write = os.write

    def write(descriptor, data):
        if str(place) in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    monkeypatch.setattr("os.write", write)
    with pytest.raises(OSError, match="No space left"):
        sync(run, place)
    monkeypatch.undo()
    assert steps(place) == [1]
    sync(run, place)
    assert steps(place) == [1, 2]


def test_a_password_is_in_no_message():
    place = open_place("memory://me:secret@host/x")
    assert place.url == "memory://host/x"
    place.replace("OWNER", b"")
    assert place.read("OWNER") == b""
    with pytest.raises(UserError, match=r"^nosuch://host/x cannot be read \([^@]*\); correct the URL$"):
        open_place("nosuch://me:secret@host/x").read("OWNER")
