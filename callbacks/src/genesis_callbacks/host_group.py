"""Sums and maxima of a few host-side numbers over ranks.

They run on a separate gloo group and never on the default group: on CUDA the default group is nccl, where a number of
the host would cost a copy to the device, a kernel in the queue behind the gradients, and a wait for both.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ._gloo import new_gloo_group

__all__ = ["HostGroup", "Pending"]

Partition = tuple[tuple[int, ...], ...]
"""All ranks of the default process group in disjoint groups; the empty one stands for a single group of all ranks."""

# Our groups by partition, for each default group. The keys are weak: after `destroy_process_group` a new world must
# not find groups of the old one, whose sockets are closed.
_GLOO_GROUPS: "WeakKeyDictionary[dist.ProcessGroup, dict[Partition, dist.ProcessGroup]]" = WeakKeyDictionary()

Number = TypeVar("Number", int, float)


class Pending(Generic[Number]):
    """The result of a reduction that may still be under way."""

    def __init__(self, values: Tensor, work: dist.Work | None) -> None:
        self._values = values
        self._work = work

    def wait(self) -> tuple[Number, ...]:
        """Returns the reduced numbers, the same on every rank; waits until every rank has started the reduction."""
        if self._work is not None:
            self._work.wait()
            self._work = None  # a second `wait` returns the same numbers without asking the group
        return tuple(self._values.tolist())


class HostGroup:
    """All ranks of the default process group, or some of them, or this process alone if no group exists.

    Nothing happens at construction. The first reduction (or `join`) makes the gloo groups, which all instances of the
    same partition share: it communicates, so every rank calls it at the same place. Reductions run in the order in
    which they are called, which must be the same on every rank; call them from the training thread.

    Args:
        partition: Disjoint groups that hold every rank once, the same on every rank; each reduces over itself. By
            default one group of all ranks.
    """

    def __init__(self, partition: Sequence[Sequence[int]] = ()) -> None:
        # A partition with one group means all ranks, so that it shares the gloo group of the default.
        self._partition: Partition = tuple(tuple(group) for group in partition) if len(partition) > 1 else ()

    @property
    def world_size(self) -> int:
        """Ranks that take part in this rank's reductions."""
        if not dist.is_initialized():
            return 1
        return len(self._members()) if self._partition else dist.get_world_size()

    def _members(self) -> tuple[int, ...]:
        rank = dist.get_rank()
        return next(group for group in self._partition if rank in group)

    def join(self) -> None:
        """Makes the gloo groups now, if there are several ranks and the groups do not exist yet."""
        if self.world_size > 1:
            self._group()

    def sum(self, values: Sequence[int]) -> Pending[int]:
        """Returns the sums over ranks of integers, element by element."""
        return Pending(*self._reduce(values, torch.int64, dist.ReduceOp.SUM))

    def sum_floats(self, values: Sequence[float]) -> Pending[float]:
        """Returns the sums over ranks of floats, element by element, in float64; the same bits on every rank."""
        return Pending(*self._reduce(values, torch.float64, dist.ReduceOp.SUM))

    def max(self, values: Sequence[int]) -> Pending[int]:
        """Returns the maxima over ranks of integers, element by element."""
        return Pending(*self._reduce(values, torch.int64, dist.ReduceOp.MAX))

    def gather(self, value: Any) -> list[Any]:
        """Returns what each rank gives, in the order of the ranks, on every rank. Waits for all of them.

        Args:
            value: Any picklable object; for rare reports, because every rank gets those of all.
        """
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._group())
        return found

    def _reduce(
        self, values: Sequence[float], dtype: torch.dtype, op: "dist.ReduceOp.RedOpType"
    ) -> tuple[Tensor, dist.Work | None]:
        tensor = torch.tensor(values, dtype=dtype, device="cpu")
        if self.world_size == 1:
            return tensor, None
        # Asynchronous: gloo reduces in threads of its own while the caller trains. The tensor must live until `wait`.
        return tensor, dist.all_reduce(tensor, op=op, group=self._group(), async_op=True)

    def _group(self) -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None
        groups = _GLOO_GROUPS.setdefault(world, {})
        if self._partition not in groups:
            if not self._partition:
                groups[()] = new_gloo_group()
            for members in self._partition:  # `new_group` is a collective of the world: every rank makes every group
                group = new_gloo_group(members)
                if dist.get_rank() in members:
                    groups[self._partition] = group
        return groups[self._partition]
