"""`make stress` counts how often a test fails beside busy processes, which end with it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import stress

PROGRAM = Path(stress.__file__)
EVERY_SECOND_TIME = """
    from pathlib import Path

    def test_other():
        raise AssertionError("not asked for")

    def test_second():
        times = Path(__file__).with_name("times")
        times.write_text(times.read_text() + "x" if times.exists() else "x")
        assert len(times.read_text()) % 2 == 0, f"time {len(times.read_text())}"
"""
WAITING = """
    import time
    from pathlib import Path

    def test_waiting():
        Path(__file__).with_name("started").touch()
        time.sleep(1000)
"""


def write_test(root: Path, text: str) -> None:
    root.mkdir(exist_ok=True)
    (root / "test_it.py").write_text(textwrap.dedent(text))
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = ["-p", "no:benchmark"]\n')


@pytest.mark.slow
def test_failures_are_counted_and_the_first_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The tests of this directory run in it.
    write_test(tmp_path / "callbacks", EVERY_SECOND_TIME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stress, "NUM_TIMES", 3)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("T", "callbacks/test_it.py::test_second")
    assert stress.main() == 1
    out = capfd.readouterr().out
    assert out.count("AssertionError: time 1") > 0
    assert "AssertionError: time 3" not in out
    assert out.endswith("callbacks/test_it.py::test_second: failed 2 of 3 times beside 4 busy processes\n")


def test_a_test_that_does_not_exist_runs_once_and_names_pytests_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("T", "test_none.py")
    assert stress.main() == 2
    assert capfd.readouterr().out.count("file or directory not found: test_none.py") == 1


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_the_load_ends_with_the_program(number: signal.Signals, tmp_path: Path) -> None:
    write_test(tmp_path, WAITING)
    environ = {**os.environ, "T": "test_it.py", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen(
        [sys.executable, PROGRAM], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, process_group=0
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == stress.NUM_BUSY + 1
    if number == signal.SIGINT:  # As a terminal sends it: to all of them.
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
        os.kill(children[-1], signal.SIGKILL)  # The waiting test.
    process.communicate()
    # The end of the output is the end of all that held it open; the load among them.
    assert process.returncode == (130 if number == signal.SIGINT else -number)
