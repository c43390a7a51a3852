"""A run that continues keeps what it had where the default of a new run has changed."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from jsonargparse import Namespace

from genesis.cli.continued import keep_choices
from genesis.train.recipe_policy import unify_recipe
from genesis_callbacks.checkpoint import Manifest

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
    config = Namespace(data=Namespace(packing=None), model=Namespace(adapter=Namespace(rank=4), optimizer=Namespace()))
    manifest = None if recorded is None else cast("Manifest", SimpleNamespace(recipe=recorded))
    keep_choices(config, manifest)
    assert config["data.packing"] == packing
    assert config["model.optimizer.init_args.adapter_weight_decay"] == decay
    if recorded is not None:  # and the resume finds no difference
        options = unify_recipe(recorded)["model"]["optimizer"]
        assert options["adapter_weight_decay"] == decay


def test_what_is_given_is_not_replaced() -> None:
    optimizer = Namespace(init_args=Namespace(adapter_weight_decay=0.3))
    config = Namespace(data=Namespace(packing="pad"), model=Namespace(adapter=Namespace(), optimizer=optimizer))
    keep_choices(config, cast("Manifest", SimpleNamespace(recipe={"data": {"packing": "chunk"}})))
    assert (config["data.packing"], config["model.optimizer.init_args.adapter_weight_decay"]) == ("pad", 0.3)
