"""`genesis mirror` and `genesis mirror restore` as processes: kills at any moment, and a training that continues."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genesis.cli.main import main
from genesis.operations.supervise.mirror_contents import read_contents, verify_contents
from genesis.operations.supervise.mirror_open import open_place
from genesis.operations.supervise.mirror_source import Pace
from genesis_callbacks.checkpoint import list_committed, verify
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import run_genesis
from tests.operations.supervise.mirror_support import Run


def start_mirror(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Starts the command as a user does: it must not import torch, which takes seconds."""
    command = [sys.executable, "-m", "genesis", "mirror", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def find_damage(place: Path) -> list[str]:
    opened = open_place(str(place))
    found = verify_contents(opened, read_contents(opened), Pace(None))
    return [f"{folder}: {problem}" for folder, problem in found if problem is not None]


@pytest.mark.process
@pytest.mark.slow
def test_kills_at_any_moment_leave_only_whole_checkpoints_in_the_mirror(tmp_path: Path):
    run, place = Run(tmp_path / "run", num_elements=200_000), tmp_path / "mirror"
    draw = random.Random(0)
    seen: set[int] = set()
    for step in range(1, 9):
        run.save(step)
        for lock in (run.path / "mirrors").glob("*.lock"):
            lock.unlink()
        process = start_mirror(run.path, place, "--bandwidth", "4MB", "--poll_seconds", "0.05")
        deadline = time.monotonic() + 60
        while not list((run.path / "mirrors").glob("*.lock")):  # it begins to work
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 1.5))  # a copy takes about 0.4 s at this rate, with its verification
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert find_damage(place) == []
        seen |= {manifest.step for _, manifest in list_committed(place)}
    assert len(seen) > 1
    assert run_genesis("mirror", run.path, place, "--once").returncode == 0
    assert [manifest.step for _, manifest in list_committed(place)] == [7, 8]
    assert [path.name for path in (place / "checkpoints").iterdir() if "staging" in path.name] == []
    assert run_genesis("mirror", place, "--verify").returncode == 0


@pytest.mark.process
@pytest.mark.slow
def test_a_mirror_runs_beside_a_run_until_it_is_told_to_end(tmp_path: Path):
    place = tmp_path / "mirror"
    process = start_mirror(tmp_path / "run", place, "--poll_seconds", "0.05")
    try:
        run = Run(tmp_path / "run")
        for step in (1, 2, 3):
            run.save(step)
            deadline = time.monotonic() + 60
            while step not in [manifest.step for _, manifest in list_committed(place)]:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
        modules = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in modules
    finally:
        process.terminate()
        _, err = process.communicate()
    assert process.returncode == 0
    assert b"step 3:" in err


@pytest.mark.process
def test_sigterm_ends_a_single_pass_with_its_status_and_the_same_command_goes_on(tmp_path: Path):
    Run(tmp_path / "run").save(1)
    process = start_mirror(tmp_path / "run", tmp_path / "mirror", "--once", "--bandwidth", "100")
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("mirror/checkpoints/*/*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate()
    assert (process.returncode, err) == (143, b"genesis mirror: stopped by SIGTERM; the same command goes on\n")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.repeat  # `test_mirror_supervised.py` loses a machine
def test_a_training_that_lost_its_disk_continues_from_its_mirror_bit_for_bit(tiny_corpus: Path, tmp_path: Path):
    run, place = tmp_path / "run", tmp_path / "mirror"
    recipe = write_recipe(tmp_path / "a.yaml", build_recipe(tiny_corpus, run), {"trainer.max_steps": 6})
    assert run_genesis("fit", "--config", recipe).returncode == 0
    straight = digest(run)
    assert run_genesis("mirror", run, place, "--once").returncode == 0
    shutil.rmtree(run)  # the disk; and the last checkpoint had not reached the mirror
    shutil.rmtree(place / "checkpoints" / "step-00000006")
    result = run_genesis("mirror", "restore", place, run)
    assert result.returncode == 0
    assert "continues from step 4" in result.stdout
    assert run_genesis("fit", "--config", recipe, "--ckpt_path", "latest").returncode == 0
    assert digest(run) == straight


def digest(run: Path) -> dict[str, int]:
    tensors = verify(run / "checkpoints" / "step-00000006", "deep").tensors
    return {name: record.digest for name, record in tensors.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "give the run's directory before the mirror"),
        (["run", "mirror", "--bandwidth", "fast"], "is no size: write it as 5GB"),
        (["run", "mirror", "--keep_last", "0"], "keep_last is 0"),
        (["mirror", "--verify"], "holds no mirrored checkpoint"),
        (["run", "nosuch://place"], "nosuch://place cannot be read"),
        (["run", "run/file"], "is not a directory"),
        (["restore", "mirror", "run"], "holds no mirrored checkpoint"),
        (["restore", "run", "s3://bucket/runs/demo"], "s3://bucket/runs/demo is a mirror, not the directory of a run"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, monkeypatch, capsys, arguments: list[str], message: str):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["mirror", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_restore_from_the_run_into_its_mirror_is_refused_with_the_right_order(tmp_path: Path, capsys):
    run, place = Run(tmp_path / "run"), tmp_path / "mirror"
    run.save(1)
    assert main(["mirror", str(run.path), str(place), "--once"]) == 0
    capsys.readouterr()
    assert main(["mirror", "restore", str(run.path), str(place)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{place} is a mirror, not the directory of a run" in err
    # The mirror's disk is not mounted, so that its path is an empty directory or does not exist.
    for number, more in enumerate(([], ["--or_none"], ["--all"])):
        assert main(["mirror", "restore", str(run.path), str(tmp_path / f"missing-{number}"), *more]) == 2
        assert f"{run.path} is no mirror, because it has no mirror.json" in capsys.readouterr().err
        assert not (tmp_path / f"missing-{number}").exists()
    assert "genesis mirror restore MIRROR RUN" in err
    assert main(["mirror", "restore", str(place), str(run.path)]) == 0


def test_the_help_of_both_commands_names_the_other(capsys):
    for arguments, expected in ((["mirror", "--help"], "mirror restore"), (["mirror", "restore", "--help"], "--all")):
        with pytest.raises(SystemExit):
            main(arguments)
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("place", [".", "checkpoints", "mirror"])
def test_a_place_in_the_run_itself_is_refused_and_no_checkpoint_is_removed(tmp_path: Path, capsys, place: str):
    run = Run(tmp_path / "run")
    for step in (1, 2, 3):
        run.save(step)
    assert main(["mirror", str(run.path), str(run.path / place), "--once", "--keep_last", "1"]) == 2
    assert "lies in the run" in capsys.readouterr().err
    assert len(list((run.path / "checkpoints").glob("step-*"))) == 3


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0", "1e300", "soon"])
def test_a_time_between_looks_that_is_no_time_is_refused(tmp_path: Path, capsys, seconds: str):
    assert main(["mirror", str(tmp_path / "run"), str(tmp_path / "m"), "--poll_seconds", seconds]) == 2
    assert f"{seconds!r} is not a time" in capsys.readouterr().err


def test_a_mirror_of_a_run_that_does_not_exist_yet_reports_it(tmp_path: Path, capsys):
    assert main(["mirror", str(tmp_path / "rnu"), str(tmp_path / "place"), "--once"]) == 0
    assert "there is no run" in capsys.readouterr().err


def test_a_supervisor_whose_program_for_alerts_is_missing_does_not_start(tmp_path: Path, tiny_corpus: Path, capsys):
    recipe = write_recipe(tmp_path / "a.yaml", build_recipe(tiny_corpus, tmp_path / "run"))
    assert main(["supervise", "--notify_command", "/no/such/program", "--", "fit", "--config", str(recipe)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "'/no/such/program' is no program that can be started: correct its name or path" in err
    assert not (tmp_path / "run").exists()


def test_a_supervised_recipe_that_does_not_exist_is_one_line(tmp_path: Path, capsys):
    assert main(["supervise", "--", "fit", "--config", str(tmp_path / "nowhere.yaml")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no such file, and no recipe of Genesis" in err
