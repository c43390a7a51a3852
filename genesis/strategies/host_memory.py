"""What a strategy keeps in the host's memory beside FSDP2's own offload: inputs of blocks, and optimizer states."""

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from genesis.available_memory import available_memory
from genesis.offload_share import read_share
from genesis.optim import GroupedOptimizer
from genesis.strategies.activation_offload import ActivationOffload
from genesis.transfers import Traffic


class HostOffload:
    """The offload of a strategy, by its options.

    Args:
        activations: Whether the inputs of recomputed blocks are moved.
        optimizer_share: Share of the optimizer's states that is moved, from 0 to 1.

    Attributes:
        traffic: What was moved.

    Raises:
        UserError: The share is out of its range.
    """

    def __init__(self, *, activations: bool, optimizer_share: float) -> None:
        self.traffic = Traffic()
        self._has_activations, self._share = activations, read_share("optimizer_offload", optimizer_share)

    @property
    def is_active(self) -> bool:
        """Whether anything is moved."""
        return self._has_activations or self._share > 0.0

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
            UserError: The host lacks memory, or states of this kind cannot be moved.
        """
        if self._share <= 0.0:
            return
        available = available_memory()
        for optimizer in optimizers:
            assert isinstance(optimizer, GroupedOptimizer)
            optimizer.offload_states(
                self._share,
                device,
                self.traffic,
                available_bytes=None if available is None else available // max(1, ranks_of_host),
            )
