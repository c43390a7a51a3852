"""A writer that is started before its trainer has imported torch."""

import subprocess
import sys

import pytest

TRAINER = """
import sys
from genesis_callbacks.checkpoint import start_writer_early
start_writer_early()
assert "torch" not in sys.modules
from genesis_callbacks.checkpoint.writer_process import WriterProcess
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
UNUSED = """
from genesis_callbacks.checkpoint import start_writer_early
from genesis_callbacks.checkpoint.writer_start import _early
start_writer_early()
print(_early[0].process.pid)
"""


@pytest.mark.slow
def test_the_first_fit_takes_the_writer_that_was_started_early_and_a_second_starts_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINER], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "both served\n"), done.stderr


@pytest.mark.slow
def test_an_early_writer_that_no_fit_takes_ends_with_its_process() -> None:
    # The writer inherits the pipe, which is read to its end: the end of the writer.
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) > 0
