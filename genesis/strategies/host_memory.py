"""What a strategy keeps on the host: inputs of blocks, optimizer states, and units, which FSDP2 moves."""

import errno
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from genesis.base.available_memory import available_memory
from genesis.base.device import is_host
from genesis.base.errors import UserError
from genesis.optim import GroupedOptimizer
from genesis.optim.offload_share import read_directory, read_share
from genesis.optim.piece_memory import DiskRates, explain_directory
from genesis.optim.transfers import Traffic
from genesis.strategies.activation_offload import ActivationOffload
from genesis.strategies.agree import attempt_on_all
from genesis.strategies.host_units import count_host_units


class HostOffload:
    """The offload of a strategy, by its options.

    Args:
        activations: Whether the inputs of recomputed blocks are moved.
        optimizer_share: Share of the optimizer's states that is moved, from 0 to 1.
        has_units: Whether FSDP2 keeps units of blocks on the host.
        optimizer_directory: Where these states lie in files; None for the host's memory.

    Attributes:
        traffic: What was moved.
        has_disk: Whether states lie in files.

    Raises:
        UserError: The share is out of its range, or 0 with a directory.
    """

    def __init__(
        self,
        *,
        activations: bool,
        optimizer_share: float,
        optimizer_directory: str | None = None,
        has_units: bool = False,
    ) -> None:
        self.traffic = Traffic()
        self._has_activations, self._share = activations, read_share("optimizer_offload", optimizer_share)
        self._has_units = has_units
        directory = read_directory(optimizer_directory, self._share)
        self._directory = None if directory is None else Path(directory)
        self.has_disk = self._directory is not None

    @property
    def is_active(self) -> bool:
        """Whether anything is moved."""
        return self._has_activations or self._share > 0.0 or self._has_units

    def count_units(self, model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """Counts what FSDP2's own offload of units moves from now on, and the time of the updates on the host.

        Args:
            model: The sharded model.
            optimizers: The optimizers.
            device: The device of training; on the CPU nothing moves.
        """
        if not self._has_units or is_host(device.type):
            return
        count_host_units(model, device, self.traffic)
        for optimizer in optimizers:
            assert isinstance(optimizer, GroupedOptimizer)
            optimizer.count_host_updates(self.traffic)

    def check_directory(self) -> None:
        """Checks that the directory of the optimizer's states exists on this host.

        Raises:
            UserError: It does not, or it is no directory.
        """
        if self._directory is not None and not self._directory.is_dir():
            number = errno.ENOTDIR if self._directory.exists() else errno.ENOENT
            raise UserError(explain_directory(self._directory, number))

    def build_activations(self) -> ActivationOffload | None:
        """Returns the offload of activations; None if they stay."""
        return ActivationOffload(self.traffic) if self._has_activations else None

    def move_states(self, optimizers: Sequence[Optimizer], device: torch.device, ranks_of_host: int) -> None:
        """Moves the states of the module's optimizers into the host's memory, or into files.

        Args:
            optimizers: The optimizers.
            device: The device of training.
            ranks_of_host: Ranks that share this host's memory.

        Raises:
            UserError: The host lacks memory, the directory lacks room, or states of this kind cannot be moved.
        """
        if self._share <= 0.0:
            return
        available = available_memory()
        for optimizer in optimizers:
            assert isinstance(optimizer, GroupedOptimizer)
            attempt_on_all(
                partial(
                    optimizer.offload_states,
                    self._share,
                    device,
                    self.traffic,
                    available_bytes=None if available is None else available // max(1, ranks_of_host),
                    directory=self._directory,
                )
            )
            if self._directory is not None:
                rank_zero_info(describe_disk(self._directory, optimizer.offloaded_bytes, optimizer.disk_rates))


def describe_disk(directory: Path, num_bytes: int, rates: DiskRates | None) -> str:
    """Returns what states on a disk cost, as a line for the log. Pure.

    Args:
        directory: Where they lie.
        num_bytes: Bytes of this rank's states.
        rates: How fast the disk is while all ranks use it; None if that is not known.
    """
    size = f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:,.2f} MiB"
    text = (
        f"Optimizer states: each rank has {size} in {directory}, and as much for saves; a step reads and writes {size}"
    )
    if rates is None:
        return f"{text} through the page cache, which this file system cannot avoid."
    seconds = rates.least_seconds(num_bytes)
    least = f"{seconds:,.1f}" if seconds >= 1.0 else f"{seconds:.2g}"
    return (
        f"{text}: at least {least} s at {rates.read / 1e9:,.2f} GB/s read and "
        f"{rates.write / 1e9:,.2f} GB/s written, as measured now."
    )
