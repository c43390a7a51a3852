"""Old option names work on command lines, in YAML and in the recipes of checkpoints."""

import pytest
import yaml

from genesis.base.errors import UserError
from genesis.recipe.deprecated import (
    REMOVED,
    RENAMED,
    describe_deprecated,
    rename_in_arguments,
    rename_in_recipe,
    rename_in_yaml,
    rename_option,
)
from genesis.recipe.yaml import load_yaml
from genesis.train.recipe_policy import RECIPE_POLICY, unify_recipe

OLD, NEW = "trainer.strategy.init_args.forward_skew_seconds", "trainer.strategy.init_args.desync_seconds"
YAML = """# a comment
trainer:
  strategy:
    class_path: Sharded
    init_args: {forward_skew_seconds: 30.0}  # seconds
  max_steps: 1e3
"""


def test_every_old_name_leads_to_a_current_one() -> None:
    for old in RENAMED:
        assert rename_option(old) not in (old, *RENAMED)
        assert rename_option(rename_option(old)) == rename_option(old)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([f"--{OLD}", "30"], [f"--{NEW}", "30"]),
        ([f"--{OLD}=30"], [f"--{NEW}=30"]),
        (["--trainer.strategy.forward_skew_seconds=30"], ["--trainer.strategy.desync_seconds=30"]),
        (
            ["--trainer.strategy", '{"init_args": {"forward_skew_seconds": 30}}'],
            ["--trainer.strategy", '{"init_args": {"desync_seconds": 30}}'],
        ),
    ],
)
def test_an_old_name_on_the_command_line_is_replaced_and_reported(words: list[str], expected: list[str]) -> None:
    renamed, found = rename_in_arguments(words)
    assert [yaml.safe_load(word) for word in renamed] == [yaml.safe_load(word) for word in expected]
    assert [rename_option(name).rpartition(".")[2] for name in found] == ["desync_seconds"]


def test_other_arguments_stay_as_they_are() -> None:
    words = ["--config", "a.yaml", "--trainer.strategy.other=a=b", "--data.mix", '{"web": 2}', "--", NEW]
    assert rename_in_arguments(words) == (words, [])


def test_only_the_old_key_of_a_yaml_text_is_replaced() -> None:
    text, old = rename_in_yaml(YAML)
    assert (load_yaml(text, ""), old) == (load_yaml(YAML.replace("forward_skew", "desync"), ""), [OLD])


@pytest.mark.parametrize("text", ["other: {forward_skew_seconds: 3}\n", "not yaml: [forward_skew_seconds", ""])
def test_a_text_without_the_option_is_not_changed(text: str) -> None:
    assert rename_in_yaml(text) == (text, [])


def test_an_option_under_both_names_is_refused() -> None:
    with pytest.raises(UserError, match=f"both {NEW} and its old name {OLD} are given; remove {OLD}"):
        rename_in_yaml(YAML.replace("30.0", "30.0, desync_seconds: 20.0"))


def test_a_saved_recipe_with_the_old_name_equals_todays() -> None:
    def recipe(name: str) -> dict[str, object]:
        strategy = {"class_path": "genesis.strategies.Sharded", "init_args": {name: 30.0, "shard": "full"}}
        return {"run_dir": "runs/a", "trainer": {"strategy": strategy}}

    assert rename_in_recipe(recipe("forward_skew_seconds")) == recipe("desync_seconds")
    assert unify_recipe(recipe("forward_skew_seconds")) == unify_recipe(recipe("desync_seconds"))
    assert RECIPE_POLICY.unify is unify_recipe


REMOVED_NAME = "model.gradient_norm"


@pytest.mark.parametrize(
    "words",
    [[f"--{REMOVED_NAME}=host"], [f"--{REMOVED_NAME}", "device"], ["--model.seed=1", f"--{REMOVED_NAME}", "host"]],
)
def test_a_removed_option_on_the_command_line_is_left_out_and_reported(words: list[str]) -> None:
    kept = [word for word in words if word.startswith("--model.seed")]
    assert rename_in_arguments([*words, "--run_dir", "a"]) == ([*kept, "--run_dir", "a"], [REMOVED_NAME])
    assert describe_deprecated(REMOVED_NAME) == f"{REMOVED_NAME} is ignored: {REMOVED[REMOVED_NAME]}"


@pytest.mark.parametrize(
    "text",
    [
        "model:\n  seed: 1\n  gradient_norm: host  # where\n  adapter: null\n",
        "model: {seed: 1, gradient_norm: device, adapter: null}",
        "model: {gradient_norm: host, seed: 1, adapter: null}",
        "model:\n  {seed: 1, adapter: null, 'gradient_norm': host}\n",
    ],
)
def test_a_removed_key_of_a_yaml_text_is_left_out_with_its_value(text: str) -> None:
    renamed, found = rename_in_yaml(text)
    assert yaml.safe_load(renamed) == {"model": {"seed": 1, "adapter": None}}
    assert found == [REMOVED_NAME]
    alone, _ = rename_in_yaml("model:\n  gradient_norm: host\nrun_dir: a\n")
    assert yaml.safe_load(alone) == {"model": {}, "run_dir": "a"}


def test_a_saved_recipe_with_a_removed_option_equals_todays() -> None:
    assert unify_recipe({"model": {"seed": 1, "gradient_norm": "device"}}) == unify_recipe({"model": {"seed": 1}})


@pytest.mark.parametrize("path", ["genesis.objectives.DPO", "genesis.objectives.preference.DPO"])
def test_a_run_of_before_an_option_of_its_objective_resumes_with_the_default_alone(path: str) -> None:
    def recipe(**options: object) -> dict[str, object]:
        return {"model": {"objective": {"class_path": path, "init_args": {"beta": 0.3, **options}}}}

    assert unify_recipe(recipe()) == unify_recipe(recipe(loss="sigmoid"))
    assert unify_recipe(recipe()) != unify_recipe(recipe(loss="hinge"))


NAMED = """model:
  optimizer:
    name: muon
    lr: 1.0e-3  # AdamW's
    betas:
    - 0.9
    - 0.95
    muon_lr: 0.05
    adapter_lr:
  seed: 3
"""
MUON = {
    "class_path": "genesis.optim.Muon",
    "init_args": {
        "lr": 0.05,
        "others": {
            "class_path": "genesis.optim.AdamW",
            "init_args": {"lr": 1e-3, "betas": [0.9, 0.95], "adapter_lr": None},
        },
    },
}


def test_an_optimizer_that_a_file_gives_by_its_name_becomes_one_by_its_class() -> None:
    text, old = rename_in_yaml(NAMED)
    assert yaml.safe_load(text) == {"model": {"optimizer": MUON, "seed": 3}}
    assert [describe_deprecated(name).partition(";")[0] for name in old] == ["model.optimizer.name is deprecated"]
    assert rename_in_recipe(yaml.safe_load(NAMED)) == yaml.safe_load(text)
    inner = "{name: adamw, lr: 0.1, muon_lr: 3}"
    expected = {"class_path": "genesis.optim.AdamW", "init_args": {"lr": 0.1}}
    assert yaml.safe_load(rename_in_yaml(inner, "model.optimizer")[0]) == expected
    assert rename_in_yaml(text) == (text, [])
    dotted = "model.optimizer.name: muon\nmodel.optimizer: {muon_lr: 0.05}\nmodel.seed: 3"
    expected = {
        "class_path": "genesis.optim.Muon",
        "init_args": {"lr": 0.05, "others": {**MUON["init_args"]["others"], "init_args": {}}},
    }
    assert yaml.safe_load(rename_in_yaml(dotted)[0]) == {"model": {"optimizer": expected, "seed": 3}}


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--model.optimizer.name", "muon"], r"give the class, as --model\.optimizer genesis\.optim\.Muon"),
        (["--model.optimizer.muon_lr=1"], r"with model\.optimizer\.class_path genesis\.optim\.Muon it is .*\.lr"),
        (["--model.optimizer", "{muon_lr: 1}"], r"muon_lr is gone"),
        (["--trainer.strategy.optimizer_offload_directory", "/x"], "is /x: optimizer states are offloaded to the host"),
    ],
)
def test_what_has_no_meaning_by_itself_is_refused_with_the_new_spelling(words: list[str], remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        rename_in_arguments(words)


def test_the_null_of_a_removed_option_is_left_out_without_a_word() -> None:
    text, old = rename_in_yaml("trainer: {strategy: {init_args: {optimizer_offload_directory: null}}}")
    assert (yaml.safe_load(text), old) == ({"trainer": {"strategy": {"init_args": {}}}}, [])
    assert rename_in_arguments(["--trainer.strategy.optimizer_offload_directory=null"]) == ([], [])
