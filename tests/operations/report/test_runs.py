"""The list of runs: states, figures, forged files, and hundreds of runs at once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genesis.cli.main import main
from genesis.operations.report.runs import find_runs, summarise_run
from genesis.operations.supervise.crashes import CrashRecord, read_crashes, write_crash
from genesis.operations.supervise.status import SupervisorStatus, write_status
from genesis_callbacks.base.events import EventLog
from genesis_callbacks.checkpoint.lineage import DirectoryLock
from genesis_callbacks.heartbeats import HeartbeatRecord, write_heartbeat
from tests.operations.mirror.support import Run, sync

RECIPE = "model: {decoder: {num_layers: 6, dim: 288}}\ndata: {corpus: corpora/python}\n"


def beat(run: Path, phase: str, *, age_seconds: float = 0.0, host: str | None = None, step: int = 40) -> None:
    now = time.time() - age_seconds
    write_heartbeat(
        run,
        HeartbeatRecord(
            *(0, 1, 1, host or os.uname().nodename, phase, step, now, time.monotonic()),  # type: ignore[arg-type]
            clocks={"tokens_seen": 6400},
            loss=2.5,
        ),
    )


def supervise(run: Path, state: str, age_seconds: float = 0.0) -> None:
    now = time.time() - age_seconds
    write_status(run, SupervisorStatus(state, 1, "node", now, now))  # type: ignore[arg-type]


def test_the_figures_come_from_heartbeat_recipe_crashes_and_checkpoints(tmp_path: Path):
    run = Run(tmp_path / "group" / "a")
    run.save(1)
    run.save(2)
    (run.path / "config.yaml").write_text(RECIPE)
    beat(run.path, "ended")
    write_crash(run.path, CrashRecord(1, 1, "hang", 0, 3, 0.0, "", ""))
    (found,) = find_runs(tmp_path)
    summary = summarise_run(found, tmp_path)
    assert (summary.name, summary.recipe, summary.state) == ("group/a", "6 x 288 on python", "ended")
    assert (summary.step, summary.tokens, summary.loss) == (40, 6400, 2.5)
    assert (summary.num_crashes, summary.num_checkpoints) == (1, 2)
    assert summary.num_bytes > sum(file.stat().st_size for file in run.directory.glob("*/*.distcp"))


def test_a_run_without_heartbeats_is_known_by_manifest_log_and_events(tmp_path: Path):
    run = Run(tmp_path / "a")
    run.save(7)
    (run.path / "metrics.csv").write_text("step,train/loss,val/loss\n1,3.0,\n2,2.75,\n2,,2.9\n")
    EventLog(run.path, 0).write("started")
    summary = summarise_run(run.path)
    assert (summary.step, summary.tokens, summary.loss, summary.state) == (7, 700, 2.75, "crashed")
    EventLog(run.path, 0).write("ended")
    assert summarise_run(run.path).state == "ended"


def test_states(tmp_path: Path):
    def state(name: str) -> str:
        return summarise_run(tmp_path / name).state

    beat(tmp_path / "killed", "train")
    beat(tmp_path / "failed", "failed")
    beat(tmp_path / "elsewhere", "train", host="another")
    beat(tmp_path / "lost", "train", host="another", age_seconds=3600)
    beat(tmp_path / "held", "train", age_seconds=3600)
    lock = DirectoryLock(tmp_path / "held" / "checkpoints")
    for name in ("waiting", "recovering", "training", "stopped", "completed"):
        supervise(tmp_path / name, name)
    supervise(tmp_path / "supervisor-gone", "training", age_seconds=3600)
    beat(tmp_path / "supervisor-gone", "train", age_seconds=3600)
    (tmp_path / "new").mkdir()
    try:
        assert [state(name) for name in ("killed", "failed", "elsewhere", "lost", "held")] == [
            *("crashed", "crashed", "training", "crashed", "training")
        ]
    finally:
        lock.release()
    assert [state(name) for name in ("waiting", "recovering", "training", "stopped", "completed")] == [
        *("waiting", "waiting", "training", "stopped", "ended")
    ]
    assert (state("supervisor-gone"), state("new")) == ("crashed", "new")


def test_a_mirror_is_no_run(tmp_path: Path):
    run = Run(tmp_path / "a")
    run.save(1)
    sync(run, tmp_path / "mirror")
    assert find_runs(tmp_path) == [run.path]


def test_forged_files_are_passed_over(tmp_path: Path):
    run = tmp_path / "a"
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").touch()
    (checkpoint / "manifest.json").write_text('{"step": -1, "counters": [], "created_seconds": "x"}')
    (run / "config.yaml").write_text("[" * 5000)
    os.mkfifo(run / "metrics.csv")
    (run / "heartbeats").mkdir()
    (run / "heartbeats" / "rank-0.json").write_text("{")
    summary = summarise_run(run)
    assert (summary.step, summary.tokens, summary.loss, summary.recipe) == (None, None, None, "")
    (run / "config.yaml").write_text('model: {decoder: {num_layers: "\\e[2J", dim: 1}}\ndata: {corpus: "a\\e[2Jb"}\n')
    assert "\x1b" not in summarise_run(run).recipe


def test_the_command_prints_a_table_or_json(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 2
    assert "no such directory: runs" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    assert main(["runs"]) == 2
    assert "there is no run under runs" in capsys.readouterr().err
    beat(tmp_path / "runs" / "a", "ended")
    assert main(["runs"]) == 0
    assert "6,400" in capsys.readouterr().out
    assert main(["runs", "--json"]) == 0
    (content,) = json.loads(capsys.readouterr().out)
    assert (content["name"], content["state"], content["loss"]) == ("a", "ended", 2.5)


@pytest.mark.process
def test_hundreds_of_runs_are_listed_without_torch(tmp_path: Path):
    for number in range(300):
        run = tmp_path / f"run-{number}"
        beat(run, "ended", step=number)
        (run / "config.yaml").write_text(RECIPE)
    program = (
        "import sys\nfrom genesis.cli.main import main\n"
        f"status = main(['runs', {str(tmp_path)!r}, '--json'])\n"
        "sys.exit(status or ('torch' in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)) == 300


@pytest.mark.parametrize("seconds", ["NaN", "-1e999", "1e999", "true", "1" + "0" * 400, "-1e300"])
def test_a_forged_time_is_no_time(tmp_path: Path, seconds: str, capsys: pytest.CaptureFixture[str]):
    checkpoint = tmp_path / "a" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").touch()
    (checkpoint / "manifest.json").write_text(f'{{"step": 1, "created_seconds": {seconds}}}')
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["changed_seconds"] is None


def test_a_carriage_return_in_the_names_of_the_metrics_is_passed_over(tmp_path: Path):
    (tmp_path / "metrics.csv").write_bytes(b"a\rb,train/loss\n1,2\n")
    assert summarise_run(tmp_path).loss is None


@pytest.mark.parametrize(
    "forged", [{"time_seconds": 1e300}, {"time_seconds": -1e17}, {"number": 1 << 61}, {"end_class": "../../x"}]
)
def test_a_forged_record_of_a_crash_is_left_out(
    tmp_path: Path, forged: dict[str, object], capsys: pytest.CaptureFixture[str]
):
    record = CrashRecord(1, 1, "lost_rank", 0, 1, time.time(), "reason", "action")
    path = write_crash(tmp_path, record) / "crash.json"
    assert read_crashes(tmp_path) == [record]
    path.write_text(json.dumps({**json.loads(path.read_text()), **forged}))
    assert main(["crashes", str(tmp_path)]) == 0
    assert "has no crash" in capsys.readouterr().out


def test_the_name_of_a_run_without_crashes_is_printable(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "a\x1b[31mb"
    (run / "crashes").mkdir(parents=True)
    assert main(["crashes", str(run)]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("unit", ["[", "- ", "? "])
def test_a_recipe_that_is_nested_too_deeply_is_passed_over(tmp_path: Path, unit: str):
    (tmp_path / "config.yaml").write_text(unit * 100_000)
    assert summarise_run(tmp_path).recipe == ""
