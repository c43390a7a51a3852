"""A session for a borrowed GPU: the record is whole after every part, is continued honestly, and names no machine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from genesis.bench import device_parts, session
from genesis.bench.session import SessionPart, main, plan_session
from genesis.errors import UserError
from genesis.processes import Ending
from genesis.scrub import scrub

ANSWER = (
    "import json, sys, time; time.sleep(float(sys.argv[2])); "
    "json.dump({'before': 2.0, 'after': 1.0, 'unit': 's'}, open(sys.argv[1], 'w'))"
)


def part(name: str, seconds: float = 0.0, limit_seconds: float = 20.0, program: str = ANSWER) -> SessionPart:
    return SessionPart(name, f"what is {name}", ("-c", program, "{out}", str(seconds)), limit_seconds)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> list[SessionPart]:
    """The parts of the session, which a test fills."""
    parts: list[SessionPart] = []
    monkeypatch.setattr(session, "plan_session", lambda kind, size: parts)
    return parts


def run(out: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    status = main(["--device", "cpu", "--out", str(out), *words])
    return status, json.loads(out.read_text())["parts"]


def test_each_part_leaves_its_figures_or_its_reason(tmp_path: Path, plan: list[SessionPart]) -> None:
    plan += [part("good"), part("slow", 60.0, 1.0), part("bad", program="raise SystemExit('no luck')")]
    plan.append(SessionPart("absent", "needs more", ("-c", ""), 5.0, needs="no/such/path"))
    status, entries = run(tmp_path / "record.json")
    assert status == 1
    assert [entry["status"] for entry in entries] == ["passed", "failed", "failed", "skipped"]
    assert entries[0]["figures"] == {"before": 2.0, "after": 1.0, "unit": "s"}
    assert entries[1]["reason"] == "did not end within 1 s"
    assert entries[2]["last_lines"] == ["no luck"]
    page = (tmp_path / "record.md").read_text()
    assert "| good | passed |" in page
    assert "before 2, after 1 (s)" in page
    text = (tmp_path / "record.json").read_text()
    assert str(tmp_path) not in text + page


def test_a_second_run_keeps_what_passed_and_runs_the_rest(tmp_path: Path, plan: list[SessionPart]) -> None:
    out = tmp_path / "record.json"
    plan += [part("good"), part("bad", program="raise SystemExit(1)")]
    _, before = run(out)
    plan[:] = [part("good", program="raise SystemExit(1)"), part("bad")]
    status, after = run(out)
    assert status == 0
    assert after[0] == before[0]
    assert after[1]["status"] == "passed"
    status, again = run(out, "--replace")
    assert [entry["status"] for entry in again] == ["failed", "passed"]


def test_a_record_of_another_version_is_not_continued(tmp_path: Path, plan: list[SessionPart]) -> None:
    out = tmp_path / "record.json"
    plan.append(part("good"))
    run(out)
    record = json.loads(out.read_text())
    out.write_text(json.dumps({**record, "versions": {"torch": "1.0"}}))
    with pytest.raises(UserError, match=r"record\.json has versions .* give --replace"):
        run(out)
    out.write_text("{}")
    with pytest.raises(UserError, match="is no record of a session"):
        run(out)


def test_parts_after_the_time_are_named(
    tmp_path: Path, plan: list[SessionPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan += [part("first"), part("second")]
    times = iter([0.0, 0.0, 100.0])
    monkeypatch.setattr(session.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(session, "run_limited", lambda *arguments: Ending(0, 1.0, ()))
    status, entries = run(tmp_path / "record.json", "--minutes", "1")
    assert status == 0
    assert [entry["status"] for entry in entries] == ["passed", "not run"]
    assert entries[1]["reason"] == "the 1 minutes were over"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda7"], "no cuda7 device was found"),
        (["--device", "cpu", "--minutes", "0"], "--minutes is 0.0"),
        (["--device", "cpu", "--minutes", "nan"], "--minutes is nan"),
        (["--device", "cpu", "--out", "/no/such/a.json"], "no such directory: /no/such"),
        (["--size", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        main(words)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_correctness_comes_before_speed() -> None:
    names = [part.name for part in plan_session("cuda", "full")]
    assert names[:4] == ["doctor", "tests", "checkpoint", "step"]
    assert [name for name in names if "micro-batch" in name] == [
        *("step-micro-batch-1", "step-micro-batch-1-compiled", "step-micro-batch-2", "step-micro-batch-2-compiled")
    ]
    assert names[-3:] == ["sampling", "decoding", "loss"]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", device_parts.PARTS)
def test_single_parts_measure_on_the_cpu(name: str, tmp_path: Path) -> None:
    out = tmp_path / "part.json"
    assert device_parts.main([name, "--device", "cpu", "--size", "tiny", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    sides = record["greedy"] if name == "sampling" else record
    assert sides.get("after", sides.get("before")) > 0
    if name == "loss":
        assert record["loss before"] == pytest.approx(record["loss after"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_leaves_the_record_of_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "genesis",
        "bench",
        "session",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 200
    while not out.exists() or '"passed"' not in out.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(60) == 130
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGABRT)  # prints where it is
    record = json.loads(out.read_text())
    assert record["parts"][0]["status"] == "passed"
    assert record["parts"][-1]["status"] == "not run"
    assert scrub(json.dumps(record)) == json.dumps(record)
