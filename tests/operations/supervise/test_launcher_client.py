"""The launcher as a supervisor sees it: started again if a signal ends it, and freed of ranks that were left."""

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from genesis.base.processes import Mark
from genesis.operations.supervise import launcher_client
from genesis.operations.supervise.launcher_client import LauncherClient, build_probe
from genesis_callbacks.base.errors import RunEndedError


@pytest.mark.process
@pytest.mark.parametrize(("script", "num_starts"), [("kill -9 $$", 3), ("exit 3", 1)])
def test_a_launcher_that_is_killed_at_its_start_is_started_again(
    script: str, num_starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []

    def start(directory: Path, mark: Mark) -> Any:
        started.append(directory)
        return subprocess.Popen(["sh", "-c", script])

    monkeypatch.setattr(launcher_client, "start_launcher", start)
    with pytest.raises(RunEndedError, match="the launcher of ranks did not start"):
        LauncherClient(tmp_path, Mark("M", "x")).start()
    assert len(started) == num_starts


@pytest.mark.slow
@pytest.mark.process
def test_a_supervisor_that_is_started_again_ends_the_ranks_that_were_left_and_forks_others(tmp_path: Path) -> None:
    mark = Mark("M", "x")
    left = LauncherClient(tmp_path, mark)
    left.start()
    job = build_probe("tests.operations.supervise.test_launcher_client:wait_long", [], tmp_path, mark)
    (child,) = left.fork(3, [job]).children
    left.close()  # the supervisor is killed
    client = LauncherClient(tmp_path, mark)
    assert client.connect()
    with pytest.raises(RunEndedError, match="children of the attempt before still run"):
        client.fork(4, [job])
    client.end_children()
    assert client.state is not None
    assert [each.status for each in client.state.children] == [-signal.SIGKILL]
    (again,) = client.fork(4, [job]).children
    assert again.pid != child.pid
    client.end_children()
    client.leave()
    assert left._process is not None
    assert left._process.wait(60.0) == 0


def wait_long(arguments: list[str]) -> int:
    signal.pause()
    return 0
