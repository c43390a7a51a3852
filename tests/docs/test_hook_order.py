"""The pages about one step list the hooks and the metrics of a real `genesis fit`."""

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from docstring_tables import render
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
from genesis_callbacks import (
    AsyncProcessCheckpoint,
    CheckpointVerification,
    GradientHealth,
    Heartbeat,
    MemoryWatch,
    SkipAwareLR,
    StepTimer,
    Throughput,
    TokenCounters,
)
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("hook_order")]

PAGE = REPOSITORY / "docs/explanation/one-step.md"
METRICS = REPOSITORY / "docs/reference/metrics.md"
CALLBACKS = (
    MoveDataPosition,
    TokenCounters,
    SkipAwareLR,
    CheckpointVerification,
    TrainingLog,
    Throughput,
    StepTimer,
    MemoryWatch,
    GradientHealth,
    DataTelemetry,
    GenesisProgressBar,
    Heartbeat,
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


class Fit(NamedTuple):
    """A fit that has ended: the calls that it made, and its directory."""

    calls: list[str]
    run: Path


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


def read_documented_keys() -> re.Pattern[str]:
    """Returns what matches the keys that the page about metrics lists, such as `data/epochs_SOURCE`."""
    inserts = re.findall(r"<!-- insert: logged (\S+) -->", METRICS.read_text(encoding="utf-8"))
    tables = "\n".join(render(REPOSITORY, "logged", path) for path in inserts)
    keys = set(re.findall(r"\b[a-z]+/[\w<>.]*\w>?", tables.replace("&lt;", "<")))
    return re.compile("|".join(re.sub(r"SOURCE|NAME|<\w+>|(?<=_)N\b", r"[\\w.]+", key) for key in keys))


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Fit:
    """Runs a fit of five steps whose third step logs and saves, and is neither the first nor the last."""
    directory = tmp_path_factory.mktemp("fit")
    path = write_recipe(
        directory / "recipe.yaml",
        build_recipe(tiny_corpus, directory / "run"),
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
    arguments = ["fit", "--config", str(path)]
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as monkeypatch:
        record(calls, monkeypatch)
        monkeypatch.setattr(sys, "argv", ["genesis", *arguments])
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # the command sets its own
        try:
            assert main(arguments) == 0
        finally:
            # A fit leaves its rank and its launcher in the environment, which ranks of later tests would inherit.
            os.environ.clear()
            os.environ.update(environment)
    return Fit(calls, directory / "run")


def test_the_page_lists_the_hooks_of_a_step_in_the_order_in_which_they_run(fit: Fit) -> None:
    starts = [i for i, call in enumerate(fit.calls) if call == "CorpusDataModule.transfer_batch_to_device"]
    third_step = fit.calls[starts[2] : starts[3]]
    while third_step[-2:] == ["CSVLog.log_metrics"] * 2:  # Lightning hands a row over in parts
        third_step.pop()
    assert read_documented_order() == third_step


def test_every_column_of_the_log_is_on_the_page_about_metrics(fit: Fit) -> None:
    step, *columns = (fit.run / "metrics.csv").read_text().splitlines()[0].split(",")
    documented = read_documented_keys()
    assert step == "step"
    assert len(columns) > 20
    assert [column for column in columns if not documented.fullmatch(column)] == []
