"""A run that continues keeps what it had where the default of a new run has changed."""

from typing import Any

import pytest

from genesis.cli.continued import DROPOUTS, KEEPS_DROPOUT, keep_choices
from genesis.recipe.resolved import ResolvedRecipe
from genesis.train.recipe_policy import unify_recipe

ADAPTER = {"rank": 4}


@pytest.mark.parametrize(
    ("recorded", "packing", "decay"),
    [
        (None, None, 0.0),  # a new run
        ({"data": {}, "model": {"adapter": ADAPTER, "optimizer": {"weight_decay": 0.2}}}, "chunk", 0.2),
        ({"data": {}, "model": {"adapter": ADAPTER, "optimizer": None}}, "chunk", 0.1),
        ({"data": {}, "model": {"adapter": ADAPTER, "optimizer": {"name": "muon"}}}, "chunk", 0.1),
        (
            {
                "data": {"packing": "best_fit"},
                "model": {"adapter": ADAPTER, "optimizer": {"weight_decay": 0.1, "adapter_weight_decay": 0.0}},
            },
            "best_fit",
            0.0,
        ),
    ],
)
def test_a_run_that_continues_keeps_its_packing_and_the_decay_of_its_adapters(
    recorded: dict[str, Any] | None, packing: str | None, decay: float
) -> None:
    found = keep_choices(ResolvedRecipe.complete({"model": {"adapter": ADAPTER}}, "the recipe"), recorded)
    assert found.get("data.packing") == packing
    assert found["model.optimizer.init_args.adapter_weight_decay"] == decay
    if recorded is not None:  # and the resume finds no difference
        options = unify_recipe(recorded)["model"]["optimizer"]
        assert options["adapter_weight_decay"] == decay


def test_what_is_given_is_not_replaced() -> None:
    optimizer = {"class_path": "genesis.optim.AdamW", "init_args": {"adapter_weight_decay": 0.3}}
    given = {"data": {"packing": "pad"}, "model": {"adapter": ADAPTER, "optimizer": optimizer}}
    assert keep_choices(ResolvedRecipe.complete(given, "the recipe"), {"data": {"packing": "chunk"}}) == {}


@pytest.mark.parametrize("objective", ["DPO", "KTO", "GSPO"])
def test_objectives_that_compare_two_forwards_train_without_dropout(objective: str) -> None:
    model: dict[str, Any] = {"decoder": {"dropout": 0.1}, "adapter": {"rank": 4, "dropout": 0.2}}

    def keep(recorded: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        recipe = {"model": {"objective": {"class_path": f"genesis.objectives.{objective}"}, **model, **options}}
        found = keep_choices(ResolvedRecipe.complete(recipe, "the recipe"), recorded)
        return {name: found[name] for name in (*DROPOUTS, KEEPS_DROPOUT) if name in found}

    off = dict.fromkeys(DROPOUTS, 0.0)
    assert keep() == off
    assert keep(keeps_dropout=True) == {}
    assert keep(objective=None) == {}
    earlier = {**model, "optimizer": None}
    kept = keep({"model": earlier})  # of an earlier version
    assert kept == {KEEPS_DROPOUT: True}
    assert keep({"model": {**earlier, "keeps_dropout": True}}) == kept  # what that resume saved
    assert keep({"model": {**earlier, "keeps_dropout": False}}) == off
