"""One line for a loss that does not fall, and one for a loss that has risen."""

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
from clock_runs import LIGHTNING_WARNINGS, Module, loader, trainer

from genesis_callbacks import LossWatch
from genesis_callbacks.base.errors import UserError
from genesis_callbacks.loss_watch import LossWarning

pytestmark = LIGHTNING_WARNINGS


class Given(Module):
    """Has logged the losses that it is given."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses

    @property
    def logged_loss(self) -> float:
        return self.losses[self.global_step - 1]


def fit(directory: Path, module: pl.LightningModule, watch: LossWatch, num_steps: int, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(directory, [watch], **options).fit(module, loader([1] * num_steps))
    return [str(one.message) for one in caught if one.category is LossWarning]


def test_a_flat_loss_is_reported_once(tmp_path: Path) -> None:
    lines = fit(tmp_path, Given([5.0, 5.1, 4.99] * 20), LossWatch(block=3, min_steps=9), 60)
    assert len(lines) == 1
    assert lines[0].startswith("the loss does not fall: 5 after 12 steps, 5 at the beginning")


def test_a_loss_that_rises_again_is_reported_and_one_bad_block_is_not(tmp_path: Path) -> None:
    falls = [6.0, 5.0, 4.0, 9.0, 3.0, 2.0, 2.1, 2.0]
    assert fit(tmp_path, Given(falls), LossWatch(block=1, min_steps=1), 8) == []
    lines = fit(tmp_path, Given([*falls, 2.6, 2.7, 2.8]), LossWatch(block=1, min_steps=1), 11)
    assert lines == [
        "the loss has risen to 2.7 from 2; lower the learning rate, or look at the data and the gradient's norm since "
        "then"
    ]


def test_a_metric_is_read_where_the_module_has_no_loss(tmp_path: Path) -> None:
    class Logs(Module):
        def on_train_batch_end(self, *_) -> None:
            pass

        def training_step(self, batch, batch_idx):
            self.log("train/loss", 5.0)
            return super().training_step(batch, batch_idx)

    assert len(fit(tmp_path, Logs(), LossWatch(block=1, min_steps=1), 8)) == 1


def test_the_state_continues_the_medians() -> None:
    watch = LossWatch()
    assert watch.state_dict() == {}
    state = {"version": 1, "values": [3.0], "medians": [5.0, 4.0], "warned": ["flat"]}
    watch.load_state_dict(state)
    assert watch.state_dict() == state
    with pytest.raises(UserError, match="version 3"):
        watch.load_state_dict({"version": 3})
    with pytest.raises(UserError, match="block is 0"):
        LossWatch(block=0)
