"""A writer that is started before its trainer imports Lightning."""

import os
import select
import signal
import subprocess
import sys

import pytest

from genesis_callbacks.base.checkpoint_errors import SaveFailedError
from genesis_callbacks.checkpoint import writer_process
from genesis_callbacks.checkpoint.forked_writer import ForkedWriter
from genesis_callbacks.checkpoint.writer_process import WriterProcess
from genesis_callbacks.checkpoint.writer_start import start_writer

FORK = """
from genesis_callbacks.checkpoint.forked_writer import fork_writer
from genesis_callbacks.checkpoint.writer_start import start_writer_early
start_writer_early(fork_writer)
"""
TRAINER = f"""{FORK}
from genesis_callbacks.checkpoint.writer_process import WriterProcess
from genesis_callbacks.checkpoint.writer_start import start_writer
from genesis_callbacks.checkpoint.writer_start import _early
(early,) = _early
first, second = WriterProcess(), WriterProcess()
assert first._process is early.process
assert second._process is not early.process
for writer in (first, second):
    writer.wait_ready()
    writer.close()
print("both served")
"""
UNUSED = f"""{FORK}
from genesis_callbacks.checkpoint.writer_start import _early
print(_early[0].process.pid)
"""


@pytest.mark.slow
def test_the_first_fit_takes_the_writer_that_was_forked_early_and_a_second_starts_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINER], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "both served\n"), done.stderr


@pytest.mark.slow
def test_an_early_writer_that_no_fit_takes_ends_with_its_process() -> None:
    # The writer inherits the pipe, which is read to its end: the end of the writer.
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) > 0


STARTS = """
import os
from genesis_callbacks.checkpoint.{0} import {1}
from genesis_callbacks.checkpoint.writer_start import start_writer_early, _early
start_writer_early({1})
print(_early[0].process.pid, flush=True)
input()
os.kill(os.getpid(), 9)
"""


def _ends(process, seconds):
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """Makes the interpreter of a writer, which has one thread, hang before its first instruction."""
    hang = "import os, time\nif os.environ.get('MKL_NUM_THREADS') == '1': time.sleep(3600)\n"
    (tmp_path / "sitecustomize.py").write_text(hang)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize(
    "start",
    [
        ("writer_start", "start_writer"),
        pytest.param(("forked_writer", "fork_writer"), marks=[pytest.mark.slow, pytest.mark.each]),
    ],
)
def test_a_writer_that_hangs_before_its_imports_or_is_forked_ends_with_its_trainer(start):
    program = [sys.executable, "-c", STARTS.format(*start)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        writer = os.pidfd_open(int(trainer.stdout.readline()))
        assert not _ends(writer, 0.5)
        trainer.stdin.write(b"\n")
        trainer.stdin.close()
        assert trainer.wait() == -signal.SIGKILL
    assert _ends(writer, 20.0)


@pytest.mark.usefixtures("hanging")
def test_a_writer_that_hangs_at_its_start_is_reported_and_then_named(monkeypatch, capfd):
    monkeypatch.setattr(writer_process, "_QUIET_SECONDS", 0.1)
    monkeypatch.setattr(writer_process, "start_writer", start_writer)  # other tests fork their writers
    writer = WriterProcess()
    with pytest.raises(SaveFailedError, match=r"process \(\d+\) did not start within 0.2 s; look for"):
        writer.wait_ready(0.2)
    writer.close()
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert "has not started in 0.1 s: the machine is busy, or a file system is slow or dead" in line


def test_a_forked_writer_that_somebody_else_has_waited_for_has_ended():
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert ForkedWriter(pid).wait(5.0) == 0
