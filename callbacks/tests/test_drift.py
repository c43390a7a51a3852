"""What may differ between the run that saved and the one that restores, and how a difference is told."""

import dataclasses

import pytest
import torch
from plain_project import run_training, train

from genesis_callbacks.base.checkpoint_errors import DriftError
from genesis_callbacks.checkpoint import (
    CheckpointError,
    DriftPolicy,
    Manifest,
    find_latest,
    read_manifest,
)
from genesis_callbacks.checkpoint.drift import check_drift, compare_mappings, find_drift
from genesis_callbacks.testing import run_ranks

POLICY = DriftPolicy(
    rules=(("allow", "net.dropout"), ("never", "net"), ("never", "tokenizer"), ("free", "where"), ("free", "log_*")),
    areas=(("model", "net"), ("optimizer", "opt"), ("data", "data")),
    remedy="--allow '{keys}'",
)
RECIPE = {
    "net": {"dim": 8, "dropout": 0.0},
    "opt": {"lr": 0.1, "betas": [0.9, 0.95]},
    "data": {"mix": None},
    "where": {"path": "a", "devices": [0]},
    "log_every": 1,
    "steps": 10,
}
VERSIONS = {"python": "3.11.9", "torch": "2.13.0+cpu"}
MANIFEST = Manifest(
    step=4,
    sequence=1,
    counters={},
    world_size=1,
    mesh={},
    identity={"tokenizer": "one", "corpus": "web"},
    recipe=RECIPE,
    versions=VERSIONS,
    created_seconds=0.0,
    previous=None,
    files=(),
    tensors={},
)


def verdicts(recipe=RECIPE, identity=MANIFEST.identity, versions=VERSIONS, allow_changed=(), manifest=MANIFEST):
    differences = find_drift(
        manifest, identity=identity, recipe=recipe, versions=versions, policy=POLICY, allow_changed=allow_changed
    )
    return {difference.key: difference.verdict for difference in differences}


def changed(**keys):
    """The recipe with dotted keys (`__` for the dot) set."""
    recipe = {name: dict(value) if isinstance(value, dict) else value for name, value in RECIPE.items()}
    for key, value in keys.items():
        head, _, rest = key.partition("__")
        if rest:
            recipe[head][rest] = value
        else:
            recipe[head] = value
    return recipe


def test_the_same_run_has_no_differences():
    as_python = changed(opt__betas=(0.9, 0.95))
    assert verdicts(as_python) == {}


def test_each_kind_of_key_has_its_verdict():
    recipe = changed(net__dim=9, net__dropout=0.1, opt__lr=0.2, where__path="b", log_every=7, steps=20, new_key=1)
    assert verdicts(recipe) == {
        "net.dim": "never",
        "net.dropout": "refused",
        "opt.lr": "refused",
        "where.path": "free",
        "log_every": "free",
        "steps": "refused",
        "new_key": "refused",
    }


def test_what_is_named_is_allowed_by_key_or_glob_but_never_stays_never():
    recipe = changed(net__dim=9, opt__lr=0.2, opt__betas=[0.8, 0.9], steps=20)
    assert verdicts(recipe, allow_changed=["opt", "st*", "net.dim"]) == {
        "net.dim": "never",
        "opt.lr": "allowed",
        "opt.betas": "allowed",
        "steps": "allowed",
    }


def test_a_subtree_that_appears_is_one_difference():
    assert verdicts(changed(data__mix={"web": 1, "code": 2})) == {"data.mix": "refused"}
    assert verdicts(changed(data__mix={"web": 1}), allow_changed=["data.mix"]) == {"data.mix": "allowed"}


def test_an_option_that_is_not_set_is_the_same_as_one_that_is_not_there():
    assert verdicts(changed(data__other=None)) == {}


def test_a_run_or_a_checkpoint_without_a_recipe_compares_none():
    assert verdicts({}) == {}
    assert verdicts(manifest=dataclasses.replace(MANIFEST, recipe={})) == {}


def test_identity_is_compared_where_both_name_it():
    assert verdicts(identity={"tokenizer": "two", "corpus": "code", "licence": "mine"}) == {
        "tokenizer": "never",
        "corpus": "refused",
    }
    assert verdicts(identity={}) == {}


def test_what_identity_and_recipe_both_name_is_told_once_under_its_area():
    manifest = dataclasses.replace(MANIFEST, identity={"net.dim": 8})
    (difference,) = find_drift(
        manifest, identity={"net.dim": 9}, recipe=changed(net__dim=9), versions={}, policy=POLICY
    )
    assert (difference.key, difference.area, difference.verdict) == ("net.dim", "model", "never")


def test_versions_warn_and_a_build_label_is_free():
    assert verdicts(versions={"torch": "2.13.0+cu130", "python": "3.12.1", "numpy": "2.0"}) == {
        "versions.torch": "free",
        "versions.python": "warned",
    }
    assert verdicts(versions={"torch": "2.14.0"}, allow_changed=["versions.torch"]) == {"versions.torch": "allowed"}


def test_the_refusal_names_the_changes_lists_both_values_and_ends_with_what_to_do():
    recipe = changed(net__dim=9, opt__lr=0.2, steps=20, where__path="b")
    differences = find_drift(
        MANIFEST, identity={"corpus": "code"}, recipe=recipe, versions={"torch": "2.14.0"}, policy=POLICY
    )
    with pytest.raises(DriftError) as raised:
        check_drift(MANIFEST, differences, POLICY)
    assert str(raised.value).splitlines() == [
        "the checkpoint of step 4 is of another run: net.dim, corpus, opt.lr, steps changed",
        "  identity",
        "    corpus is 'code' and was 'web'",
        "  model",
        "    net.dim is 9 and was 8",
        "  optimizer",
        "    opt.lr is 0.2 and was 0.1",
        "  other",
        "    steps is 20 and was 10",
        "  package versions",
        "    versions.torch is '2.14.0' and was '2.13.0+cpu'",
        "to continue the run as it was: set the values back to those that they were",
        "to train with another net.dim: start a new run, because a run cannot change this",
        """to continue the run with the other changes: add --allow '["corpus", "opt.lr", "steps"]'""",
    ]


def test_a_refusal_of_many_changes_names_the_first_and_allows_them_all():
    recipe = {**RECIPE, **{f"option_{number}": number for number in range(9)}}
    policy = DriftPolicy(remedy="--allow '{keys}'")
    differences = find_drift(MANIFEST, identity={}, recipe=recipe, versions={}, policy=policy)
    with pytest.raises(DriftError) as raised:
        check_drift(MANIFEST, differences, policy)
    first, *_, last = str(raised.value).splitlines()
    assert first.endswith("is of another run: option_0, option_1, option_2, option_3, option_4 and 4 more changed")
    assert last.startswith("to continue the run with these changes: add --allow '[")
    assert all(f'"option_{number}"' in last for number in range(9))


def test_recipes_that_spell_the_same_run_are_compared_in_one_form():
    def unify(recipe):
        return {key: value for key, value in recipe.items() if key != "dim"} | {"net": {**RECIPE["net"], "dim": 8}}

    other = {**{key: value for key, value in RECIPE.items() if key != "net"}, "dim": 8}
    for policy, keys in ((POLICY, {"dim", "net"}), (dataclasses.replace(POLICY, unify=unify), set())):
        found = find_drift(MANIFEST, identity={}, recipe=other, versions={}, policy=policy)
        assert {difference.key for difference in found} == keys


def test_names_and_values_of_a_checkpoint_add_no_lines_and_no_control_characters_to_the_refusal():
    recipe = changed(net__dim=9) | {"net\n  faked\x1b[2J": 1, "steps": "10\n\x1b[2J"}
    differences = find_drift(
        MANIFEST, identity={}, recipe=recipe, versions={}, policy=DriftPolicy((("never", "net*"),))
    )
    with pytest.raises(DriftError) as raised:
        check_drift(MANIFEST, differences, POLICY)
    lines = str(raised.value).split("\n")
    assert len(lines) == 8  # one for what changed, four of the list, and three of what to do
    assert all(line.isprintable() for line in lines)


def test_what_is_free_allowed_or_warned_is_not_refused():
    differences = find_drift(
        MANIFEST,
        identity={},
        recipe=changed(opt__lr=0.2, where__path="b"),
        versions={"torch": "2.14.0"},
        policy=POLICY,
        allow_changed=["opt.lr"],
    )
    assert len(differences) == 3
    check_drift(MANIFEST, differences, POLICY)


def test_a_recipe_that_is_not_json_is_refused():
    with pytest.raises(CheckpointError, match="the recipe for the manifest must be plain JSON"):
        verdicts({"path": object()})


def test_a_run_with_another_recipe_is_refused_on_every_rank_until_it_is_allowed(tmp_path):
    recipe = {"model": {"dim": 6}, "trainer": {"max_steps": 2, "devices": 2}}
    options = {"drift_policy": DriftPolicy(rules=(("never", "model"), ("free", "trainer.devices")))}
    run_training(2, tmp_path, "ddp", 2, recipe=recipe, **options)

    longer = {"model": {"dim": 6}, "trainer": {"max_steps": 4, "devices": 1}}
    with pytest.raises(AssertionError, match=r"trainer\.max_steps is 4 and was 2") as raised:
        run_training(2, tmp_path, "ddp", 4, ckpt_path="latest", recipe=longer, **options)
    assert "rank 1" in str(raised.value)
    assert "trainer.devices is" not in str(raised.value)
    options["allow_changed"] = ["trainer.max_steps"]
    (resumed,) = run_training(1, tmp_path, "single", 4, ckpt_path="latest", recipe=longer, **options)
    assert len(resumed["losses"]) == 2
    assert "  changed  trainer.max_steps is 4 and was 2" in resumed["report"]
    assert read_manifest(find_latest(tmp_path)).recipe == longer

    options["allow_changed"] = ["*"]
    with pytest.raises(AssertionError, match=r"to train with another model\.dim: start a new run"):
        run_training(1, tmp_path, "single", 6, ckpt_path="latest", recipe={"model": {"dim": 7}}, **options)


def test_items_that_have_names_are_compared_by_them_and_a_new_order_is_a_difference():
    web, code = {"name": "web", "paths": ["a"]}, {"name": "code", "paths": ["b"]}
    moved = {**code, "paths": ["elsewhere/b"]}
    assert list(compare_mappings({"sources": [web, code]}, {"sources": [web, moved]})) == [
        ("sources.code.paths", ["b"], ["elsewhere/b"])
    ]
    for other in ([code, web], [web], [web, {**code, "name": "web"}], [web, "code"]):
        assert list(compare_mappings({"sources": [web, code]}, {"sources": other})) == [("sources", [web, code], other)]


def train_with(run_dir, *numbers_of_threads):
    """Trains two steps with each number of threads, and returns the warnings and the report of the last resume."""
    for count, number in enumerate(numbers_of_threads, start=1):
        torch.set_num_threads(number)
        with pytest.warns() as caught:  # at least that of the loader's few workers
            run = train(run_dir, "single", 2 * count, ckpt_path="latest" if count > 1 else None)
    return [str(one.message) for one in caught if one.category.__name__ == "DriftWarning"], run["report"]


def test_a_cpu_with_another_number_of_threads_is_told_at_a_resume(tmp_path):
    """It adds in another order, so that the run does not continue bit for bit."""
    ((told, report),) = run_ranks(train_with, 1, tmp_path, 1, 2)
    assert len(told) == 1
    assert told[0].endswith("this run may not continue bit for bit: device.threads is '2' and was '1'")
    assert "  changed  device.threads is '2' and was '1'" in report
