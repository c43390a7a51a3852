"""The page about one training step lists the hooks in the order in which a real `genesis fit` runs them."""

import functools
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from genesis.cli.main import main
from genesis.optim import GroupedOptimizer
from genesis.strategies import Replicated
from genesis.train.csv_log import CSVLog
from genesis.train.data_module import CorpusDataModule
from genesis.train.data_position import MoveDataPosition
from genesis.train.data_telemetry import DataTelemetry
from genesis.train.module import GenesisModule
from genesis.train.progress import GenesisProgressBar
from genesis.train.training_log import TrainingLog
from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, SkipAwareLR, TokenCounters
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import REPOSITORY

PAGE = REPOSITORY / "docs/explanation/one-step.md"
CALLBACKS = (
    MoveDataPosition,
    TokenCounters,
    SkipAwareLR,
    CheckpointVerification,
    TrainingLog,
    DataTelemetry,
    GenesisProgressBar,
    AsyncProcessCheckpoint,
)
STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
PARTS: dict[type, tuple[str, ...]] = {
    CorpusDataModule: ("transfer_batch_to_device",),
    GenesisModule: ("training_step", "configure_gradient_clipping"),
    Replicated: ("train_micro_batches", "backward"),
    GroupedOptimizer: ("step",),
    TokenCounters: (*STEP_HOOKS, "_after_step"),
    CSVLog: ("log_metrics",),
}


def record(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends to `calls` whenever a hook that one of our classes defines, or a part of a step, begins."""
    for owner in {*CALLBACKS, *PARTS}:
        for name in PARTS.get(owner, STEP_HOOKS):
            own = getattr(owner, name)
            if own is not getattr(Callback, name, None):
                monkeypatch.setattr(owner, name, note(calls, f"{owner.__name__}.{name}", own))


def note(calls: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return noting


def read_documented_order() -> list[str]:
    """Returns the calls that the page lists: the code at the beginning of each numbered item."""
    return re.findall(r"^\d+\. `([\w.]+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.process
@pytest.mark.slow
def test_the_page_lists_the_hooks_of_a_step_in_the_order_in_which_they_run(
    tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = build_recipe(tiny_corpus, tmp_path / "run")
    # The third step is one that logs and saves and that is neither the first nor the last.
    path = write_recipe(
        tmp_path / "recipe.yaml",
        recipe,
        {
            "trainer.max_steps": 5,
            "trainer.log_every_n_steps": 3,
            "trainer.val_check_interval": 5,
            "checkpoint.every_n_steps": 3,
            "data.prefetch_windows": 0,
            "data.micro_batch_size": 4,
        },
    )
    calls: list[str] = []
    record(calls, monkeypatch)
    arguments = ["fit", "--config", str(path)]
    monkeypatch.setattr(sys, "argv", ["genesis", *arguments])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # the command sets its own
    assert main(arguments) == 0
    starts = [i for i, call in enumerate(calls) if call == "CorpusDataModule.transfer_batch_to_device"]
    third_step = calls[starts[2] : starts[3]]
    while third_step[-2:] == ["CSVLog.log_metrics"] * 2:  # Lightning hands a row over in parts
        third_step.pop()
    assert read_documented_order() == third_step
