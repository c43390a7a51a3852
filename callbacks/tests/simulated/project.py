"""A small Lightning project that trains on the simulated device, and what was live at each of its steps."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.checkpoint import read_tensors, stage, verify

from . import SimulatedAccelerator, the_device

# So small that tensors lie in several pinned pieces.
PIECE_BYTES = 4096


class DeviceModel(LightningModule):
    """Its step asks the device for nothing, so that the kernels of a step are still under way when a save begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 24))
        self.narrow = nn.Parameter(torch.ones(24, dtype=torch.bfloat16))
        self.register_buffer("num_windows", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.num_windows += 1
        generator = torch.Generator().manual_seed(self.global_step + 1000 * self.global_rank)
        data = torch.randn(8, 24, generator=generator).to(self.device)
        return (self.body(data) * self.narrow - data).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Replicas(DDPStrategy):
    """Ranks that each train on a simulated device of their own and average their gradients through the host.

    Gloo knows nothing of the device, so that DDP cannot wrap the model.
    """

    def __init__(self) -> None:
        super().__init__(process_group_backend="gloo", accelerator=SimulatedAccelerator())

    @property
    def root_device(self) -> torch.device:
        return the_device()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def _register_ddp_hooks(self) -> None:
        pass

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        on_host = tensor.to("cpu")
        dist.all_reduce(on_host)
        return (on_host / dist.get_world_size() if reduce_op in ("mean", "avg") else on_host).to(tensor.device)

    def pre_backward(self, closure_loss: Tensor) -> None:
        pass

    def post_backward(self, closure_loss: Tensor) -> None:
        assert self.model is not None
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.to("cpu")
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient / dist.get_world_size())


def build_strategy() -> Strategy:
    """Returns the strategy for the ranks of this run."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Replicas()
    return SingleDeviceStrategy(device=the_device(), accelerator=SimulatedAccelerator())


class RememberLive(Callback):
    """Notes what the module holds after each step, before the next one, and after all callbacks of this one."""

    def __init__(self) -> None:
        self.live: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self._note(trainer, pl_module)

    def on_train_end(self, trainer, pl_module) -> None:
        self._note(trainer, pl_module)

    def _note(self, trainer, pl_module) -> None:
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        live = {f"model.{name}": tensor for name, tensor in pl_module.state_dict().items()}
        for parameter, state in trainer.optimizers[0].state.items():
            live |= {f"optimizer.0.{names[parameter]}.{key}": value for key, value in state.items()}
        self.live[trainer.global_step] = {name: tensor.detach().to("cpu").clone() for name, tensor in live.items()}


def train(
    run_dir: str | Path,
    max_steps: int = 4,
    *,
    callbacks: Sequence[Callback] = (),
    latest: bool = False,
    checks: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Returns what a fit warned of and saved, and by choice which saved tensors are not what was live at their step."""
    stage.PIN_PIECE_BYTES = PIECE_BYTES
    remember = RememberLive()
    options = {"every_n_steps": 2, "keep_last": None, "mode": "thread", **options}
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(
            strategy=build_strategy(),
            devices=int(os.environ.get("WORLD_SIZE", "1")),
            use_distributed_sampler=False,
            max_steps=max_steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[remember, *callbacks, checkpoint],
            default_root_dir=run_dir,
        )
        # A broadcast of Lightning's from the device, of which gloo knows nothing.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        trainer.fit(DeviceModel(), DataLoader(range(100)), ckpt_path=checkpoint.latest() if latest else None)
    saved = {}
    for path in sorted(checkpoint.directory.glob("step-????????")) if checks else ():
        manifest, tensors = verify(path, "deep"), read_tensors(path)
        live = remember.live.get(manifest.step, {})
        wrong = [name for name, tensor in live.items() if not torch.equal(tensor, tensors[name])]
        saved[manifest.step] = {"wrong": wrong, "versions": manifest.versions, "compared": len(live)}
    return {
        "saved": saved,
        "failed": checkpoint.statistics.num_failed,
        "warnings": [f"{one.category.__name__}: {one.message}" for one in caught],
        "live": remember.live,
        "end": remember.live[max(remember.live)] if remember.live else {},
        "report": checkpoint.restore_report.text if checkpoint.restore_report else None,
        "pid": os.getpid(),
    }
