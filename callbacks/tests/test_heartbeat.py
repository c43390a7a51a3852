"""Where a rank stands, on the disk once a second, and what a reader makes of it."""

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from clock_runs import LIGHTNING_WARNINGS, Module, loader, trainer
from lightning.pytorch import Callback

from genesis_callbacks import Heartbeat, TokenCounters
from genesis_callbacks.base.run_directory import RunDirectory
from genesis_callbacks.heartbeat import HeartbeatWarning
from genesis_callbacks.heartbeats import HeartbeatRecord, read_heartbeats, write_heartbeat

pytestmark = LIGHTNING_WARNINGS

TOKENS = [5, 7, 11, 13, 17, 19]
RECORD = HeartbeatRecord(
    *(1, 2, 4242, "node", "train", 40, 1_700_000_000.5, 12.5),
    *({"tokens_seen": 640}, 2.5, 320.0, {"setup": 1.0, "train": 2.0}),
)


def test_a_heartbeat_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, RECORD)
    write_heartbeat(tmp_path, replace(RECORD, rank=0, loss=None, units_per_second=None))
    found = read_heartbeats(tmp_path)
    assert found[1] == RECORD
    assert (found[0].loss, found[0].units_per_second) == (None, None)
    assert sorted(path.name for path in RunDirectory(tmp_path).heartbeats.iterdir()) == ["rank-0.json", "rank-1.json"]


def test_a_heartbeat_of_an_earlier_release_counted_tokens(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, RECORD)
    path = RunDirectory(tmp_path).heartbeat_file(1)
    content = json.loads(path.read_text())
    del content["unit"]
    content["tokens_per_second"] = content.pop("units_per_second")
    path.write_text(json.dumps(content))
    assert read_heartbeats(tmp_path) == {1: RECORD}


def test_a_loss_that_is_not_a_number_is_written(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, replace(RECORD, loss=math.nan))
    loss = read_heartbeats(tmp_path)[1].loss
    assert loss is not None
    assert math.isnan(loss)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"rank": 1}', "x" * 20_000, json.dumps({"rank": True}), "[" * 5_000],
    ids=["empty", "torn", "list", "null", "short", "long", "bool", "deep"],
)
def test_what_is_no_heartbeat_is_skipped(tmp_path: Path, text: str) -> None:
    write_heartbeat(tmp_path, RECORD)
    RunDirectory(tmp_path).heartbeat_file(0).write_text(text)
    os.mkfifo(RunDirectory(tmp_path).heartbeat_file(2))
    assert list(read_heartbeats(tmp_path)) == [1]


def test_a_run_without_heartbeats_has_none(tmp_path: Path) -> None:
    assert read_heartbeats(tmp_path / "missing") == {}


class Follow(Callback):
    """Collects what a reader finds after each batch."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.steps: list[int] = []
        self.phases: list[str] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        record = read_heartbeats(self.run_dir)[0]
        self.steps.append(record.step)
        self.phases.append(record.phase)


def test_a_fit_writes_its_clocks_and_its_phases(tmp_path: Path) -> None:
    follow, before = Follow(tmp_path / "run"), time.monotonic()
    callbacks = [TokenCounters(), Heartbeat(tmp_path / "run", every_seconds=0), follow]
    trainer(tmp_path, callbacks).fit(Module({}), loader(TOKENS))
    assert follow.steps == [1, 2, 3, 4, 5, 6]
    assert set(follow.phases) == {"train"}
    record = read_heartbeats(tmp_path / "run")[0]
    assert (record.phase, record.step, record.pid, record.world_size) == ("ended", 6, os.getpid(), 1)
    tokens = {"tokens_seen": sum(TOKENS), "tokens_updated": sum(TOKENS)}
    assert record.clocks == {**tokens, "updates": 6, "last_update_step": 6}
    moments = [record.milestones[name] for name in ("setup", "train", "first_step")]
    assert before <= moments[0] <= moments[1] <= moments[2] <= record.monotonic_seconds


def test_between_two_heartbeats_lies_the_interval_but_the_first_step_is_written_at_once(tmp_path: Path) -> None:
    follow = Follow(tmp_path / "run")
    trainer(tmp_path, [Heartbeat(tmp_path / "run", every_seconds=3600), follow]).fit(Module({}), loader(TOKENS))
    assert follow.steps == [1] * len(TOKENS)


def test_a_fit_that_fails_leaves_where_it_stood(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        trainer(tmp_path, [Heartbeat(tmp_path / "run"), Broken()]).fit(Module({}), loader(TOKENS))
    record = read_heartbeats(tmp_path / "run")[0]
    assert (record.phase, record.step) == ("failed", 3)


def test_a_heartbeat_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    with pytest.warns(HeartbeatWarning) as caught:
        trainer(tmp_path, [Heartbeat(tmp_path / "run", every_seconds=0)]).fit(Module({}), loader(TOKENS))
    assert len([each for each in caught if each.category is HeartbeatWarning]) == 1
