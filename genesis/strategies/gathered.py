"""Whether sharded parameters stay gathered between the micro-batches of a window: `Sharded(keep_gathered=...)`.

Without it every micro-batch gathers each unit twice, before its forward and before its backward. With it a window
gathers each unit once, and every rank holds the whole model in the dtype of the gathers until the window's last
backward. The option moves the same bits at other times, so that it never changes a loss.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from genesis.model.decoder import Decoder
from genesis_callbacks.host_group import HostGroup

KeepGathered = Literal["auto"] | bool
"""`auto` keeps parameters gathered if the device's memory allows it."""

_SPARE = 1.2
"""Free memory in relation to the gathered bytes: an allocator's free memory is not in one piece."""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, in bytes.

    Args:
        free: What the driver could still give to any process.
        reserved: What this process's allocator holds, used or not.
        allocated: What its tensors take now.
        peak_allocated: What its tensors took at most.
    """

    free: int
    reserved: int
    allocated: int
    peak_allocated: int


def read_device_memory(device: torch.device) -> DeviceMemory | None:
    """Returns the memory of `device`; None for the CPU, and where torch does not know it. Does not wait."""
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
    """Returns whether gathered parameters fit beside what the next windows take. Pure.

    Args:
        before: When the first window began: the optimizer has no state yet, unless it was restored.
        after: When the first window's optimizer step was made.
        gathered_bytes: What the parameters of all units take.
    """
    next_peak_bytes = after.peak_allocated + max(0, after.allocated - before.allocated)
    return after.free + after.reserved - next_peak_bytes >= _SPARE * gathered_bytes


class GatheringChoice:
    """Decides once, after the first window, and alike on all ranks.

    Args:
        keep: The option.
        device: Where parameters are gathered.
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

    def end_window(self, decoder: Decoder, dtype: torch.dtype | None, ranks: HostGroup) -> None:
        """Decides after the first window. All ranks of `ranks` call it; it communicates once in a fit.

        Args:
            decoder: Its parameters are sharded.
            dtype: In which they are gathered; None for their own.
            ranks: All ranks that gather together.
        """
        if self._is_decided:
            return
        self._is_decided = True
        gathered_bytes = sum(p.numel() * (dtype or p.dtype).itemsize for p in decoder.parameters())
        after = read_device_memory(self._device)
        is_possible = self._before is not None and after is not None and has_room(self._before, after, gathered_bytes)
        # A rank that keeps its parameters takes no part in a gather, for which the others would wait.
        (num_without,) = ranks.sum((int(not is_possible),)).wait()
        self.is_kept = num_without == 0
        if self.is_kept:
            rank_zero_info(
                "Parameters stay gathered between the micro-batches of a window: "
                f"{gathered_bytes / 2**30:.2f} GiB on each rank"
            )
