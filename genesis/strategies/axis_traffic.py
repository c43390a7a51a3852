"""Counts what a rank sends to the ranks that share its work, by axis, where the strategy issues the collectives.

A collective in a forward is counted when it is issued, that in its backward when the gradient of the result is there:
a forward that runs again for recomputation counts again, and its backward does not. Nothing waits for a device.

In a compiled block Python runs once, so that its collectives cannot be counted: a strategy that compiles blocks counts
none of the axes that communicate in them.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class Sent(NamedTuple):
    """What a rank has sent.

    Args:
        num_calls: Collectives and transfers.
        num_bytes: The bytes to other ranks: the least with which the collective can be done, whatever its algorithm.
    """

    num_calls: int = 0
    num_bytes: int = 0


class AxisTraffic:
    """The traffic of this rank along one axis.

    Attributes:
        is_counting: Whether it counts; a log turns it on for windows of training.
    """

    def __init__(self) -> None:
        self.is_counting = False
        self._sent = Sent()

    def note(self, num_bytes: int) -> None:
        """Counts a collective."""
        # In a compiled graph this would be done once, and the guards on the count would compile it again and again.
        if not torch.compiler.is_compiling() and self.is_counting:
            self._sent = Sent(self._sent.num_calls + 1, self._sent.num_bytes + num_bytes)

    def note_both(self, result: Tensor, num_bytes: int) -> Tensor:
        """Counts the collective that gave `result`, and later that of its backward, which sends as much.

        Args:
            result: What the collective gave, which is returned.
            num_bytes: The bytes that this rank sends.
        """
        if torch.compiler.is_compiling() or not self.is_counting:
            return result
        self.note(num_bytes)
        if result.requires_grad:
            result.register_hook(partial(_note_back, self, num_bytes))  # type: ignore[no-untyped-call]  # torch's
        return result

    def take(self) -> Sent:
        """Returns what was counted since the last call."""
        sent, self._sent = self._sent, Sent()
        return sent


def _note_back(traffic: AxisTraffic, num_bytes: int, gradient: Tensor) -> None:
    traffic.note(num_bytes)


def reduced_bytes(x: Tensor, num_ranks: int) -> int:
    """Returns the bytes that each rank sends for the sum of a tensor over ranks, in two rounds of equal parts."""
    return 2 * x.nbytes * (num_ranks - 1) // num_ranks
