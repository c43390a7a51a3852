"""The doctor's report: each part in a process with a limit, what was measured stays, and nothing names the machine."""

import getpass
import json
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.base.processes import Ending, run_limited, run_together
from genesis.base.scrub import scrub
from genesis.operations.doctor import main as doctor
from genesis.operations.doctor import parts as parts_module
from genesis.operations.doctor.main import main
from genesis.operations.doctor.parts import PARTS, Part
from genesis.operations.doctor.probe import Findings, Probe, Task, read_findings
from genesis.operations.doctor.report import SCHEMA_VERSION, begin_report, describe_part, judge, print_report
from tests.commands import DEVNULL, start_genesis

PART = Part("copies", "bandwidths", 60.0, "machine:measure_copies")


def run(tmp_path: Path, *words: str) -> tuple[int, dict]:
    out = tmp_path / "report.json"
    status = main(["--device", "cpu", "--dir", str(tmp_path), "--out", str(out), *words])
    return status, json.loads(out.read_text())


# ---- parts that end badly


def entry(findings: Findings, ending: Ending) -> dict:
    return describe_part(PART, findings, ending)


def test_a_part_that_crashes_is_a_line_with_what_it_had_found() -> None:
    found = Findings(figures=[{"name": "copy", "value": 1.5, "unit": "GB/s"}])
    described = entry(found, Ending(-11, 2.0, ("Fatal Python error: Segmentation fault",)))
    assert described["status"] == "failed"
    assert described["reason"] == "ended with signal 11: Fatal Python error: Segmentation fault"
    assert described["figures"] == found.figures


def test_a_part_that_hangs_is_a_line() -> None:
    assert entry(Findings(), Ending(None, 60.0, ()))["reason"] == "did not end within 60 s"


def test_a_failed_check_fails_its_part_and_the_report() -> None:
    report = begin_report("cpu", "tiny", [PART, PART])
    assert judge(report) == "interrupted"
    failed = Findings(checks=[{"name": "bytes", "passed": False, "found": "7"}])
    report["parts"] = [entry(failed, Ending(0, 1.0, ())), entry(Findings(skipped="one device"), Ending(0, 1.0, ()))]
    assert [part["status"] for part in report["parts"]] == ["failed", "skipped"]
    assert judge(report) == "failed"
    report["parts"] = report["parts"][1:]
    assert judge(report) == "passed"


def test_findings_are_on_the_disk_after_each_figure(tmp_path: Path) -> None:
    probe = Probe(Task("cpu", "tiny", str(tmp_path)), tmp_path / "findings.json")
    probe.figure("speed", 1 / 3, "GB/s")
    probe.figure("ratio", float("nan"))
    assert read_findings(tmp_path / "findings.json").figures == [
        {"name": "speed", "value": 0.33333, "unit": "GB/s"},
        {"name": "ratio", "value": "nan", "unit": ""},
    ]


# ---- processes with a limit


@pytest.mark.slow
def test_a_process_and_what_it_started_are_killed_at_the_limit(tmp_path: Path) -> None:
    # The grandchild leaves the session, as a checkpoint's writer does.
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    ending = run_limited([sys.executable, "-c", program], 2.5, tmp_path / "log")
    assert ending.status is None
    (pid,) = map(int, ending.last_lines)
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", "its parent is gone, too"


def test_a_process_that_ends_gives_its_status_and_last_lines(tmp_path: Path) -> None:
    ending = run_limited([sys.executable, "-c", "print('one'); raise SystemExit(3)"], 30, tmp_path / "log")
    assert (ending.status, ending.last_lines) == (3, ("one",))


def test_ranks_end_together(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import sys, time\nif sys.argv[1] == '1': sys.exit(4)\ntime.sleep(60)\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="process 1 of 2 ended with status 4"):
        run_together("sleeper", [["0"], ["1"]], [environment] * 2)
    assert time.monotonic() - begin < 30


# ---- privacy


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("File '/home/someone/lib/torch/x.py', line 3", "File '.../x.py', line 3"),
        ("wrote ~/runs/a/b.json", "wrote .../b.json"),
        ("rank 0 at tcp://10.1.2.3:29500 failed", "rank 0 at URL failed"),
        ("peer 192.168.1.7:1234", "peer ADDRESS"),
        ("GPU-8d8f7e0a-1234-5678-9abc-def012345678", "GPU-UUID"),
        ("3.5 GB/s and 7 tokens/s, 1/2", "3.5 GB/s and 7 tokens/s, 1/2"),
    ],
)
def test_what_identifies_a_machine_is_replaced(text: str, wanted: str) -> None:
    assert scrub(text) == wanted


def test_names_of_the_machine_and_its_user_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-17")
    monkeypatch.setattr(getpass, "getuser", lambda: "alexandra")
    assert scrub("alexandra@gpu-box-17: alexandrax") == "NAME@NAME: alexandrax"


# ---- the command


@pytest.mark.slow
def test_a_report_is_whole_has_units_and_no_path_or_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(tmp_path, "--parts", "devices")
    assert status == 0
    assert report["schema_version"] == SCHEMA_VERSION
    assert report["verdict"] == "passed"
    (part,) = report["parts"]
    assert part["status"] == "passed"
    assert {figure["name"]: figure["unit"] for figure in part["figures"]}["memory"] == "GiB"
    text = json.dumps(report)
    assert scrub(text) == text
    for private in (str(tmp_path), str(Path.home()), socket.gethostname(), sys.prefix):
        assert private not in text
    assert "devices" in capsys.readouterr().out


def test_a_part_without_an_end_fails_the_report_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (part,) = (part for part in PARTS if part.name == "devices")
    short = Part("devices", "names", 0.05, part.target)
    monkeypatch.setattr(doctor, "find_part", lambda name: short if name == "devices" else parts_module.find_part(name))
    status, report = run(tmp_path, "--parts", "devices")
    assert status == 1
    assert report["verdict"] == "failed"
    assert report["parts"][0]["reason"] == "did not end within 0 s"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_leaves_a_report_of_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    parts = ("--parts", "devices,disk,copies,products")
    process = start_genesis("doctor", "--device", "cpu", *parts, "--dir", tmp_path, "--out", out, stdout=DEVNULL)
    deadline = time.monotonic() + 120
    while not out.exists() or '"passed"' not in out.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    report = json.loads(out.read_text())
    assert report["parts"][0]["status"] == "passed"
    assert report["parts"][-1]["status"] == "not run"
    assert report["verdict"] == "interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "these options measure devices: give --device"),
        (["--device", "cuda5"], "no cuda5 device was found"),
        (["--device", "cpu", "--parts", "copies,x"], "--parts has 'x': choose from devices"),
        (["--device", "cpu", "--parts", ","], "--parts has 'no part'"),
        (["--device", "cpu", "--dir", "/no/such"], "--dir is /no/such: no such directory"),
        (["--device", "cpu", "--out", "/no/such/a.json"], "--out is /no/such/a.json: no such directory: /no/such"),
        (["--device", "cpu", "--out", "/"], "--out is /, which is a directory"),
        (["--device", "cpu", "--patience", "0"], "--patience is 0.0"),
        (["--devise", "cpu"], "did you mean --device"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        main(words)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_full_disk_names_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(report: object, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(doctor, "write_report", write)
    with pytest.raises(OSError, match=r"No space left on device.*report.json"):
        run(tmp_path, "--parts", "devices")


def test_the_table_shows_markup_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    report = begin_report("cpu", "tiny", [PART])
    report["parts"] = [entry(Findings(notes=["[red]not red"]), Ending(0, 1.0, ()))]
    print_report(report, doctor.Console(width=100))
    assert "[red]not red" in capsys.readouterr().out
