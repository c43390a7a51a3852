"""Weights that are left to a restore are never used as they are."""

import lightning.pytorch as pl
import pytest
import torch

from genesis.base.errors import RunEndedError
from genesis.model.initial import is_unset, mark_unset
from genesis.train.module import GenesisModule
from tests.train.support import build_module, build_strategy, build_trainer, loader

# The small validation set of these tests has a length, which Lightning warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")


def fit(module: GenesisModule, num_sanity_val_steps: int) -> list[torch.Tensor]:
    trainer = build_trainer(build_strategy("single"), 1, 2, [])
    trainer.num_sanity_val_steps = num_sanity_val_steps
    trainer.fit(module, loader(2, 0, 1), loader(1, 0, 1))
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("num_sanity_val_steps", [0, 1])
def test_weights_are_drawn_where_no_restore_came(num_sanity_val_steps: int) -> None:
    module = build_module()
    module.is_restored = True
    found = fit(module, num_sanity_val_steps)
    assert all(map(torch.equal, found, fit(build_module(), num_sanity_val_steps)))


def test_a_restore_that_leaves_weights_without_values_ends_the_run() -> None:
    class FillOne(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            torch.nn.init.ones_(next(pl_module.parameters()))

    module = build_module()
    module.is_restored = True
    trainer = build_trainer(build_strategy("single"), 1, 2, [FillOne()])
    with pytest.raises(RunEndedError, match="left 19 of 20 parameters without values, such as blocks"):
        trainer.fit(module, loader(2, 0, 1), loader(1, 0, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_unset_values_are_nan_and_no_nan_of_arithmetic_is_unset(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.zeros(5, 3, dtype=dtype))
    assert is_unset(weight) is False
    mark_unset(weight)
    assert is_unset(weight) is True
    assert bool(weight.isnan().all())
    with torch.no_grad():
        for value in (float("nan"), float("inf") - float("inf"), 0.0):
            mark_unset(weight)
            weight[4, 2] = value
            assert is_unset(weight) is False
            weight.fill_(value)
            assert is_unset(weight) is False
