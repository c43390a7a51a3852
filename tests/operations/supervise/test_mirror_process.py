"""The mirror of a supervised run: started again, brought up to date at the end, and restored from at a start."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genesis.base.arguments import Parser
from genesis.base.errors import UserError
from genesis.cli.main import main
from genesis.cli.mirror_restore import main as restore_main
from genesis.cli.supervise_observers import add_observer_options, open_observers, open_report, print_file
from genesis.operations.supervise import fresh, mirror_process
from genesis.operations.supervise.mirror_process import MirrorProcess, MirrorProcessOptions
from genesis.operations.supervise.observers import Launch, LaunchRefusedError, Observers
from genesis.operations.supervise.status import SupervisorStatus
from genesis_callbacks.checkpoint import list_committed
from tests.operations.supervise.mirror_support import Run, sync

STATUS = SupervisorStatus("training", 1, "node", 0.0, 0.0)


def stub(monkeypatch, program: str) -> None:
    """Replaces the command line of genesis by a small program."""
    monkeypatch.setattr(mirror_process, "_genesis", lambda *words: [sys.executable, "-S", "-c", program, *words])


def build(tmp_path: Path, **options) -> tuple[MirrorProcess, list[str]]:
    lines: list[str] = []
    return MirrorProcess(
        tmp_path / "run", MirrorProcessOptions(str(tmp_path / "mirror"), **options), lines.append
    ), lines


@pytest.mark.process
def test_a_mirror_that_ends_is_started_again_after_a_growing_pause(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(mirror_process, "_FIRST_PAUSE_SECONDS", 0.01)
    started = tmp_path / "started"
    stub(monkeypatch, f"open({str(started)!r}, 'a').write('x')")
    mirror, lines = build(tmp_path)
    mirror.on_launch(Launch(tmp_path / "run", 1))
    deadline = time.monotonic() + 30
    while len(lines) < 3:
        assert time.monotonic() < deadline
        mirror.on_status(STATUS)
        time.sleep(0.01)
    mirror.close()
    assert lines[0] == "the mirror ended with status 0 and starts again in 0.01 s"
    assert lines[2].endswith("in 0.16 s")
    assert len(started.read_text()) >= 3


def test_a_run_with_a_checkpoint_is_not_restored_and_one_without_is(tmp_path: Path, monkeypatch):
    called = tmp_path / "called"
    stub(monkeypatch, f"import sys; open({str(called)!r}, 'w').write(' '.join(sys.argv[1:]))")
    mirror, _ = build(tmp_path)
    mirror.before_launch(tmp_path / "run", 1)
    assert called.read_text() == f"mirror restore {tmp_path / 'mirror'} {tmp_path / 'run'} --or_none"
    called.unlink()
    Run(tmp_path / "run").save(1)
    mirror.before_launch(tmp_path / "run", 2)
    assert not called.exists()


def test_a_run_that_began_again_from_scratch_does_not_get_its_old_checkpoints_back(tmp_path: Path, capfd):
    run, place = Run(tmp_path / "run"), tmp_path / "mirror"
    run.save(1)
    run.save(2)
    sync(run, place)
    assert fresh.main([str(run.path)]) == 0
    assert restore_main([str(place), str(run.path), "--or_none"]) == 0
    assert not list(run.directory.glob("step-*"))
    assert "2 checkpoints of" in capfd.readouterr().err
    again = Run(run.path)
    again.save(1)
    sync(again, place)
    shutil.rmtree(run.directory / "step-00000001")
    assert restore_main([str(place), str(run.path)]) == 0
    assert (run.directory / "step-00000001").exists()


def test_a_run_is_not_started_from_scratch_while_its_mirror_cannot_be_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(mirror_process, "_FIRST_PAUSE_SECONDS", 0.0)
    stub(monkeypatch, "raise SystemExit(2)")
    mirror, _ = build(tmp_path)
    observers = Observers([mirror], lambda line: None)
    with pytest.raises(LaunchRefusedError, match="the run is not started from scratch"):
        observers.call(lambda each: each.before_launch(tmp_path / "run", 1))


def test_a_last_copy_that_takes_too_long_is_a_line(tmp_path: Path, monkeypatch):
    Run(tmp_path / "run").save(1)
    stub(monkeypatch, "import time; time.sleep(60)")
    mirror, lines = build(tmp_path, finish_seconds=0.2)
    mirror.on_complete(STATUS)
    assert "is not up to date at the end of the run" in lines[0]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.repeat  # `test_mirror_supervised.py`
def test_a_supervised_run_is_mirrored_and_continues_on_an_empty_machine(tmp_path: Path):
    run = Run(tmp_path / "run")
    mirror, lines = build(tmp_path)
    mirror.on_launch(Launch(run.path, 1))
    run.save(1)
    deadline = time.monotonic() + 60
    while not list_committed(tmp_path / "mirror"):
        assert time.monotonic() < deadline
        mirror.on_status(STATUS)
        time.sleep(0.05)
    run.save(2)
    mirror.on_complete(STATUS)
    assert lines == []
    assert [manifest.step for _, manifest in list_committed(tmp_path / "mirror")] == [1, 2]
    shutil.rmtree(run.path)
    mirror.before_launch(run.path, 1)
    assert [manifest.step for _, manifest in list_committed(run.path)] == [2]


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_mirror_behind(tmp_path: Path):
    Run(tmp_path / "run").save(1)
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from genesis.operations.supervise.mirror_process import MirrorProcess, MirrorProcessOptions\n"
        f"options = MirrorProcessOptions({str(tmp_path / 'mirror')!r})\n"
        f"mirror = MirrorProcess(Path({str(tmp_path / 'run')!r}), options, print)\n"
        "mirror._keep_running()\nprint(mirror._process.pid, flush=True)\ntime.sleep(60)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    deadline = time.monotonic() + 60
    while not list_committed(tmp_path / "mirror"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    supervisor.stdout.close()
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def parse(*words: str):
    parser = Parser("genesis supervise")
    add_observer_options(parser)
    return parser.parse_args(words)


def test_the_options_make_the_observers(tmp_path: Path, capsys):
    run = tmp_path / "run"
    arguments = parse(
        *("--mirror", str(tmp_path / "mirror"), "--mirror_bandwidth", "1MB", "--mirror_keep_every_n_steps", "100"),
        *("--metrics_port", "0", "--webhook", "http://127.0.0.1:9/x", "--log_format", "json"),
    )
    observers = open_observers(arguments, run, open_report(arguments, run))
    assert [type(observer).__name__ for observer in observers] == ["MirrorProcess", "Alerts", "MetricsServer"]
    observers[2].close()  # type: ignore[attr-defined]
    assert '"message": "metrics at http://127.0.0.1:' in capsys.readouterr().out
    assert open_observers(parse(), run, print) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mirror", "nosuch://x"), "nosuch://x cannot be read"),
        (("--mirror", "m", "--mirror_keep_last", "0"), "keep_last is 0"),
        (("--metrics_host", "0.0.0.0"), "--metrics_host needs --metrics_port"),
        (("--metrics_port", "99999"), "cannot listen on 127.0.0.1:99999"),
        (("--webhook", "x"), "is no address of the web"),
        (("--notify_command", ""), "the command for alerts is empty"),
        (("--notify_command", "/no/such/program --now"), "'/no/such/program' is no program that can be started"),
        (("--notify_command", "no-such-program-anywhere"), "correct its name or path"),
    ],
)
def test_mistakes_in_the_options_are_refused_before_the_training(tmp_path: Path, words: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=message):
        open_observers(parse(*words), tmp_path, print)


def test_a_service_file_runs_the_command_without_print(tmp_path: Path, capsys):
    words = ("--print", "systemd", "--metrics_port", "9464", "--", "fit", "--print", "x")
    assert print_file(parse("--print", "systemd"), words, Path("runs/a"))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ExecStart=")]
    assert line.endswith(' -m genesis supervise --metrics_port 9464 "--" fit --print x')
    assert not print_file(parse(), words, Path("runs/a"))


def test_the_command_prints_files_and_takes_the_options(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["supervise", "--print", "alerts"]) == 0
    assert "GenesisCrashesOften" in capsys.readouterr().out
    words = ["supervise", "--print", "slurm", "--max_crashes", "3", "--", "fit", "--run_dir", "runs/b"]
    assert main(words) == 0
    script = capsys.readouterr().out
    assert "--job-name=genesis-runs-b" in script
    assert "supervise --max_crashes 3 -- fit --run_dir runs/b &" in script
    assert main(["supervise", "--print", "slurm"]) == 2
    assert "give the training after --" in capsys.readouterr().err
