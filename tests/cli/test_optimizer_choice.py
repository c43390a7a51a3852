"""The optimizer of a recipe is a class with options of its own; options of another class never become its own."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from genesis.base.errors import UserError
from genesis.optim import AdamW
from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe


def test_the_rate_of_one_algorithm_is_not_that_of_another(genesis: Genesis, recipe: Path) -> None:
    outcome = genesis("fit", "--config", str(recipe), "--model.optimizer", "genesis.optim.Muon", "--print_config")
    optimizer = yaml.safe_load(outcome.out)["model"]["optimizer"]
    assert (optimizer["class_path"], optimizer["init_args"]["lr"]) == ("genesis.optim.Muon", 0.02)
    assert optimizer["init_args"]["others"]["init_args"]["lr"] == 3e-4  # the recipe's 1e-2 was another class's


@pytest.mark.parametrize(
    ("option", "what"),
    [
        (["--model.optimizer.lr", "0.1"], "--model.optimizer.lr"),
        (["--model.optimizer", "{lr: 0.1}"], "--model.optimizer {lr: 0.1}"),
        (["--config", "{'model': {'optimizer': {'betas': [0.8, 0.9]}}}"], "model.optimizer.betas of "),
        (["--config", "{'model': {'optimizer': {'name': 'adamw', 'lr': 0.1}}}"], "model.optimizer.lr of "),
    ],
)
@pytest.mark.parametrize("command", ["fit", "plan"])
@pytest.mark.filterwarnings("ignore:model.optimizer.name is deprecated")
def test_an_option_whose_meaning_has_changed_is_refused_beside_a_file_that_names_muon(
    genesis: Genesis, tiny_corpus: Path, tmp_path: Path, command: str, option: list[str], what: str
) -> None:
    named = {"model.optimizer": {"name": "muon", "lr": 1e-2}}
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, tmp_path / "run"), named)
    if option[0] == "--config":
        (tmp_path / "other.yaml").write_text(option[1])
        option = ["--config", str(tmp_path / "other.yaml")]
    outcome = genesis(command, "--config", str(recipe), *option)
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert f"has model.optimizer.name muon, under which {what}" in outcome.err


@pytest.mark.filterwarnings("ignore:model.optimizer.name is deprecated")
def test_a_later_file_may_give_another_class_than_the_muon_of_an_earlier_one(
    genesis: Genesis, tiny_corpus: Path, tmp_path: Path
) -> None:
    named = {"model.optimizer": {"name": "muon", "lr": 1e-2}}
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, tmp_path / "run"), named)
    (tmp_path / "other.yaml").write_text("model: {optimizer: {class_path: genesis.optim.AdamW, init_args: {lr: 0.3}}}")
    outcome = genesis("fit", "--config", str(recipe), "--config", str(tmp_path / "other.yaml"), "--print_config")
    assert yaml.safe_load(outcome.out)["model"]["optimizer"]["init_args"]["lr"] == 0.3


@pytest.mark.parametrize("option", ["eps", "lr"])
def test_an_option_of_an_algorithm_that_is_null_is_refused_by_its_name(option: str) -> None:
    null: dict[str, Any] = {option: None}
    with pytest.raises(UserError, match=f"optimizer.{option} is null: give a value"):
        AdamW(**null)


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("model.optimizer.lr", "many", "model.optimizer.lr is many: give a number"),
        ("model.optimizer.others.lr", "many", "model.optimizer.others.lr is many: give a number"),
        ("model.optimizer.lrr", "1", "unknown key model.optimizer.lrr; did you mean 'lr'?"),
    ],
)
def test_a_mistake_in_an_option_of_an_algorithm_has_the_whole_name_of_the_option(
    genesis: Genesis, option: str, value: str, line: str
) -> None:
    refused = genesis("fit", "--config", "genesis-10m", f"--{option}", value, "--print_config")
    assert (refused.status, refused.err) == (2, f"genesis: error: {line}\n")
