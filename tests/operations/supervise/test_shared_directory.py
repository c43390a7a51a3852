"""Files that the supervisors of several nodes write into the directory that they share."""

import os
import threading
from pathlib import Path

import pytest

from genesis.base.run_directory import RunDirectory
from genesis.operations.supervise.space import has_space
from genesis.operations.supervise.status import SupervisorStatus, read_status, write_status

_ROUNDS = 200


def run_together(*functions: object) -> list[BaseException]:
    """Calls each function many times, each in a thread of its own, and returns what they raised."""
    raised: list[BaseException] = []

    def repeat(function: object) -> None:
        try:
            for _ in range(_ROUNDS):
                function()  # type: ignore[operator]
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=repeat, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_another_supervisor_may_remove_the_file_that_looks_for_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path).supervisor
    directory.mkdir()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: [path.unlink() for path in directory.iterdir()])
    assert has_space(tmp_path, 4096)


def test_two_supervisors_may_write_the_status_at_the_same_time(tmp_path: Path) -> None:
    status = SupervisorStatus("training", 1, "host", 0.0, 0.0)
    assert run_together(*[lambda: write_status(tmp_path, status)] * 2) == []
    assert read_status(tmp_path) == status
    assert [path.name for path in RunDirectory(tmp_path).supervisor.iterdir()] == ["status.json"]
