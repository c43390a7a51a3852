"""ZeRO-1 beside Lightning's own saves."""

import os
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis_callbacks.testing import run_ranks
from tests.train.support import build_module, build_strategy, build_trainer, loader


def save_by_lightning(path: str) -> str:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer = build_trainer(build_strategy("zero1"), world_size, 1, [])
    trainer.fit(build_module(), loader(1, rank, world_size))
    with pytest.raises(UserError) as error:
        trainer.save_checkpoint(path)
    return str(error.value)


def test_a_save_that_would_hold_one_ranks_part_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stock.ckpt"
    for words in run_ranks(save_by_lightning, 2, str(path)):
        assert "AsyncProcessCheckpoint" in words
    assert not path.exists()
