"""The loggers of a run that is resumed continue what its first attempt began; tests/cli/test_loggers.py kills a run."""

from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from genesis.base.errors import UserError
from genesis.train import tensorboard_log
from genesis.train.tensorboard_log import TensorBoardLogger
from genesis.train.wandb_log import WandbLogger


@pytest.mark.parametrize(("prefix", "resume"), [("run", "allow"), ("offline-run", None)])
def test_wandb_opens_the_run_of_the_newest_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, resume: str | None
) -> None:
    for name in ("20260101_000000-first", "20260103_000000-an-id", "20260102_000000-second"):
        (tmp_path / "wandb" / f"{prefix}-{name}").mkdir(parents=True)
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **options: opened.append(options))
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert WandbLogger(tmp_path, offline=prefix != "run").experiment is None
    assert (opened[0]["id"], opened[0]["resume"]) == ("an-id", resume)
    assert WandbLogger(tmp_path, id="mine").version == "mine"
    assert WandbLogger(tmp_path / "other").version is None


@pytest.mark.parametrize("refusal", [wandb.errors.UsageError("bad\nproject"), ValueError("WANDB_SILENT is\nmaybe")])
def test_what_wandb_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception) -> None:
    def refuse(**options: Any) -> None:
        raise refusal

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"W&B cannot start a run \(\w+ \w+( \w+)?\): correct trainer.logger or"):
        _ = WandbLogger(tmp_path, offline=True).experiment


def test_repeated_steps_of_tensorboard_have_the_values_of_the_later_attempt(tmp_path: Path) -> None:
    for values in ({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, {3: 30.0}):
        logger = TensorBoardLogger(tmp_path)
        for step, value in values.items():
            logger.log_metrics({"loss": value}, step)
        del logger  # without its end, as a kill
    (directory,) = {path.parent for path in tmp_path.rglob("events.*")}
    assert directory == tmp_path / "tensorboard/version_0"
    shown = EventAccumulator(str(directory)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in shown] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_run_with_several_versions_continues_the_newest(tmp_path: Path) -> None:
    for number in (0, 9, 10):
        (tmp_path / f"tensorboard/version_{number}").mkdir(parents=True)
    assert TensorBoardLogger(tmp_path).version == 10
    assert TensorBoardLogger(tmp_path, version="mine").version == "mine"


def test_tensorboard_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard_log, "Event", None)
    with pytest.raises(UserError, match=r"pip install 'genesis-lm\[tensorboard\]'"):
        TensorBoardLogger(tmp_path)
