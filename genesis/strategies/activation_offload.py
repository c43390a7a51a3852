"""Offload of activations: inputs of recomputed blocks lie in the host's memory from their forward to their backward.

Only these inputs are moved: hooks around whole blocks would also move the weights that FSDP2 has gathered. A copy to
the host runs beside the next block, and a copy back beside the backward of the block behind.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from genesis.optim.transfers import CopyLane, HostMemory, Mark, Traffic, mark_now


class _Held:
    """A tensor that is in the host's memory.

    Args:
        like: The tensor.
        memory: Its memory on the host.
        before: The tensor that was moved before it, which the backward needs next.
    """

    def __init__(self, like: Tensor, memory: HostMemory, before: "_Held | None") -> None:
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.memory = memory
        self.before = None if before is None else weakref.ref(before)
        self.source: Tensor | None = like
        self.stored: Mark = None
        self.fetched: Mark = None
        self.tensor: Tensor | None = None

    def __del__(self) -> None:
        # Its memory on the device goes back to the current stream, which must not use it before the copy has ended.
        if self.tensor is not None and self.fetched is not None:
            self.fetched.wait()
        if self.source is not None and self.stored is not None:
            self.stored.wait()

    def on_host(self) -> Tensor:
        num_bytes = self.shape.numel() * self.dtype.itemsize
        return self.memory.bytes[:num_bytes].view(self.dtype).view(self.shape)


class ActivationOffload:
    """Moves tensors that the backward needs to the host and back.

    One thread uses it. Copies of both directions share a stream, so that memory of the host may be used again as soon
    as its copy to the device is queued.

    Args:
        traffic: Where copies and waits are counted.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._lane: CopyLane | None = None
        self._free: list[HostMemory] = []
        self._last: weakref.ref[_Held] | None = None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, which is a checkpoint, with its saved inputs moved to the host."""

        def run(*arguments: Any, **options: Any) -> Any:
            # Inside, the checkpoint's own hooks replace these, so that they see its inputs alone.
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return function(*arguments, **options)

        return run

    def _pack(self, tensor: Tensor) -> _Held:
        if self._lane is None:
            self._lane = CopyLane(tensor.device, self._traffic)
        memory = self._take_memory(tensor)
        last = None if self._last is None else self._last()
        held = _Held(tensor, memory, last)
        weakref.finalize(held, self._free.append, memory).atexit = False
        held.stored = self._lane.store(held.on_host(), tensor, mark_now(tensor.device))
        if last is not None and last.source is not None:
            # A whole block has been launched since, so that this wait is short. Behind it the allocator may give the
            # memory to the stream that it belongs to.
            self._traffic.wait_for(last.stored, tensor.device)
            last.source = None
        self._last = weakref.ref(held)
        return held

    def _take_memory(self, tensor: Tensor) -> HostMemory:
        """Returns memory that holds a tensor: free memory of at least its size, or new memory.

        New memory takes the place of a smaller one that is free. Windows of many widths therefore never need more
        pieces of memory than one window has inputs, none of them larger than the largest input.
        """
        fitting = [number for number, one in enumerate(self._free) if len(one.bytes) >= tensor.nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda number: len(self._free[number].bytes)))
        if self._free:
            assert self._lane is not None
            self._lane.synchronize()  # a copy from the old memory may still run
            self._free.pop()
        return HostMemory(tensor.nbytes, tensor.device, max(1, tensor.nbytes))

    def _unpack(self, held: _Held) -> Tensor:
        self._start_fetch(held)
        self._traffic.wait_for(held.fetched, held.device)
        before = None if held.before is None else held.before()
        if before is not None:
            self._start_fetch(before)
        assert held.tensor is not None
        tensor, held.tensor = held.tensor, None
        return tensor

    def _start_fetch(self, held: _Held) -> None:
        if held.tensor is not None:
            return
        if held.source is not None:  # the last one, whose memory on the device nobody has needed yet
            held.tensor = held.source
            return
        assert self._lane is not None
        # Allocated on the current stream, whose earlier work may still use this memory: the copy begins after it.
        held.tensor = torch.empty(held.shape, dtype=held.dtype, device=held.device)
        held.fetched = self._lane.fetch(held.tensor, held.on_host(), mark_now(held.device))
