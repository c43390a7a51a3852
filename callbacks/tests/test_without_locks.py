"""Runs on a file system without locks: one in this machine's temporary directory stands in.

Reported as tox-dev/filelock#67 and python-poetry/poetry#8825 (Lustre without the mount option `flock`).
"""

import errno
import fcntl
import os
import signal
import tempfile
from pathlib import Path

import pytest

from genesis_callbacks._rank_watch import RankWatch
from genesis_callbacks.base.checkpoint_errors import DirectoryInUseError
from genesis_callbacks.base.errors import RunEndedError, describe_error
from genesis_callbacks.base.locks import lock_file, open_lock
from genesis_callbacks.checkpoint.job import hold_staging
from genesis_callbacks.checkpoint.lineage import DirectoryLock, find_holder, wait_for_orphans

CODES = [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK]


@pytest.fixture(params=CODES, ids=errno.errorcode.get)
def shared(request, tmp_path, monkeypatch):
    """Returns a directory without locks; the machine's directory for temporary files has them."""
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    flock = fcntl.flock

    def refuse(descriptor, kind):
        if not Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(local):
            raise OSError(request.param, os.strerror(request.param))
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", refuse)
    return tmp_path / "shared"


def test_a_run_is_held_against_other_processes_of_this_machine_and_one_line_says_what_is_not_covered(shared, capfd):
    lock = DirectoryLock(shared)
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert f"{shared} is on a file system without locks (" in line
    assert "but none on other machines: use it from one machine at a time" in line
    with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()}"):
        DirectoryLock(shared)
    capfd.readouterr()
    child = os.fork()
    if child == 0:
        os._exit(0 if find_holder(shared) == str(os.getppid()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().err == "", "a look reports nothing"
    lock.release()
    assert find_holder(shared) is None
    DirectoryLock(shared).release()


def test_a_machine_without_any_locks_is_refused_in_one_line(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(RunEndedError, match=r"no locks here .* and none in .*: set TMPDIR to a directory on a local"):
        DirectoryLock(shared)


def test_a_file_system_that_fails_is_named_with_what_to_look_at(tmp_path, monkeypatch):
    def fail(descriptor, kind):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output error") as raised:
        DirectoryLock(tmp_path)
    assert describe_error(raised.value).endswith(
        f"error: '{tmp_path}'; its disk, or the server of its file system, has failed: see the kernel's log (`dmesg`)"
    )


def test_a_restart_waits_for_the_writer_of_a_killed_trainer(shared):
    staging = shared / "step-00000003.staging-0"
    staging.mkdir(parents=True)
    told, tell = os.pipe()
    writer = os.fork()
    if writer == 0:
        with hold_staging(staging):
            os.write(tell, b"!")
            signal.pause()
    os.read(told, 1)
    try:
        assert wait_for_orphans(shared, 0.0, is_reported=False) == [staging.name]
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert wait_for_orphans(shared, 0.0) == []


def test_a_rank_of_this_machine_that_is_gone_is_still_named(shared):
    shared.mkdir()
    watch, other = RankWatch(shared, 0, 2, 1.0), RankWatch(shared, 1, 2, 1.0)
    assert watch.describe_lost() is None
    other._descriptor.close()  # as the kernel does with a process that is killed
    assert watch.describe_lost() == f"rank 1 (process {os.getpid()})"
    watch.stop()


def test_ranks_of_two_machines_are_not_taken_for_lost(shared, tmp_path, monkeypatch):
    shared.mkdir()
    one = RankWatch(shared, 0, 2, 0.1)
    (tmp_path / "local/second").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local/second"))
    other = RankWatch(shared, 1, 2, 0.1)
    with pytest.warns(UserWarning, match="has no locks between ranks"):
        other.start()
    assert other.describe_lost() is None
    one.stop()
    other.stop()


def test_a_lock_that_is_refused_for_another_reason_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (tmp_path / "file").open("w") as file:
        descriptor = file.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock_file(descriptor, fcntl.LOCK_EX)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux to find the path of a descriptor")
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_lock_without_a_report_is_named_by_its_file(tmp_path, monkeypatch, number):
    def fail(descriptor, kind):
        raise OSError(number, os.strerror(number))

    with open_lock(tmp_path / "lock") as lock:
        monkeypatch.setattr(fcntl, "flock", fail)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            lock_file(lock.fileno(), fcntl.LOCK_EX)
    assert caught.value.filename == str(tmp_path / "lock")
