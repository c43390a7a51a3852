"""Files are there whole or not at all, whatever meets the process that writes them, and errors name them."""

import errno
import os
import signal
from pathlib import Path

import pytest
from file_faults import OperationFault

from genesis_callbacks.base.files import create_file, replace_file, replacing, staged_file

BEFORE, AFTER = b"before", b"after" * 100_000


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_replaced_all_at_once(tmp_path):
    path = tmp_path / "file"
    replace_file(path, BEFORE)
    with replacing(path) as file:
        file.write(AFTER[:7])
        assert path.read_bytes() == BEFORE
        file.write(AFTER[7:])
    assert path.read_bytes() == AFTER
    with staged_file(path) as staging:
        staging.write_bytes(BEFORE)
        assert path.read_bytes() == AFTER
    assert path.read_bytes() == BEFORE
    assert names_in(tmp_path) == ["file"]


def test_a_block_that_raises_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    replace_file(path, BEFORE)
    for write in (replacing, staged_file):
        with pytest.raises(InterruptedError), write(path, has_rivals=True):
            raise InterruptedError
    assert path.read_bytes() == BEFORE
    assert names_in(tmp_path) == ["file"]


def test_rivals_do_not_write_into_each_others_files(tmp_path):
    path = tmp_path / "file"
    with replacing(path, has_rivals=True) as one:
        one.write(BEFORE)
        with replacing(path, has_rivals=True) as other:
            other.write(AFTER)
        assert path.read_bytes() == AFTER
    assert path.read_bytes() == BEFORE


@pytest.mark.parametrize("act", ["EIO", "full", "dead"])
def test_a_fault_at_any_operation_names_the_file_and_tears_nothing(tmp_path, act):
    path = tmp_path / "file"
    for number in range(1, 20):
        replace_file(path, BEFORE)
        with OperationFault(number, act) as fault:
            try:
                replace_file(path, AFTER)
                error = None
            except OSError as met:
                error = met
        assert path.read_bytes() in (BEFORE, AFTER)
        if not fault.is_met:
            assert path.read_bytes() == AFTER
            break
        assert error is not None
        assert error.errno in (errno.EIO, errno.ENOSPC)
        if error.filename is not None:  # `open` itself names its file, where it is not ours that raises
            assert str(tmp_path) in error.filename
    assert number > 4, "it opens, writes, syncs, and syncs the directory"


def test_a_kill_at_any_operation_tears_nothing_and_the_next_writer_clears_up(tmp_path):
    path = tmp_path / "file"
    for number in range(1, 20):
        replace_file(path, BEFORE)
        pid = os.fork()
        if pid == 0:
            with OperationFault(number, "kill"):
                replace_file(path, AFTER)
            os._exit(0)
        was_killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert path.read_bytes() in (BEFORE, AFTER)
        replace_file(path, AFTER)
        assert names_in(tmp_path) == ["file"]
        if not was_killed:
            break
    assert number > 4


def test_a_full_disk_is_an_error_with_the_name_of_the_file(tmp_path):
    with (
        pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/file.staging'"),
        OperationFault(2, "full"),
    ):
        replace_file(tmp_path / "file", AFTER)
    with (
        pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/new'"),
        create_file(tmp_path / "new") as file,
        OperationFault(1, "full"),
    ):
        file.write(AFTER)


@pytest.mark.parametrize("has_rivals", [False, True])
def test_what_is_no_file_is_never_replaced_and_nothing_is_written(tmp_path, has_rivals):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"is a FIFO, which is never replaced; give the name of a file: '.*pipe'"):
        replace_file(pipe, AFTER, has_rivals=has_rivals)
    with pytest.raises(OSError, match="is a FIFO"), staged_file(pipe, has_rivals=has_rivals):
        pytest.fail("the block must not run")
    link.symlink_to("pipe")
    replace_file(link, AFTER, has_rivals=has_rivals)
    assert (pipe.is_fifo(), link.is_symlink(), link.read_bytes()) == (True, False, AFTER)
    assert names_in(tmp_path) == ["link", "pipe"]
