"""What a strategy keeps on the host: inputs of blocks, optimizer states, and units, which FSDP2 moves."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from genesis.base.available_memory import available_memory
from genesis.base.device import is_host
from genesis.optim import GroupedOptimizer
from genesis.optim.offload_share import read_share
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

    Attributes:
        traffic: What was moved.
        optimizer_share: The share of the optimizer's states.

    Raises:
        UserError: The share is out of its range.
    """

    def __init__(
        self,
        *,
        activations: bool,
        optimizer_share: float,
        has_units: bool = False,
    ) -> None:
        self.traffic = Traffic()
        self._has_activations, self.optimizer_share = activations, read_share("optimizer_offload", optimizer_share)
        self._has_units = has_units

    @property
    def is_active(self) -> bool:
        """Whether anything is moved."""
        return self._has_activations or self.optimizer_share > 0.0 or self._has_units

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

    def build_activations(self) -> ActivationOffload | None:
        """Returns the offload of activations; None if they stay."""
        return ActivationOffload(self.traffic) if self._has_activations else None

    def move_states(self, optimizers: Sequence[Optimizer], device: torch.device, ranks_of_host: int) -> None:
        """Moves the states of the module's optimizers into the host's memory.

        Args:
            optimizers: The optimizers.
            device: The device of training.
            ranks_of_host: Ranks that share this host's memory.

        Raises:
            UserError: The host lacks memory.
        """
        if self.optimizer_share <= 0.0:
            return
        available = available_memory()
        for optimizer in optimizers:
            assert isinstance(optimizer, GroupedOptimizer)
            attempt_on_all(
                partial(
                    optimizer.offload_states,
                    self.optimizer_share,
                    device,
                    self.traffic,
                    available_bytes=None if available is None else available // max(1, ranks_of_host),
                )
            )
