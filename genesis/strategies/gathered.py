"""Whether sharded parameters stay gathered between the micro-batches of a window: `Sharded(keep_gathered=...)`.

Without it every micro-batch gathers each unit twice, before its forward and before its backward. With it a window
gathers each unit once, and every rank holds the whole model in the dtype of the gathers until the window's last
backward. The option moves the same bits at other times, so that it never changes a loss.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.distributed.tensor import DTensor

from genesis.model.language_model import LanguageModel
from genesis_callbacks.host_group import HostGroup

KeepGathered = Literal["auto"] | bool
"""`auto` keeps parameters gathered if the device's memory allows it."""

_SPARE = 1.2
"""Required free memory per gathered byte: more than 1, because an allocator's free memory is fragmented."""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, in bytes.

    Args:
        free: The memory that the driver could still give to any process.
        reserved: The memory that this process's allocator holds, used or not.
        allocated: The memory of this process's tensors now.
        peak_allocated: The largest memory of its tensors so far.
    """

    free: int
    reserved: int
    allocated: int
    peak_allocated: int


def read_device_memory(device: torch.device) -> DeviceMemory | None:
    """Returns the memory of `device`; None for the CPU and if torch has no figures. Does not wait for the device."""
    if device.type == "cpu":
        return None
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        return DeviceMemory(
            free,
            torch.accelerator.memory_reserved(device),
            torch.accelerator.memory_allocated(device),
            torch.accelerator.max_memory_allocated(device),
        )
    except (RuntimeError, NotImplementedError):  # a device whose allocator keeps no statistics
        return None


def has_room(before: DeviceMemory, after: DeviceMemory, gathered_bytes: int) -> bool:
    """Returns whether gathered parameters fit into memory together with the next windows. Pure.

    Args:
        before: The memory at the beginning of the first window, without optimizer state unless that was restored.
        after: The memory after the first window's optimizer step.
        gathered_bytes: The size of the parameters of all units.
    """
    next_peak_bytes = after.peak_allocated + max(0, after.allocated - before.allocated)
    return after.free + after.reserved - next_peak_bytes >= _SPARE * gathered_bytes


class GatheringChoice:
    """Decides once, after the first window, and identically on all ranks, whether parameters stay gathered.

    Args:
        keep: The option.
        device: The device on which parameters are gathered.
    """

    def __init__(self, keep: KeepGathered, device: torch.device) -> None:
        self._device = device
        self._before: DeviceMemory | None = None
        # `auto` never keeps them on a CPU: memory and network are the same memory there, and no figure says what is
        # free for this process.
        self._is_decided = keep != "auto" or device.type == "cpu"
        self.is_kept = keep is True

    def begin_window(self) -> None:
        """Notes the memory before the first window."""
        if not self._is_decided and self._before is None:
            self._before = read_device_memory(self._device)

    def end_window(self, decoder: LanguageModel, dtype: torch.dtype | None) -> None:
        """Decides after the first window. All ranks call it; it communicates once in a fit.

        Args:
            decoder: The decoder with sharded parameters.
            dtype: The dtype in which parameters are gathered; None for their own dtype.
        """
        if self._is_decided:
            return
        self._is_decided = True
        # FSDP2 casts no bytes, such as those of a base in NF4.
        gathered_bytes = sum(
            _count_gathered(p) * (dtype if dtype and p.is_floating_point() else p.dtype).itemsize
            for p in decoder.parameters()
        )
        after = read_device_memory(self._device)
        is_possible = self._before is not None and after is not None and has_room(self._before, after, gathered_bytes)
        # All ranks must agree: a rank that keeps its parameters skips the gather, and other ranks would wait for it.
        (num_without,) = HostGroup().sum((int(not is_possible),)).wait()
        self.is_kept = num_without == 0
        if self.is_kept:
            rank_zero_info(
                "Parameters stay gathered between the micro-batches of a window: "
                f"{gathered_bytes / 2**30:.2f} GiB on each rank"
            )


def _count_gathered(parameter: nn.Parameter) -> int:
    """Returns the elements of a parameter that a rank has when FSDP2 has gathered it: not what tp or ep ranks share."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    sizes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.device_mesh.shape, strict=False)
    return parameter.numel() // prod(size for name, size in sizes if name in ("tp", "ep"))
