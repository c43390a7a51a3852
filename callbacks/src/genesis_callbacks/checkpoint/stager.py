"""Takes one rank's part of a save off the live tensors: digests of all that it holds, copies of what it writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .digest import digest_chunk
from .plan import LocalShard, TensorShard
from .stage import OneAtATime, Placed, SharedBuffer, Staged, copy_into, place_shards


@dataclass(frozen=True)
class StagedShards:
    """What staging gives: what this rank writes, where that is, and the digests of all that it holds."""

    placed: tuple[Placed, ...]
    digests: dict[TensorShard, int]
    data: Staged
    num_bytes: int


class SharedStager:
    """Stages into one shared buffer, which is used again from save to save. One thread at a time uses it."""

    def __init__(self) -> None:
        self.buffer: SharedBuffer | None = None
        self._side_stream: torch.cuda.Stream | None = None

    def stage(
        self, live: Mapping[TensorShard, Tensor], ours: Sequence[TensorShard], event: torch.cuda.Event | None
    ) -> StagedShards:
        """Returns what is staged, when the copy is complete.

        Args:
            live: All that this rank holds.
            ours: What of it this rank writes.
            event: Where the training stream stood when the live tensors were taken; None on the CPU.
        """
        placed, num_bytes = place_shards(ours)
        buffer = self._reserve(num_bytes)
        if event is None:
            digests = _digest_and_copy(live, placed, buffer)
        else:
            digests = self._stage_from_device(event, live, placed, buffer)
        return StagedShards(placed, digests, buffer, num_bytes)

    def _stage_from_device(
        self,
        event: torch.cuda.Event,
        live: Mapping[TensorShard, Tensor],
        placed: Sequence[Placed],
        buffer: SharedBuffer,
    ) -> dict[TensorShard, int]:
        device = next(data.device for data in live.values() if data.is_cuda)
        with torch.cuda.device(device):  # a new thread begins with the first one
            buffer.pin()
            self._side_stream = self._side_stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch: no types
            with torch.cuda.stream(self._side_stream):
                self._side_stream.wait_event(event)
                digests = _digest_and_copy(live, placed, buffer)
            self._side_stream.synchronize()
        return digests

    def _reserve(self, num_bytes: int) -> SharedBuffer:
        if self.buffer is None or self.buffer.num_bytes < num_bytes:
            if self.buffer is not None:
                self.buffer.close()
            self.buffer = SharedBuffer(num_bytes)
        return self.buffer

    def close(self) -> None:
        """Gives the buffer back once nobody views it; a second call does nothing."""
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None


def stage_one_at_a_time(live: Mapping[TensorShard, Tensor], ours: Sequence[TensorShard]) -> StagedShards:
    """Returns the digests of all that is live; each part is copied when it is written, while training waits."""
    placed, num_bytes = place_shards(ours)
    with torch.no_grad():
        digests = {part: digest_chunk(data, part.shape, part.offsets) for part, data in live.items()}
    return StagedShards(placed, digests, OneAtATime(live), num_bytes)


def record_event(parts: Sequence[LocalShard]) -> torch.cuda.Event | None:
    """Marks where the training stream stands, for a copy on another; None where everything is on the CPU."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch gives it no types
    if not is_used or not any(local.data.is_cuda for local in parts):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
    event.record()
    return event


def _digest_and_copy(
    live: Mapping[TensorShard, Tensor], placed: Sequence[Placed], buffer: SharedBuffer
) -> dict[TensorShard, int]:
    """Returns the digest of everything live after copying what this rank writes."""
    targets = {item.part: buffer.view(item) for item in placed}
    digests: dict[TensorShard, int] = {}
    with torch.no_grad():
        for part, data in live.items():
            if part in targets:
                copy_into(targets[part], data)
            digests[part] = digest_chunk(data, part.shape, part.offsets)
    return digests
