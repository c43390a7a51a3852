"""`trainer.precision: auto` is resolved when a run starts, recorded resolved, and kept by a run that goes on."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from genesis.checkpoint_reference import read_reference
from genesis.cli.precision import resolve_precision
from genesis_callbacks.checkpoint.manifest import MANIFEST_NAME
from tests.cli.conftest import Genesis
from tests.golden.files import GOLDEN

SAVED_WITHOUT = GOLDEN / "run-schema-2/step-00000005"
"""Of a recipe whose precision is null."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the machine look like one with a GPU that has bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)


def test_a_run_records_its_precision_resolved_and_a_resume_keeps_it(genesis: Genesis, recipe: Path) -> None:
    assert genesis("fit", "--config", str(recipe), "--trainer.precision", "auto").status == 0
    run_dir = recipe.parent / "run"
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["precision"] == "32-true"
    saved = json.loads((run_dir / "checkpoints/step-00000004" / MANIFEST_NAME).read_text())["recipe"]
    assert saved["trainer"]["precision"] == "32-true"
    assert resolve_precision("auto", "cpu", read_reference("latest", run_dir=run_dir)) == "32-true"


@pytest.mark.usefixtures("cuda")
def test_a_run_that_goes_on_keeps_the_precision_that_it_had_on_another_device() -> None:
    assert resolve_precision("auto", "auto", None) == "bf16-mixed"
    assert resolve_precision("auto", "auto", read_reference(SAVED_WITHOUT)) == "32-true"
    assert resolve_precision("bf16-true", "auto", read_reference(SAVED_WITHOUT)) == "bf16-true"


@pytest.mark.usefixtures("cuda")
def test_latest_of_a_run_without_a_checkpoint_takes_the_devices_precision(tmp_path: Path) -> None:
    assert resolve_precision("auto", "auto", read_reference("latest", run_dir=tmp_path)) == "bf16-mixed"


def test_precision_is_auto_by_default(genesis: Genesis, recipe: Path) -> None:
    outcome = genesis("fit", "--config", str(recipe), "--print_config")
    assert yaml.safe_load(outcome.out)["trainer"]["precision"] == "auto"


def test_float16_without_a_scaler_is_refused_in_one_line(genesis: Genesis, recipe: Path) -> None:
    refused = genesis("fit", "--config", str(recipe), "--trainer.precision", "16-true")
    assert refused.status == 2
    assert "trainer.precision" in refused.err
    assert "bf16-mixed" in refused.err
