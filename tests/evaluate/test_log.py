from dataclasses import replace
from pathlib import Path
from typing import Any

from genesis.evaluate.log import RunLog
from genesis.evaluate.results import Measure, Result
from genesis_callbacks.checkpoint import Manifest, read_manifest

RESULT = Result("step-00000003", 3, "hash", "a", {}, (Measure("a", "acc", 0.5, None, True, 4),))


def with_loggers(checkpoint: Path, *loggers: Any) -> Manifest:
    manifest = read_manifest(checkpoint)
    return replace(manifest, recipe={**manifest.recipe, "run_dir": "runs/a", "trainer": {"logger": list(loggers)}})


def name_logger(kind: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning.pytorch.loggers.{kind}", "init_args": arguments}


def test_what_cannot_be_written_to_is_told_once(checkpoint: Path, tmp_path: Path) -> None:
    manifest = with_loggers(checkpoint, name_logger("WandbLogger", project="a"), name_logger("TensorBoardLogger"))
    log = RunLog(tmp_path)
    assert log.write(manifest, [RESULT]) == [
        "WandbLogger takes the metrics of a run from one process, which is training: results are in metrics.csv alone",
        "the run's TensorBoard directory is not there: results are in metrics.csv alone",
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
