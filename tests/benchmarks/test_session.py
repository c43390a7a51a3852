"""A session for a borrowed GPU: the record is whole after every part, is continued honestly, and names no machine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import device, device_repeat, session, session_plan
from benchmarks.session import main, read_tests
from benchmarks.session_plan import USUAL_SECONDS, SessionPart, plan_session
from genesis.base.errors import UserError
from genesis.base.processes import Ending
from genesis.base.scrub import scrub_all
from genesis.model.attend.table import KERNELS
from genesis.optim import AdamW
from tests.commands import REPOSITORY, run_module

ANSWER = (
    "import json, sys, time; time.sleep(float(sys.argv[2])); json.dump({'findings': ['2 ms']}, open(sys.argv[1], 'w'))"
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
    assert entries[0]["figures"] == {"findings": ["2 ms"]}
    assert entries[1]["reason"] == "did not end within 1 s"
    assert entries[2]["last_lines"] == ["no luck"]
    page = (tmp_path / "record.md").read_text()
    assert "| good | passed |" in page
    assert "| 2 ms |" in page
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


def test_a_part_that_the_total_time_cuts_has_not_failed(
    tmp_path: Path, plan: list[SessionPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_LEAST_SECONDS", 0.1)
    plan += [part("long", 60.0, 60.0)]
    status, entries = run(tmp_path / "record.json", "--minutes", "0.02")
    assert status == 0
    assert (entries[0]["status"], entries[0]["reason"]) == ("not run to its end", "the 0.02 minutes were over")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda7"], "no cuda7 device was found"),
        (["--device", "cpu", "--minutes", "0"], "--minutes is 0.0"),
        (["--device", "cpu", "--minutes", "nan"], "--minutes is nan"),
        (["--device", "cpu", "--out", "/no/such/a.json"], "no such directory: /no/such"),
        (["--size", "huge"], "--size is 'huge': give one of "),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        main(words)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_repeatability_comes_first_and_the_usual_parts_fit_fifteen_minutes() -> None:
    parts = plan_session("cuda", "full")
    names = [part.name for part in parts]
    usual = names[: names.index("doctor") + 1]
    assert usual == ["repeat", "attention", "step", "step-free", "tests", "doctor"]
    assert sum(part.limit_seconds for part in parts[: len(usual)]) <= USUAL_SECONDS
    assert {"save-memory", "lora", "serving", "step-lora-8b", "step-float8", "step-beside-transformers"} < set(names)
    assert len(set(names)) == len(names)


def test_each_kernel_is_measured_as_the_command_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_plan, "find_version", lambda: "4.0")
    words = {part.name: " ".join(part.words) for part in plan_session("cuda", "full")}
    for kernel in ("fa4", "flex", "flash"):
        assert f"genesis-packed+model.attention={kernel}" in words["step"]
    assert "genesis-packed+trainer.deterministic=false,bare" in words["step-free"]
    assert "no:benchmark" in words["tests"]


PYTEST_LOG = """
[gw0] [  5%] PASSED tests/cuda/test_device.py::test_one
[gw1] [ 10%] FAILED tests/cuda/test_device.py::test_two[a - b]
tests/cuda/test_device.py::test_three SKIPPED (no kernel)     [ 15%]
tests/cuda/test_device.py::test_four PASSED                   [ 20%]
[gw0] [ 25%] ERROR tests/cuda/test_device.py::test_five
=========================== short test summary info ============================
FAILED tests/cuda/test_device.py::test_two[a - b] - RuntimeError: no kernel image
"""


def test_failed_tests_are_named_with_their_reason() -> None:
    found = read_tests(PYTEST_LOG)
    assert found["tests"]["passed"] == ["tests/cuda/test_device.py::test_one", "tests/cuda/test_device.py::test_four"]
    assert found["tests"]["skipped"] == ["tests/cuda/test_device.py::test_three"]
    assert found["findings"][1:] == [
        "failed tests/cuda/test_device.py::test_two[a - b]: RuntimeError: no kernel image",
        "failed tests/cuda/test_device.py::test_five",
    ]


@pytest.mark.process
def test_the_names_of_tests_of_a_real_run_are_in_the_record(tmp_path: Path, plan: list[SessionPart]) -> None:
    tests = tmp_path / "test_tries.py"
    tests.write_text("def test_good(): pass\ndef test_bad():\n    assert 1 == 2\n")
    words = ("-m", "pytest", "-v", "-rfE", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tests))
    plan.append(SessionPart("tests", "what is tests", words, 240.0))
    status, (entry,) = run(tmp_path / "record.json")
    assert status == 1
    ((good,), (bad,)) = (entry["figures"]["tests"][outcome] for outcome in ("passed", "failed"))
    assert good.endswith("test_tries.py::test_good")
    assert bad.endswith("test_tries.py::test_bad")
    assert "assert 1 == 2" in (tmp_path / "record.md").read_text()


def test_a_module_that_is_not_installed_is_the_reason_to_skip(tmp_path: Path, plan: list[SessionPart]) -> None:
    plan += [
        SessionPart("fa4", "needs a package", ("-c", ""), 5.0, needs="no_such_package.cute"),
        SessionPart("torch", "needs torch", ("-c", ""), 20.0, needs="torch.nn"),
    ]
    _, entries = run(tmp_path / "record.json")
    assert [entry["status"] for entry in entries] == ["skipped", "passed"]
    assert entries[0]["reason"] == "this installation has no no_such_package.cute"


def test_two_runs_that_differ_fail_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that depends on how often it was run stands for kernels that add in any order."""
    calls = iter(range(100))

    def train(kind: str, size: str, setting: Any) -> Any:
        value = 0.0 if isinstance(setting.optimizer, AdamW) else float(next(calls))
        return {"weight": torch.tensor(value)}, [1.0, 1.0, value], 0.1

    monkeypatch.setattr(device_repeat, "_train", train)
    found = device_repeat.measure_repeats("cpu", "tiny")
    assert found["failures"] == ["muon: differs from step 3"]
    assert found["settings"]["as genesis fit"]["is_bit_equal"]


def test_what_need_not_repeat_may_differ_and_what_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(kind: str, size: str, setting: Any) -> Any:
        if "model.attention=fa4" in setting.options:
            raise UserError("attention fa4 needs the package flash-attn-4")
        value = torch.rand(()) if "trainer.deterministic=false" in setting.options else torch.zeros(())
        return {"weight": value}, [1.0, 1.0], 0.1

    monkeypatch.setattr(device_repeat, "_train", train)
    found = device_repeat.measure_repeats("cuda", "full")
    assert found["failures"] == []
    assert found["settings"]["fa4, compiled"] == {"reason": "attention fa4 needs the package flash-attn-4"}
    assert not found["settings"]["not deterministic"]["is_bit_equal"]


def test_each_kernel_of_attention_is_measured_or_has_a_reason(tmp_path: Path) -> None:
    out = tmp_path / "part.json"
    assert device.main(["attention", "--device", "cpu", "--size", "tiny", "--out", str(out)]) == 0
    kernels = json.loads(out.read_text())["kernels"]
    assert kernels.keys() == {f"{name}{end}" for name in (*KERNELS, "rows") for end in ("", ", deterministic")}
    assert "needs a CUDA device" in kernels["fa4"]["reason"]
    ran = [one for one in kernels.values() if "reason" not in one]
    assert len(ran) >= 4
    assert all(one["is_repeatable"] and one["forward_ms"] > 0 for one in ran)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ["serving", "repeat"])  # the latter is the part that passes below
def test_parts_that_train_and_serve_measure_on_the_cpu(name: str, tmp_path: Path) -> None:
    out = tmp_path / "part.json"
    words = [name, "--device", "cpu", "--size", "tiny", "--out", str(out)]
    done = run_module("benchmarks.device", *words, cwd=REPOSITORY, timeout=250)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    if name == "repeat":
        assert all(setting["is_bit_equal"] for setting in record["settings"].values())
    else:
        assert record["1 clients"]["tokens"] > 0
        assert record["4 clients"]["tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_leaves_the_record_of_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "benchmarks",
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
    assert scrub_all(record) == record
