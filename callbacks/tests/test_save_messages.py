"""What a run reports about its saves: the memory that they take, and the unit of their interval."""

import logging

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks._fit_saves import describe_memory
from genesis_callbacks._triggers import describe_interval
from genesis_callbacks.checkpoint import list_committed

pytestmark = pytest.mark.filterwarnings("ignore:The '.*' does not have many workers")


def test_the_memory_of_copies_and_of_the_writer_are_reported_apart():
    assert describe_memory(2_000_000_000, 0) == "Background saves need 2.0 GB of memory for copies (rank 0)."
    assert describe_memory(528, 400 << 20) == (
        "Background saves need 528 bytes of memory for copies and 419.4 MB for the writer process (rank 0; the latter "
        "whatever the model's size)."
    )


def test_the_interval_is_described_only_where_a_step_is_more_than_a_batch():
    assert describe_interval(None, 4) is None
    assert describe_interval(500, 1) is None
    assert describe_interval(5, 4) == (
        "Saves every 5 optimizer steps, which are 20 batches with accumulate_grad_batches=4."
    )


def test_every_n_steps_counts_optimizer_steps_as_the_run_reports(tmp_path, caplog):
    torch.manual_seed(1)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=16,
        limit_val_batches=0,
        accumulate_grad_batches=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AsyncProcessCheckpoint(run_dir=tmp_path, every_n_steps=2, mode="thread")],
        default_root_dir=tmp_path,
    )
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        trainer.fit(BoringModel())
    assert [manifest.step for _, manifest in list_committed(tmp_path)] == [2, 4]
    assert "Saves every 2 optimizer steps, which are 8 batches with accumulate_grad_batches=4." in caplog.text
    assert "B of memory for copies (rank 0)." in caplog.text or "bytes of memory for copies (rank 0)." in caplog.text
