"""A command that runs for another: it gets the signals, and ends with the process that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genesis.operations.commands import Commands, StepFailedError

CHILD = """
import signal, sys, time
from pathlib import Path

def save(number, frame):
    with open("signals", "a") as file:
        print(signal.Signals(number).name, file=file)
    sys.exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
Path("ready").touch()
time.sleep(60)
"""
STARTER = """
import sys
from genesis.base.errors import QuietExit
from genesis.operations import commands

try:
    commands._run_to_end([sys.executable, "-c", sys.argv[1]])
except KeyboardInterrupt:
    sys.exit(77)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "status", "passed"),
    [(signal.SIGINT, 77, "SIGINT"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGKILL, -9, "SIGTERM")],
    ids=["interrupted", "terminated", "killed"],
)
def test_a_command_gets_a_signal_once_and_ends_with_the_process_that_runs_it(
    number: signal.Signals, status: int, passed: str, tmp_path: Path
) -> None:
    process = subprocess.Popen([sys.executable, "-c", STARTER, CHILD], cwd=tmp_path, env={**os.environ})
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
    process.send_signal(number)
    assert process.wait(60) == status
    signals = tmp_path / "signals"
    while not signals.exists() or not signals.read_text():  # the kernel has the signal for a killed one's command
        time.sleep(0.01)
    assert signals.read_text() == f"{passed}\n"


def test_a_command_that_fails_ends_the_whole_with_its_status() -> None:
    with pytest.raises(StepFailedError, match=r"nothing` ended with status 2") as caught:
        Commands().run("nothing")
    assert (caught.value.status, caught.value.exit_status) == (2, 2)


def test_a_command_that_a_signal_ends_has_the_number_that_a_shell_gives_it() -> None:
    error = StepFailedError(["genesis", "fit"], -signal.SIGKILL)
    assert (str(error), error.exit_status) == ("`genesis fit` was ended by SIGKILL", 137)


def test_the_working_directory_gives_a_command_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the directory of a stranger's model."""
    for name in ("genesis", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path('it-ran').touch()\nraise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    Commands().run("recipes")
    assert not Path("it-ran").exists()
