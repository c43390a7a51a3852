"""The start of a launcher: one that a signal ends is started again, one that ends by its own error is not."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from genesis.processes import Mark
from genesis.supervise import launcher_client
from genesis.supervise.launcher_client import LauncherClient
from genesis_callbacks.errors import RunEndedError


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
