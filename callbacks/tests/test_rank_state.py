"""A data module whose state differs by rank gets what all ranks saved, at any world size."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from plain_project import PlainModel, build_strategy
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.testing import run_ranks


class Lanes(LightningDataModule):
    """Every rank knows its own lanes: here a tensor and a number that only it has."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict = {}

    def train_dataloader(self):
        return DataLoader(torch.ones(64, 32))

    def state_dict(self):
        rank = int(os.environ["RANK"])
        return {"lanes": {rank: torch.full((2,), rank + 0.5)}, "step": self.trainer.global_step}

    def combine_rank_states(self, states):
        assert len({state["step"] for state in states}) == 1
        return {"lanes": {lane: value for state in states for lane, value in state["lanes"].items()}}

    def load_state_dict(self, state_dict) -> None:
        self.loaded = state_dict


def fit(root: Path, strategy: str, max_steps: int) -> tuple[dict, str | None]:
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*|.*no `val_dataloader`.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    world_size = int(os.environ["WORLD_SIZE"])
    checkpoint = AsyncProcessCheckpoint(run_dir=root, mode="sync")
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=build_strategy(strategy, world_size),
        max_steps=max_steps,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint],
        default_root_dir=root,
    )
    data = Lanes()
    trainer.fit(PlainModel(), data, ckpt_path=checkpoint.latest())
    lanes = {lane: value.tolist() for lane, value in data.loaded.get("lanes", {}).items()}
    return lanes, checkpoint.restore_report and checkpoint.restore_report.text


@pytest.mark.parametrize(("after", "world_size"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_every_rank_gets_what_all_ranks_saved(tmp_path, after, world_size):
    run_ranks(fit, 2, tmp_path, "ddp", 2)
    resumed = run_ranks(fit, world_size, tmp_path, after, 4)
    for lanes, report in resumed:
        assert lanes == {0: [0.5, 0.5], 1: [1.5, 1.5]}
        assert ("the data's of all ranks" in report) == (world_size != 2)
