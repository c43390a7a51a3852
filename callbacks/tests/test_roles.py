"""A rank takes the section of the rank that had its role, whatever the numbers of the two ranks."""

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from plain_project import GLOBAL_BATCH, VOCABULARY, PlainModel
from torch import nn
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks._trainer_state import read_rank_role
from genesis_callbacks.checkpoint import CheckpointError, CorruptCheckpointError, find_latest
from genesis_callbacks.checkpoint.state import (
    RankRole,
    SectionMatch,
    match_sections,
    pick_data_sections,
    read_roles,
    record_role,
)
from genesis_callbacks.testing import run_ranks

# ---- which section


def match(saved, live, rank):
    roles = [None if role is None else RankRole(*role) for role in saved]
    known = None if None in roles else roles
    return match_sections(len(saved), known, [RankRole(*role) for role in live], rank)


def test_each_rank_takes_the_section_of_its_role():
    saved, live = [(0, 0), (0, 1), (1, 0), (1, 1)], [(1, 1), (0, 0), (1, 0), (0, 1)]
    assert [match(saved, live, rank) for rank in range(4)] == [
        SectionMatch(section, True, True, (0, 2)) for section in (3, 0, 2, 1)
    ]


def test_ranks_with_one_role_take_its_sections_in_order():
    saved, live = [(0, 0), (0, 0), (1, 0), (1, 0)], [(1, 0), (0, 0), (1, 0), (0, 0)]
    assert [match(saved, live, rank).section for rank in range(4)] == [2, 0, 3, 1]


def test_another_split_of_the_model_takes_the_sections_of_its_data_ranks():
    saved = [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert [match(saved, [(0, 0), (1, 0)], rank) for rank in range(2)] == [
        SectionMatch(2, False, True, (2, 0)),
        SectionMatch(0, False, True, (2, 0)),
    ]
    assert match([(0, 0)], [(0, 0), (0, 1)], 1) == SectionMatch(0, False, True, (0,))


def test_as_many_ranks_with_other_data_ranks_take_the_first_section():
    """Sections went by the rank's number before, wherever as many ranks saved."""
    saved, live = [(0, 0), (1, 0)], [(0, 0), (0, 1)]
    assert match(saved, live, 1) == SectionMatch(0, False, False, (0, 1))


def test_sections_without_a_role_go_by_the_number_of_the_rank():
    assert match([None, None], [(0, 0), (0, 1)], 1) == SectionMatch(1, True, True, (0, 1))
    assert match([None, None], [(0, 0)], 0) == SectionMatch(0, False, False, (0, 1))


def test_roles_are_read_as_they_were_recorded():
    roles = (RankRole(3, 1), RankRole(0))
    sections = [json.loads(json.dumps(record_role(role))) for role in roles]
    assert read_roles(sections) == roles
    assert read_roles([*sections, {}]) is None
    assert pick_data_sections([*sections, sections[1]]) == [sections[1], sections[0]]
    assert pick_data_sections([{}, {}]) == [{}, {}]


@pytest.mark.parametrize(
    "role", [7, [], {"data_rank": 1}, {"data_rank": True, "stage": 0}, {"data_rank": -1, "stage": 0}]
)
def test_a_forged_role_is_refused(role):
    with pytest.raises(CorruptCheckpointError, match="section 1 of the state has the role"):
        read_roles([record_role(RankRole(0)), {"role": role}])


class OddStrategy:
    pipeline_stage = "last"


def test_a_strategy_with_an_odd_stage_is_refused_by_name():
    with pytest.raises(CheckpointError, match="the pipeline_stage of OddStrategy is 'last'"):
        read_rank_role(OddStrategy())


# ---- in a run


class MovedRanks(DDPStrategy):
    """DDP whose data ranks are the global ranks, moved on by some."""

    def __init__(self, moved: int) -> None:
        super().__init__(process_group_backend="gloo")
        self._moved = moved

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self.world_size, "rank": (self.global_rank + self._moved) % self.world_size}


class MovedModel(PlainModel):
    """Takes its share of the data by the data rank."""

    def training_step(self, batch, batch_idx):
        sampler = self.trainer.strategy.distributed_sampler_kwargs
        generator = torch.Generator().manual_seed(self.global_step)
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, 5), generator=generator)
        tokens = tokens.chunk(sampler["num_replicas"])[sampler["rank"]]
        logits = self.net(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss


class OwnState(Callback):
    """Knows the data rank; a new run draws from other generators on each."""

    def __init__(self) -> None:
        self.data_rank: int | None = None
        self.restored: int | None = None

    def on_train_start(self, trainer, pl_module) -> None:
        self.data_rank = trainer.strategy.distributed_sampler_kwargs["rank"]
        if trainer.global_step == 0:
            torch.manual_seed(100 + self.data_rank)

    def state_dict(self):
        return {"data_rank": self.data_rank}

    def load_state_dict(self, state_dict) -> None:
        self.restored = state_dict["data_rank"]


def fit(root: Path, moved: int, max_steps: int) -> tuple[list[float], int | None]:
    warnings.filterwarnings("ignore", message=".*is not resumable.*")
    torch.manual_seed(1)
    model, own = MovedModel(dropout=0.3), OwnState()
    checkpoint = AsyncProcessCheckpoint(run_dir=root, mode="sync")
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=MovedRanks(moved),
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint, own],
        default_root_dir=root,
    )
    trainer.fit(model, DataLoader(range(100)), ckpt_path="latest")
    return model.losses, own.restored


def test_ranks_with_other_data_ranks_go_on_bit_for_bit_with_the_state_of_their_data_rank(tmp_path):
    straight = [losses for losses, _ in run_ranks(fit, 2, tmp_path / "straight", 0, 6)]
    assert straight[0] != straight[1]
    run_ranks(fit, 2, tmp_path / "run", 0, 3)
    sections = json.loads((find_latest(tmp_path / "run") / "state.json").read_bytes())["sections"]
    assert [section["role"] for section in sections] == [{"data_rank": 0, "stage": 0}, {"data_rank": 1, "stage": 0}]
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    (first, restored), (second, second_restored) = run_ranks(fit, 2, tmp_path / "other", 1, 6)
    assert (restored, second_restored) == (1, 0)
    assert first == straight[1][3:]
    assert second == straight[0][3:]
