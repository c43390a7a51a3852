"""Stages a save: copies live tensors to memory that training cannot change.

If the training thread waits until everything is written, one tensor at a time is copied, just before it is written.
Otherwise all are copied into one shared buffer without a name (`memfd_create`), which a writer process maps by its
descriptor. The buffer is pinned for copies from an accelerator. Parts whose bytes lie in a file already are
not copied (`file_parts`).
"""

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..base.errors import naming
from ..base.local_shards import TensorShard
from .device import PIN_PIECE_BYTES, PinError, pin_memory, unpin_memory

_COPIES = Path("the memory for the copies of a save")  # as errors name it: a limit of the size of files applies to it
_ALIGNMENT_BYTES = 64  # a cache line, and a multiple of every element's size, as typed views require


@dataclass(frozen=True)
class Placed:
    """A part and the location of its elements: in the shared buffer, or in a file of the job by its number."""

    part: TensorShard
    byte_offset: int
    file: int | None = None


def place_shards(parts: Iterable[TensorShard]) -> tuple[tuple[Placed, ...], int]:
    """Returns the location of each part in a buffer, and the size of the buffer in bytes."""
    placed = []
    byte_offset = 0
    for part in parts:
        placed.append(Placed(part, byte_offset))
        byte_offset += -(-part.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(placed), byte_offset


class Staged(Protocol):
    """The interface by which the writer of a shard reads staged data."""

    def view(self, placed: Placed) -> Tensor:
        """Returns a part on the CPU, contiguous, in a storage of exactly its size."""


class OneAtATime:
    """Copies each part on request: if the training thread waits anyway, no memory for a copy of the state is needed.

    Args:
        live: All parts that this rank holds.
    """

    def __init__(self, live: Mapping[TensorShard, Tensor]) -> None:
        self._live = live

    def view(self, placed: Placed) -> Tensor:
        """Returns a copy, so that the same bytes are compared with the live digest and written."""
        return torch.empty(placed.part.sizes, dtype=placed.part.dtype).copy_(self._live[placed.part])


class SharedBuffer:
    """Memory that two processes share through a descriptor; it is freed when the last of them closes it.

    Args:
        num_bytes: Size of the buffer.
        descriptor: Descriptor of a buffer from another process, which this object closes. None creates a new buffer.
    """

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        self.num_bytes = max(1, num_bytes)
        is_new = descriptor is None
        if descriptor is None:
            # Without a name, a kill leaves nothing behind, and the size limit of /dev/shm, small in many containers,
            # does not apply. One descriptor for all tensors: torch's shared tensors take one each.
            descriptor = os.memfd_create("genesis-staging", os.MFD_CLOEXEC)
        try:
            with naming(_COPIES):
                if is_new:
                    os.ftruncate(descriptor, self.num_bytes)
                self._map = mmap.mmap(descriptor, self.num_bytes)
        except OSError:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self._pinned: list[int] = []
        self._pinned_for: torch.device | None = None

    def view(self, placed: Placed) -> Tensor:
        """Returns a tensor over the part's range of the buffer, in a storage of exactly its size."""
        # Not a slice of one large tensor: `torch.save` would write the whole storage of the view.
        part = placed.part
        count = math.prod(part.sizes)
        if count == 0:
            return torch.empty(part.sizes, dtype=part.dtype)
        return torch.frombuffer(self._map, dtype=part.dtype, count=count, offset=placed.byte_offset).view(part.sizes)

    @property
    def is_pinned(self) -> bool:
        """Whether the buffer is page-locked, so that copies from the device are fast and do not wait."""
        return self._pinned_for is not None

    def pin(self, device: torch.device) -> None:
        """Page-locks the buffer for copies from `device`, a piece at a time; a second call does nothing.

        Raises:
            PinError: A piece cannot be pinned; then no piece stays pinned.
        """
        if self._pinned_for is not None:
            return
        start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        try:
            for offset in range(0, self.num_bytes, PIN_PIECE_BYTES):
                pin_memory(start + offset, min(PIN_PIECE_BYTES, self.num_bytes - offset), device)
                self._pinned.append(start + offset)
        except PinError:
            self._unpin(device)
            raise
        self._pinned_for = device

    def _unpin(self, device: torch.device) -> None:
        for address in self._pinned:
            unpin_memory(address, device)
        self._pinned.clear()
        self._pinned_for = None

    def copy_from_device(self, placed: Placed, data: Tensor) -> None:
        """Starts a copy of a part into its range, on the current stream.

        No copy crosses the border of two pinned pieces, because drivers treat the pieces as separate allocations.
        """
        target = self.view(placed)
        begin, end = placed.byte_offset, placed.byte_offset + placed.part.num_bytes
        cuts = range(-(-begin // PIN_PIECE_BYTES) * PIN_PIECE_BYTES, end, PIN_PIECE_BYTES) if self.is_pinned else ()
        inner = [cut - begin for cut in cuts if cut > begin]
        if not inner:
            target.copy_(data, non_blocking=True)
            return
        # Conjugation and negation may be flags of the tensor: a view as bytes would lose them.
        source = data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for first, last in pairwise([0, *inner, end - begin]):
            target.view(-1).view(torch.uint8)[first:last].copy_(source[first:last], non_blocking=True)

    def close(self) -> None:
        """Frees the memory once no tensor views it; a second call does nothing."""
        if self.descriptor >= 0:
            # Before the unmapping, because the driver's lock would stay on addresses that may be mapped again.
            if self._pinned_for is not None:
                self._unpin(self._pinned_for)
            os.close(self.descriptor)
            self.descriptor = -1
            del self._map  # not `close`, which raises while a tensor still views the mapping


def _bytes_of(tensor: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    flat: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def copy_into(target: Tensor, data: Tensor) -> None:
    """Copies a live tensor to its staged place.

    On the CPU, one thread copies without the GIL, so that the training thread and torch's threads continue.
    """
    # Not `Tensor.copy_`, which would use torch's thread pool and take the cores that run the forward.
    is_plain = data.device.type == "cpu" and data.is_contiguous() and not data.is_conj() and not data.is_neg()
    if data.numel() > 0 and is_plain:
        np.copyto(_bytes_of(target), _bytes_of(data))
    else:
        target.copy_(data, non_blocking=True)
