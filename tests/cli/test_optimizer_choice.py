"""The optimizer of a recipe is a class with options of its own; options of another class never become its own."""

from pathlib import Path

import yaml

from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe


def test_the_rate_of_one_algorithm_is_not_that_of_another(genesis: Genesis, recipe: Path) -> None:
    outcome = genesis("fit", "--config", str(recipe), "--model.optimizer", "genesis.optim.Muon", "--print_config")
    optimizer = yaml.safe_load(outcome.out)["model"]["optimizer"]
    assert (optimizer["class_path"], optimizer["init_args"]["lr"]) == ("genesis.optim.Muon", 0.02)
    assert optimizer["init_args"]["others"]["init_args"]["lr"] == 3e-4  # the recipe's 1e-2 was another class's


def test_an_option_whose_meaning_has_changed_is_refused_beside_a_file_that_names_muon(
    genesis: Genesis, tiny_corpus: Path, tmp_path: Path
) -> None:
    named = {"model.optimizer": {"name": "muon", "lr": 1e-2}}
    recipe = write_recipe(tmp_path / "recipe.yaml", build_recipe(tiny_corpus, tmp_path / "run"), named)
    outcome = genesis("fit", "--config", str(recipe), "--model.optimizer.lr", "0.1")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert "has model.optimizer.name muon, under which --model.optimizer.lr meant AdamW's option" in outcome.err
