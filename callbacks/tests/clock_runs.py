"""Small Lightning projects whose windows are skipped on purpose, for the tests of the clocks and of the schedule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VETO, OVERFLOW, EMPTY = "veto", "overflow", "empty"


class Batches(Dataset[dict[str, Any]]):
    """One batch an item: `tokens[i]` tokens on rank 0, as many more on each further rank as its number."""

    def __init__(self, num_tokens: list[int], rank: int = 0) -> None:
        self.num_tokens, self.rank = num_tokens, rank

    def __len__(self) -> int:
        return len(self.num_tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {
            "index": index,
            "x": torch.randn(4, 3, generator=generator),
            "num_valid_tokens": self.num_tokens[index] + self.rank,
        }


class Module(pl.LightningModule):
    """A linear model; `skips` says what happens to which batch."""

    def __init__(
        self,
        skips: dict[int, str] | None = None,
        lr: float = 0.1,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        has_scheduler: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.skips = skips or {}
        self.lr, self.optimizer, self.options, self.has_scheduler = lr, optimizer, options, has_scheduler
        self.index = -1
        self.lrs: list[float] = []
        self.indices: list[int] = []

    def loss(self, batch: dict[str, Any]) -> Tensor:
        self.index = int(batch["index"])
        self.indices.append(self.index)
        loss = self.linear(batch["x"]).float().pow(2).mean()
        # An overflow of 16-mixed: finite as it is, infinite once the scale has multiplied it.
        return loss * 1e37 if self.skips.get(self.index) == OVERFLOW else loss

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if self.skips.get(self.index) == EMPTY else loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.lrs.append(float(optimizer.param_groups[0]["lr"]))
        if self.skips.get(self.index) == VETO:
            for parameter in self.parameters():
                parameter.grad = None

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=self.lr, **self.options)
        if self.has_scheduler:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        return optimizer


def loader(num_tokens: list[int], rank: int = 0) -> DataLoader[dict[str, Any]]:
    return DataLoader(Batches(num_tokens, rank), batch_size=None)


def trainer(directory: Path | str, callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=directory,
        accelerator="cpu",
        callbacks=callbacks,
        **{
            "max_epochs": 1,
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "log_every_n_steps": 1,
            **options,
        },
    )


def half_precision() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000))


LIGHTNING_WARNINGS = [
    # Advice on speed, for loaders of six batches.
    pytest.mark.filterwarnings("ignore:The '.*' does not have many workers"),
    # What a run with skips says at its end has a test of its own.
    pytest.mark.filterwarnings("ignore:.* windows were skipped and changed no parameter"),
]
