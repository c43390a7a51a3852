"""A rehearsal finds, kills and ends its own processes wherever they have gone, and nobody else's."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genesis.base import processes
from genesis.base.processes import Mark, end_all, find_processes, kill_process, wait_until_gone
from genesis.operations.rehearse.processes import MARK_NAME, Training
from genesis_callbacks.base.files import replace_file

DEADLINE_SECONDS = 60
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
# Goes on when its parent has ended, in another session: as a checkpoint writer does.
LEAVE_AN_ORPHAN = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
    "start_new_session=True)"
)


@pytest.fixture
def mark() -> Iterator[Mark]:
    mark = Mark(MARK_NAME, uuid.uuid4().hex)
    yield mark
    end_all(mark)


def start(command: list[str], mark: Mark) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, mark.name: mark.value})


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_only_marked_processes_are_found_and_ended(mark: Mark) -> None:
    ours, other = start(SLEEP, mark), start(SLEEP, Mark(MARK_NAME, uuid.uuid4().hex))
    try:
        for process in (ours, other):
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        assert [process.pid for process in find_processes(mark)] == [ours.pid]
        assert not kill_process(other.pid, mark)
        end_all(mark)
        assert ours.wait(DEADLINE_SECONDS) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.communicate()


def test_an_orphan_in_a_session_of_its_own_is_found_and_ended(mark: Mark) -> None:
    subprocess.run([sys.executable, "-c", LEAVE_AN_ORPHAN], check=True, env={**os.environ, mark.name: mark.value})
    (orphan,) = find_processes(mark)
    assert (orphan.pid, orphan.group) == (orphan.pid, orphan.pid)
    assert wait_until_gone(mark, 0.1) == [orphan]
    end_all(mark)
    assert find_processes(mark) == []


def write_process(proc: Path, pid: int, environment: bytes, flags: int = 0x400000) -> None:
    fields = [b"0"] * 50
    fields[0], fields[6], fields[48] = b"R", b"%d" % flags, b"4096" if environment else b"0"
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    contents = {
        "cmdline": b"sleep\0",
        "environ": environment,
        "stat": b"%d (sleep (a)) %s\n" % (pid, b" ".join(fields)),
    }
    for name, content in contents.items():
        replace_file(proc / str(pid) / name, content)


def test_a_process_whose_program_is_still_being_loaded_is_found(
    mark: Mark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Linux 6.18 with busy cores: 18 of 1500 processes had no environment yet when Popen had returned.
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    write_process(tmp_path, 7, b"")
    write_process(tmp_path, 8, b"", flags=0x200000)  # a kernel thread, for whose environment nobody waits
    loaded = threading.Timer(0.2, write_process, (tmp_path, 7, f"{mark.name}={mark.value}\0".encode()))
    loaded.start()
    (found,) = find_processes(mark)
    assert (found.pid, found.name) == (7, "sleep (a)")
    loaded.join()
    monkeypatch.undo()


def test_a_training_is_its_ranks_and_is_killed_as_a_whole(mark: Mark, tmp_path: Path) -> None:
    # Stands in for `python -m genesis fit` by its command line alone: rank 0 starts rank 1 as Lightning does.
    (tmp_path / "genesis.py").write_text(
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "if 'LOCAL_RANK' not in os.environ:\n"
        "    command = [sys.executable, '-m', 'genesis', 'fit']\n"
        "    subprocess.Popen(command, env={**os.environ, 'LOCAL_RANK': '1'})\n"
        "time.sleep(600)\n"
    )
    command = ["env", "-C", str(tmp_path), sys.executable, "-m", "genesis", "fit"]
    training = Training(command, tmp_path / "log", mark)
    wait_for(lambda: set(training.ranks()) == {0, 1})
    assert training.writers() == {}
    rank_1 = training.ranks()[1]
    assert training.kill_one(rank_1)
    wait_for(lambda: set(training.ranks()) == {0})
    assert training.poll() is None
    assert training.wait_ended(0.1) is None
    training.kill_ranks()
    assert training.wait_ended(DEADLINE_SECONDS) is not None
    assert training.poll() == -signal.SIGKILL
    # What ranks have started beside them was in their group.
    assert wait_until_gone(mark, DEADLINE_SECONDS) == []
