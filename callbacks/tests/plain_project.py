"""Somebody's Lightning project, without genesis: a small model whose data is a function of the step and the dp rank."""

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.testing import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.script, at import
    from torch.distributed.optim import ZeroRedundancyOptimizer

GLOBAL_BATCH = 8
VOCABULARY = 11


class PlainNet(nn.Module):
    """Tied weights, a buffer that changes in forward, and dropout by choice."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 6), nn.LayerNorm(6))
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("num_windows", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.num_windows += 1
        return self.head(self.body(self.embed(tokens)))


class PlainModel(LightningModule):
    def __init__(
        self, *, dropout: float = 0.0, has_zero: bool = False, num_groups: int = 2, frozen: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = PlainNet(dropout)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and not isinstance(self.net.embed.weight, DTensor):
            fully_shard(self.net.body, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(self.global_step)
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, 5), generator=generator)
        tokens = tokens.chunk(self.trainer.world_size)[self.trainer.global_rank]
        logits = self.net(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        decayed = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() <= 1]
        if self.hparams.has_zero:
            optimizer = ZeroRedundancyOptimizer([*decayed, *others], torch.optim.AdamW, lr=1e-2)
        elif self.hparams.num_groups == 1:
            optimizer = torch.optim.AdamW([*decayed, *others], lr=1e-2)
        else:
            groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 3, 6], gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CountedCheckpoint(AsyncProcessCheckpoint):
    """Counts the collectives on the training group while its own hook runs."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.num_training_collectives = 0
        self.num_hooks = 0

    def on_train_batch_end(self, *arguments) -> None:
        before = _num_collectives()
        super().on_train_batch_end(*arguments)
        self.num_training_collectives += _num_collectives() - before
        self.num_hooks += 1


def _num_collectives() -> int:
    return dist.group.WORLD._get_sequence_number_for_group()


class CountingCallback(Callback):
    """Keeps a state with types that plain JSON would lose, and clocks for the manifest."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int]] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen[trainer.global_step] = (trainer.global_step, batch_idx)

    def checkpoint_counters(self) -> dict[str, int]:
        return {"tokens_seen": 40 * len(self.seen)}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict) -> None:
        self.seen = state_dict["seen"]


def wait_until(condition: Callable[[], bool], limit_seconds: float = 30.0) -> None:
    deadline_seconds = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline_seconds, "it did not come to pass"
        time.sleep(0.005)


def build_strategy(name: str, world_size: int):
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    if name == "ddp_with_fixed_buckets":
        return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    return DDPStrategy(process_group_backend="gloo") if name in ("ddp", "zero") else "auto"


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    run_dir: str | Path,
    strategy: str,
    max_steps: int,
    *,
    ckpt_path: str | None = None,
    dropout: float = 0.0,
    num_groups: int = 2,
    frozen: tuple[str, ...] = (),
    callbacks: tuple[Callback, ...] = (),
    **options: object,
) -> dict[str, object]:
    """Returns global-batch losses, full weights and what the checkpoint callback says, after training on this rank."""
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    model = PlainModel(dropout=dropout, has_zero=strategy == "zero", num_groups=num_groups, frozen=frozen)
    options = {"every_n_steps": None, "mode": "sync", **options}
    checkpoint = CountedCheckpoint(run_dir=run_dir, **options)
    counting = CountingCallback()
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=build_strategy(strategy, world_size),
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint, counting, *callbacks],
        default_root_dir=run_dir,
    )
    path = checkpoint.latest() if ckpt_path == "callback" else ckpt_path
    trainer.fit(model, DataLoader(range(100)), ckpt_path=path)
    return {
        "losses": model.losses,
        "weights": {name: full(tensor) for name, tensor in model.state_dict().items()},
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "report": checkpoint.restore_report.text if checkpoint.restore_report else None,
        "seen": counting.seen,
        "last_saved": str(checkpoint.last_saved),
        "failed": checkpoint.statistics.num_failed,
        "skipped": checkpoint.statistics.num_skipped,
        "training_collectives": (checkpoint.num_training_collectives, _num_collectives() > 0, checkpoint.num_hooks),
        "signal": checkpoint.stopped_by_signal,
    }


def _train_keywords(arguments: tuple, keywords: dict) -> dict[str, object]:
    return train(*arguments, **keywords)


def run_training(world_size: int, *arguments: object, **keywords: object) -> list[dict[str, object]]:
    """Returns what `train` returns on each of `world_size` fresh processes."""
    return run_ranks(_train_keywords, world_size, arguments, keywords)
