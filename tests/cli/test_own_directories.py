"""A run may come from others: its directories for records are no links to other places."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genesis.base.errors import UserError
from genesis.base.run_directory import RunDirectory

NAMES = ("evaluations", "crashes", "supervisor", "mirrors", "bases", "chat", "events", "heartbeats", "hangs")


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_that_is_a_link_to_elsewhere_is_refused_by_name(tmp_path: Path, name: str) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    (run / "inside").mkdir(parents=True)
    (run / "checkpoints").symlink_to(other)  # a user may keep them on another disk
    (run / name).symlink_to("inside")
    RunDirectory(run).check_own()
    (run / name).unlink()
    (run / name).symlink_to(other)
    with pytest.raises(UserError, match=f"{name} is a link to .*: what is written about a run stays in its directory"):
        RunDirectory(run).check_own()


@pytest.mark.parametrize("command", [("evaluate", "{}", "--heldout"), ("mirror", "{}", "{}-copy", "--once")])
def test_commands_that_write_into_a_run_refuse_such_a_link(
    genesis: Callable[..., Any], run: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    for name in ("evaluations", "mirrors"):
        assert not (run / name).exists()
        (run / name).symlink_to(tmp_path)
    try:
        outcome = genesis(*(word.format(run) for word in command))
        assert outcome.status == 2
        assert "is a link to" in outcome.err
    finally:
        for name in ("evaluations", "mirrors"):
            (run / name).unlink()
