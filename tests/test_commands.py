"""A forked command is as one that is started: it sees the same, ends the same, and gets signals."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from genesis_callbacks.testing import run_ranks
from tests.commands import PIPE, REPOSITORY, ForkedCommand, run_genesis, run_module, start_genesis

pytestmark = pytest.mark.process


@pytest.mark.parametrize("end", ["0", "3", "error", "killed"])
def test_a_forked_command_sees_and_ends_as_a_started_one(end: str, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GENESIS_TEST_VARIABLE": "given"}
    words = ("tests.fresh", end, "--an option", "{x: 1}")
    started = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    forked = run_module(*words, cwd=tmp_path, env={**environment, "PYTHONUNBUFFERED": "1"})
    seen, expected = json.loads(forked.stdout), json.loads(started.stdout)
    assert {key: value for key, value in seen.items() if value != expected[key]} == {}
    assert seen.keys() == expected.keys()
    assert seen["environment"]["GENESIS_TEST_VARIABLE"] == "given"
    assert forked.returncode == started.returncode
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_what_a_forked_command_starts_is_forked_too_with_a_session_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("import os; print(os.getppid(), os.getsid(0) == os.getpid())")
    (tmp_path / "outer.py").write_text(
        "import os, sys\n"
        "from genesis.base.processes import start_program\n"
        "print(os.getppid(), flush=True)\n"
        "sys.exit(start_program([sys.executable, 'inner.py'], start_new_session=True).wait())"
    )
    done = run_module(str(tmp_path / "outer.py"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    server, *found = done.stdout.split()
    assert found == [server, "True"]


def loaded_modules() -> set[str]:
    return set(sys.modules)


def test_a_rank_finds_torch_lightning_and_the_application_imported() -> None:
    (loaded,) = run_ranks(loaded_modules, 1)
    assert {"torch", "lightning.pytorch", "genesis.train.module", "genesis.cli.fit"} <= loaded


@pytest.mark.slow
def test_what_is_printed_last_arrives(tmp_path: Path) -> None:
    done = run_genesis("--version", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("genesis ")
    with (
        (tmp_path / "output").open("w") as output,
        start_genesis("no-such-command", stdout=output, stderr=output) as it,
    ):
        assert it.wait() == 2
    assert "no-such-command" in (tmp_path / "output").read_text()


def test_a_command_that_nobody_waits_for_is_forgotten_after_its_end_and_reported_before(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = ForkedCommand("tokenize", fifo)
    pid = command.pid
    with pytest.warns(ResourceWarning, match=f"process {pid} still runs: .*tokenize"):
        del command
    os.kill(pid, signal.SIGKILL)
    command = ForkedCommand("tokenize", fifo)
    command.kill()
    while not command._is_reported(None):
        pass
    del command  # a warning would be an error


def test_commands_run_beside_one_another_and_a_kill_reaches_one(tmp_path: Path) -> None:
    fifos = [tmp_path / name for name in "ab"]
    for fifo in fifos:
        os.mkfifo(fifo)
    # Each waits for a writer of its pipe.
    commands = [ForkedCommand("tokenize", fifo, stdout=PIPE, stderr=PIPE) for fifo in fifos]
    first, second = commands
    with first, second:
        assert first.pid != second.pid
        assert (first.poll(), second.poll()) == (None, None)
        with pytest.raises(subprocess.TimeoutExpired):
            first.communicate(timeout=0.01)
        first.kill()
        assert first.wait() == -signal.SIGKILL
        assert second.poll() is None
        threading.Thread(target=fifos[1].write_text, args=("x = 1\n",)).start()
        out, err = second.communicate()
        assert (second.returncode, err) == (0, "")
        assert "NAME" in out


@pytest.mark.parametrize("value", ["x" * 500_000, b"\xff" * 500_000, 10**5000])
def test_a_test_with_a_long_parameter_can_start_programs(value: str | bytes | int) -> None:
    assert len(os.environ["PYTEST_CURRENT_TEST"]) < 1000
    subprocess.run([sys.executable, "-c", ""], check=True)
