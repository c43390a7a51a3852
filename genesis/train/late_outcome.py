"""The reading of a window's figures: at once, or when they are needed (`GenesisModule(gradient_norm="device")`).

By default the host reads the gradient's norm in each step and decides on clip and skip; the device idles until the
host has launched more. With the option the device decides: the clip is a factor in its memory, and the fused optimizer
gets the skip as a number. The host learns of both when it has launched the next window's backward, or when a log line,
a save or a progress bar asks earlier.
"""

import math
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from genesis.errors import UserError
from genesis.optim import OptimizerOptions
from genesis.strategies import Replicated, Sharded


class LateOutcome:
    """The norm and the summed figures of one window, copied to the host while the device continues.

    Args:
        norm: The norm of the window's gradient, on the device.
        figures: The window's figures, summed over ranks, on the device.
    """

    def __init__(self, norm: Tensor, figures: Tensor) -> None:
        values = torch.cat([norm.reshape(1).to(figures.dtype), figures])
        # Torch copies to page-locked memory here, so that the host does not wait; the event marks the end of the copy.
        self._copy = values.to("cpu", non_blocking=True)
        self._event: torch.Event | None = None
        if values.device.type != "cpu":
            self._event = torch.Event(values.device)
            self._event.record(torch.accelerator.current_stream(values.device))
        self._values: list[float] | None = None

    def wait(self) -> tuple[float, list[float]]:
        """Returns the norm and the figures; waits for this window, but not for later work of the device."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._copy.tolist()
        return self._values[0], self._values[1:]

    @property
    def skip_reason(self) -> str | None:
        """The reason why the optimizer has skipped the window, or None. Waits as `wait` does."""
        return None if math.isfinite(self.wait()[0]) else "nonfinite_gradient"


def read_together(tensors: Sequence[Tensor]) -> list[float]:
    """Returns all numbers of `tensors`, in order. Waits for the device once if all of them are on the same device."""
    numbers: list[float] = []
    for _, there in groupby(tensors, key=lambda tensor: tensor.device):
        # float64 holds every float32, and the counts of tokens exactly.
        numbers += torch.cat([tensor.detach().flatten().double() for tensor in there]).cpu().tolist()
    return numbers


def sum_on_device(figures: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """Returns all numbers of `figures` in float64, summed over the ranks of `group` (all ranks if None)."""
    summed = torch.cat([figure.detach().flatten().double() for figure in figures])
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(summed, group=group)
    return summed


def refuse_device_norm(strategy: Strategy, options: OptimizerOptions) -> None:
    """Rejects options with which the device cannot skip a window exactly as the host does, before the ranks meet.

    Raises:
        UserError: An option is not supported; the message has its value and the remedy.
    """
    plugin, reason = strategy.precision_plugin, None
    if options.name != "adamw":
        reason = f"model.optimizer.name is {options.name!r}, which cannot skip a window on the device: use adamw"
    elif isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        reason = f"trainer.precision is {plugin.precision!r}, whose scaler reads on the host"
    elif plugin.precision == "bf16-true":
        reason = "trainer.precision is 'bf16-true', in which a factor on the device is rounded in another way"
    elif isinstance(strategy, Sharded) and strategy.cpu_offload:
        reason = f"cpu_offload is {strategy.cpu_offload:g}, so that the host updates weights"
    elif isinstance(strategy, Replicated) and strategy.optimizer_states == "sharded":
        reason = "optimizer_states is 'sharded', whose optimizer passes no skip on"
    if reason is not None:
        raise UserError(f"model.gradient_norm is 'device' and {reason}; or set model.gradient_norm to host")
