"""The Trainer's `auto` values are resolved when a run starts, recorded resolved, and kept by a run that goes on."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.accelerators import CPUAccelerator

from genesis.base.determinism import UNREPEATABLE
from genesis.base.errors import UserError
from genesis.cli import fit_checks
from genesis.cli.fit_checks import check_same_model, report_other_choices
from genesis.cli.supervise_recipe import read_recipe as read_facts_of
from genesis.cli.trainer import GenesisTrainer, complete_trainer, count_ranks, read_recipe
from genesis.generate.checkpoint_reference import Reference, read_reference
from genesis.recipe.resolved import ResolvedRecipe
from genesis_callbacks.base.manifest import MANIFEST_NAME
from tests.cli.conftest import Genesis
from tests.golden.files import GOLDEN

SAVED_WITHOUT = GOLDEN / "run-schema-2/step-00000005"
"""Of a recipe whose precision is null."""


def test_a_validation_says_which_choices_of_the_training_it_does_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(fit_checks, "rank_zero_info", lines.append)
    trained = {"model": {"float8": {"include": ["*"], "exclude": []}, "attention": "flash"}}
    report_other_choices(trained, trained)
    report_other_choices(trained, {"model": {}})  # of a version without these options
    assert lines == []
    report_other_choices({"model": {"float8": None, "attention": "mask"}}, trained)
    assert [line.partition(";")[0] for line in lines] == [
        "validates with model.float8 null",
        'validates with model.attention "mask"',
    ]
    assert '{"include": ["*"], "exclude": []}: give --model.float8 to validate with that' in lines[0]


def test_a_validation_refuses_another_model_than_the_trained_one() -> None:
    """Other layers were a traceback, and another rope_theta, which fits the weights, a loss of another function."""
    trained = {"model": {"decoder": {"num_layers": 2, "rope_theta": 10000.0, "dropout": 0.1}}}
    check_same_model({"model": {"decoder": {"num_layers": 2, "rope_theta": 10000.0, "dropout": 0.0}}}, trained)
    check_same_model(trained, {"model": {}})
    with pytest.raises(UserError, match=r"another model: model\.decoder\.rope_theta is 100\.0 and was 10000\.0; "):
        check_same_model({"model": {"decoder": {"num_layers": 2, "rope_theta": 100.0}}}, trained)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the machine look like one with a GPU that has bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)


class SomeAccelerator(CPUAccelerator):
    """An accelerator that has what a CPU has."""

    @staticmethod
    def name() -> str:
        return "some"


def resolve(
    precision: str = "auto",
    accelerator: str = "auto",
    restored: Reference | None = None,
    *,
    deterministic: bool | str | None = "auto",
) -> tuple[object, object]:
    """Returns the precision and the choice of kernels of a run."""
    given = {"precision": precision, "accelerator": accelerator, "deterministic": deterministic}
    recipe = ResolvedRecipe.complete({"trainer": given}, "the recipe")
    recipe = recipe.complete_by(complete_trainer(recipe, None if restored is None else read_recipe(restored)))
    return recipe.get("trainer.precision"), recipe.get("trainer.deterministic")


@pytest.mark.parametrize(
    ("devices", "accelerator", "number"),
    [(2, "cpu", 2), ("auto", "cpu", 1), (-1, "auto", 1), ([0, 3], "gpu", 2), ("0, 1", "gpu", 2), ("0,", "gpu", 1)],
)
def test_devices_are_counted_as_lightning_reads_them(devices: object, accelerator: str, number: int) -> None:
    trainer = {"devices": devices, "accelerator": accelerator}
    assert count_ranks(ResolvedRecipe.complete({"trainer": trainer}, "the recipe")) == number


def test_a_run_records_its_values_resolved_and_a_resume_keeps_them(genesis: Genesis, recipe: Path) -> None:
    given = ("--trainer.precision", "auto", "--trainer.deterministic", "auto")
    assert genesis("fit", "--config", str(recipe), *given).status == 0
    run_dir = recipe.parent / "run"
    for trainer in (
        yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"],
        json.loads((run_dir / "checkpoints/step-00000004" / MANIFEST_NAME).read_text())["recipe"]["trainer"],
    ):
        assert trainer["precision"] == "32-true"
        assert trainer["deterministic"] is True
    assert resolve("auto", "cpu", read_reference("latest", run_dir=run_dir)) == ("32-true", True)


@pytest.mark.usefixtures("cuda")
def test_a_run_that_goes_on_keeps_the_precision_that_it_had_on_another_device() -> None:
    assert resolve()[0] == "bf16-mixed"
    assert resolve(restored=read_reference(SAVED_WITHOUT))[0] == "32-true"
    assert resolve("bf16-true", restored=read_reference(SAVED_WITHOUT))[0] == "bf16-true"


@pytest.mark.usefixtures("cuda")
def test_latest_of_a_run_without_a_checkpoint_takes_the_devices_precision(tmp_path: Path) -> None:
    assert resolve(restored=read_reference("latest", run_dir=tmp_path))[0] == "bf16-mixed"


def test_a_run_that_gave_up_repeatable_kernels_goes_on_without_them(genesis: Genesis, recipe: Path) -> None:
    run = ("fit", "--config", str(recipe))
    assert genesis(*run, "--trainer.deterministic", "false").status == 0
    latest = read_reference("latest", run_dir=recipe.parent / "run")
    assert resolve(restored=latest)[1] is False
    assert resolve(restored=latest, deterministic=None)[1] is False
    facts = {"trainer": {"devices": 1, "accelerator": "cpu", "deterministic": "auto"}, "model": {}}
    facts |= {"run_dir": str(recipe.parent / "run"), "data": {"micro_batch_size": 1, "global_batch_size": 1}}
    assert read_facts_of(ResolvedRecipe.complete(facts, "r")).note == UNREPEATABLE  # the supervisor's line
    drifted = genesis(*run, "--ckpt_path", "latest", "--trainer.deterministic", "true")
    assert drifted.status == 2
    assert "trainer.deterministic" in drifted.err
    assert "--checkpoint.allow_changed" in drifted.err
    assert genesis(*run, "--ckpt_path", "latest").status == 0


def test_a_recipe_of_an_earlier_version_continues_with_repeatable_kernels() -> None:
    """It has null, with which Lightning left torch's default: nobody had chosen that."""
    assert resolve(restored=read_reference(SAVED_WITHOUT))[1] is True


def test_kernels_that_only_warn_are_refused_by_name(genesis: Genesis, recipe: Path) -> None:
    refused = genesis("fit", "--config", str(recipe), "--trainer.deterministic", "warn")
    assert refused.status == 2
    assert refused.err.count("\n") == 1
    assert "'warn'" in refused.err
    assert "auto" in refused.err


def test_another_word_is_refused_with_the_values_that_are_taken(genesis: Genesis, recipe: Path) -> None:
    refused = genesis("fit", "--config", str(recipe), "--trainer.deterministic", "maybe")
    assert refused.status == 2
    assert "'maybe': give auto or true" in refused.err
    assert "warn" not in refused.err


def test_float16_on_a_cpu_is_refused_where_lightning_would_train_in_bfloat16(genesis: Genesis, recipe: Path) -> None:
    refused = genesis("fit", "--config", str(recipe), "--trainer.precision", "16-mixed")
    assert refused.status == 2
    assert "'16-mixed', which a CPU does not have: give --trainer.precision bf16-mixed" in refused.err
    assert not (recipe.parent / "run").exists()


@pytest.fixture
def torch_mode() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # torch's module


@pytest.mark.usefixtures("torch_mode")
def test_an_accelerator_takes_repeatable_kernels_by_default_and_a_cpu_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    GenesisTrainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    assert not torch.are_deterministic_algorithms_enabled()
    for given, wanted in (("auto", True), (False, False), (True, True)):
        GenesisTrainer(
            accelerator=SomeAccelerator(), devices=1, logger=False, default_root_dir=tmp_path, deterministic=given
        )
        assert torch.are_deterministic_algorithms_enabled() == wanted
        assert torch._inductor.config.deterministic == wanted
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch's module


def test_values_are_auto_by_default(genesis: Genesis, recipe: Path) -> None:
    trainer = yaml.safe_load(genesis("fit", "--config", str(recipe), "--print_config").out)["trainer"]
    assert trainer["precision"] == trainer["deterministic"] == "auto"


def test_float16_without_a_scaler_is_refused_in_one_line(genesis: Genesis, recipe: Path) -> None:
    refused = genesis("fit", "--config", str(recipe), "--trainer.precision", "16-true")
    assert refused.status == 2
    assert "trainer.precision" in refused.err
    assert "bf16-mixed" in refused.err
