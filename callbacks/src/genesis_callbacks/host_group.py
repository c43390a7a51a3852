"""Sums and maxima of a few numbers over all ranks, between hosts.

They run on a gloo group of our own and never on the default group: on CUDA that is nccl, where a host's number would
cost a copy to the device, a kernel in the queue of the gradients and a wait for both.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# One gloo group for each default group, so that it is forgotten with its world.
_GLOO_GROUPS: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()


Number = TypeVar("Number", int, float)


class Pending(Generic[Number]):
    """The result of a reduction that may still be under way."""

    def __init__(self, values: Tensor, work: dist.Work | None) -> None:
        self._values = values
        self._work = work

    def wait(self) -> tuple[Number, ...]:
        """Returns the reduced numbers, the same on every rank; waits for the slowest rank to begin."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return tuple(self._values.tolist())


class HostGroup:
    """All ranks of the default process group, or this process alone where there is none.

    Nothing happens at construction. The first reduction (or `join`) makes the gloo group, which all instances share: it
    communicates, so every rank calls it at the same place. Reductions run in the order in which they are called, which
    must be the same on every rank; call them from the training thread.
    """

    @property
    def world_size(self) -> int:
        """Ranks that take part."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def join(self) -> None:
        """Makes the gloo group now, if there are several ranks and it is not there."""
        if self.world_size > 1:
            self._group()

    def sum(self, values: Sequence[int]) -> Pending[int]:
        """Returns the sums over ranks of integers, element by element."""
        return Pending(*self._reduce(values, torch.int64, dist.ReduceOp.SUM))

    def sum_floats(self, values: Sequence[float]) -> Pending[float]:
        """Returns the sums over ranks of floats, element by element, in float64; they are the same on every rank."""
        return Pending(*self._reduce(values, torch.float64, dist.ReduceOp.SUM))

    def max(self, values: Sequence[int]) -> Pending[int]:
        """Returns the maxima over ranks of integers, element by element."""
        return Pending(*self._reduce(values, torch.int64, dist.ReduceOp.MAX))

    def _reduce(
        self, values: Sequence[float], dtype: torch.dtype, op: "dist.ReduceOp.RedOpType"
    ) -> tuple[Tensor, dist.Work | None]:
        tensor = torch.tensor(values, dtype=dtype, device="cpu")
        if self.world_size == 1:
            return tensor, None
        return tensor, dist.all_reduce(tensor, op=op, group=self._group(), async_op=True)

    @staticmethod
    def _group() -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None
        if world not in _GLOO_GROUPS:
            _GLOO_GROUPS[world] = dist.new_group(backend="gloo")
        return _GLOO_GROUPS[world]
