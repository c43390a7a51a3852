import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from wandb.proto.wandb_internal_pb2 import Record

from genesis.evaluate.log import RunLog
from genesis.evaluate.results import Measure, Result
from genesis_callbacks.checkpoint import Manifest, read_manifest
from tests.cli.test_loggers import read_wandb

RESULT = Result("step-00000003", 3, "hash", "a", {}, (Measure("a", "acc", 0.5, None, True, 4),))


def with_loggers(checkpoint: Path, *loggers: Any) -> Manifest:
    manifest = read_manifest(checkpoint)
    return replace(manifest, recipe={**manifest.recipe, "run_dir": "runs/a", "trainer": {"logger": list(loggers)}})


def name_logger(kind: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning.pytorch.loggers.{kind}", "init_args": arguments}


def test_what_cannot_be_written_to_is_told_once(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "wandb" / "run-20260101_000000-abc").mkdir(parents=True)
    kinds = ("WandbLogger", "TensorBoardLogger", "MLFlowLogger")
    manifest = with_loggers(checkpoint, *map(name_logger, kinds))
    log = RunLog(tmp_path)
    assert log.write(manifest, [RESULT]) == [
        "W&B accepts metrics of an online run only from training: results are only in metrics.csv",
        "the run's TensorBoard directory does not exist: results are only in metrics.csv",
        "the logger MLFlowLogger is not supported: results are only in metrics.csv",
    ]
    assert log.write(manifest, [RESULT]) == []


def test_a_run_without_loggers_has_nothing_to_tell(checkpoint: Path, tmp_path: Path) -> None:
    assert RunLog(tmp_path).write(with_loggers(checkpoint, True, None), [RESULT]) == []


def test_events_go_beside_those_of_the_newest_attempt_even_in_a_run_that_moved(
    checkpoint: Path, tmp_path: Path
) -> None:
    manifest = with_loggers(checkpoint, name_logger("TensorBoardLogger", save_dir="runs/a", name="board"))
    for attempt in (0, 9, 10):
        (tmp_path / "board" / f"version_{attempt}").mkdir(parents=True)
    log = RunLog(tmp_path)
    assert log.write(manifest, [RESULT]) == []
    log.close()
    (file,) = tmp_path.rglob("events.*")
    assert file.parent.name == "version_10"


def wait_until_written(file: Path) -> list[Record]:
    """Returns what W&B wrote by the run's end, which its service may write after `finish` returned."""
    deadline_seconds = time.monotonic() + 120
    while True:
        records = list(read_wandb(file))
        if any(record.HasField("exit") for record in records) or time.monotonic() > deadline_seconds:
            return records
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_of_wandb_offline_goes_on_under_its_id(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "openai", openai)  # W&B has something to say about it
    for start, name in (("20260101_000000", "first"), ("20260102_000000", "second-try")):
        (tmp_path / "wandb" / f"offline-run-{start}-{name}").mkdir(parents=True)
    manifest = with_loggers(checkpoint, name_logger("WandbLogger", save_dir="runs/a", project="p", offline=True))
    log = RunLog(tmp_path)
    assert log.write(manifest, [RESULT, replace(RESULT, step=4)]) == []
    log.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert file.name == "run-second-try.wandb"
    rows = []
    for record in wait_until_written(file):
        values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        rows += [(values["evaluation/step"], values["evaluation/a_acc"])] if values else []
    assert rows == [("3", "0.5"), ("4", "0.5")]
    assert capfd.readouterr() == ("", "")
