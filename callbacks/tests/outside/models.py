"""Models of outside projects, each with dropout: plain, a GAN with manual optimization, and one for LBFGS."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def build_net(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, 3))


class Plain(LightningModule):
    """Learns to give back what it was given; records in `seen` what each batch held."""

    def __init__(self, build_loader: Callable[[], Any]) -> None:
        super().__init__()
        self.net = build_net()
        self.build_loader = build_loader

    def train_dataloader(self) -> Any:
        return self.build_loader()

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Validated(Plain):
    """Validates at each epoch's end."""

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.linspace(-1, 1, 12).reshape(4, 3), batch_size=2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class OneCycle(Plain):
    """Asks the Trainer how many steps there will be, which builds the loader before anything is restored."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        total_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Lbfgs(Plain):
    """Its optimizer runs the closure several times for a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=4)


class Gan(Plain):
    """A generator and a discriminator, with manual optimization."""

    def __init__(self, build_loader: Callable[[], Any]) -> None:
        super().__init__(build_loader)
        self.automatic_optimization = False
        self.discriminator = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        ours, theirs = self.optimizers()
        made = self.net(torch.randn_like(batch))
        for optimizer, loss in (
            (ours, lambda: -self.discriminator(made).mean()),
            (theirs, lambda: self.discriminator(made.detach()).mean() - self.discriminator(batch).mean()),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        ours = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        return [ours, torch.optim.RMSprop(self.discriminator.parameters(), lr=1e-3)], []


class Sharded(Plain):
    """FSDP2; without buffers, which it does not shard."""

    def __init__(self, build_loader: Callable[[], Any]) -> None:
        super().__init__(build_loader)
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3))

    def configure_model(self) -> None:
        if not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
