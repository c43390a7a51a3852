"""Tensors of a model that share memory, or stop to, between a save and a restore."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from plain_project import build_strategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification
from genesis_callbacks.checkpoint import read_tensors
from genesis_callbacks.testing import run_ranks

STEPS, SAVED = 5, 3


class Shared(BoringModel):
    """Two buffers of one tensor at first; each gets its own while it trains."""

    def __init__(self):
        super().__init__()
        zeros = torch.zeros(3)
        self.register_buffer("mean", zeros)
        self.register_buffer("var", zeros)

    def training_step(self, batch, batch_idx):
        self.mean = self.mean + 1
        self.var = self.var + 2
        return super().training_step(batch, batch_idx)


class Views(BoringModel):
    """A buffer and a view of it, which go on sharing."""

    def __init__(self):
        super().__init__()
        whole = torch.zeros(4, 2)
        self.register_buffer("whole", whole)
        self.register_buffer("column", whole[:, 1])

    def training_step(self, batch, batch_idx):
        self.whole += 1
        return super().training_step(batch, batch_idx)


class Best(BoringModel):
    """A buffer that becomes the same object as another while it trains."""

    def __init__(self):
        super().__init__()
        self.register_buffer("best", torch.zeros(2))
        self.register_buffer("current", torch.zeros(2))

    def training_step(self, batch, batch_idx):
        self.current = self.current + 1
        self.best = self.current
        return super().training_step(batch, batch_idx)


class Untied(BoringModel):
    """Two parameters on one memory at first, which training gives each its own."""

    def __init__(self):
        super().__init__()
        self.other = torch.nn.Linear(32, 2)
        self.other.weight.data = self.layer.weight.data

    def on_train_batch_start(self, batch, batch_idx):
        if self.other.weight.data_ptr() == self.layer.weight.data_ptr():
            self.other.weight.data = self.other.weight.data + 1

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx)["loss"] + self.other(batch).square().mean()}


class Transposed(BoringModel):
    """A square weight that is transposed in place between two saves."""

    def __init__(self):
        super().__init__()
        self.square = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            with torch.no_grad():
                self.square.weight.t_()
        return {"loss": super().training_step(batch, batch_idx)["loss"] + self.square(self(batch)).square().mean()}


def fit(model, run_dir, max_steps, mode="thread"):
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, every_n_steps=1, keep_last=None, mode=mode)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # Verification expects the tensors that there were when training started.
        callbacks=[checkpoint, *([] if isinstance(model, Best) else [CheckpointVerification()])],
        default_root_dir=run_dir,
    )
    trainer.fit(model, ckpt_path=checkpoint.latest())
    return checkpoint


@pytest.mark.filterwarnings("ignore:.*dataloader is not resumable")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("kind", [Shared, Views, Best, Untied, Transposed])
def test_what_is_restored_is_what_was_live_whatever_shares_memory(tmp_path, kind):
    torch.manual_seed(1)
    first = kind()
    # To transpose what is being copied beside the training would tear the copy.
    checkpoint = fit(first, tmp_path, SAVED, "sync" if kind is Transposed else "thread")
    live = {name: tensor.detach().clone() for name, tensor in first.state_dict().items()}
    saved = read_tensors(checkpoint.last_saved)
    assert all(
        torch.equal(tensor, live[name.removeprefix("model.")])
        for name, tensor in saved.items()
        if name.startswith("model.")
    )
    restored = {}

    class Look(kind):
        def on_train_start(self):
            restored.update({name: tensor.detach().clone() for name, tensor in self.state_dict().items()})

    again = Look()
    fit(again, tmp_path, STEPS, "sync")
    assert restored.keys() == live.keys()
    assert all(torch.equal(tensor, live[name]) for name, tensor in restored.items())
    if kind is Views:
        assert torch.equal(again.column, again.whole[:, 1])
        assert bool((again.column == STEPS).all())


class ShardedShared(Shared):
    def configure_model(self):
        if not isinstance(self.layer.weight, DTensor):
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


def fit_sharded(run_dir, max_steps):
    model = ShardedShared()
    restored = {}
    model.on_train_start = lambda: restored.update(mean=model.mean.clone(), var=model.var.clone())
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, every_n_steps=1, mode="sync")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=build_strategy("fsdp2", 1),
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint],
        default_root_dir=run_dir,
    )
    trainer.fit(model, ckpt_path=checkpoint.latest())
    return restored, {"mean": model.mean.clone(), "var": model.var.clone()}


def test_buffers_of_one_tensor_get_their_own_values_where_a_restore_fills_in_place(tmp_path):
    ((_, live),) = run_ranks(fit_sharded, 1, tmp_path, SAVED)
    ((restored, _),) = run_ranks(fit_sharded, 1, tmp_path, STEPS)
    assert restored.keys() == live.keys()
    assert all(torch.equal(tensor, live[name]) for name, tensor in restored.items())
