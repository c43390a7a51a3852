"""Stages a save: takes live tensors to where training cannot change them.

While the training thread waits until everything is written: a tensor at a time, just before it is written. Otherwise:
into one shared buffer without a name (`memfd_create`), which a writer process maps by its descriptor; on CUDA it is
pinned.
"""

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .errors import SaveFailedError
from .plan import TensorShard

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Placed:
    """A part and where its elements lie in a shared buffer."""

    part: TensorShard
    byte_offset: int


def place_shards(parts: Iterable[TensorShard]) -> tuple[tuple[Placed, ...], int]:
    """Returns where each part lies in a buffer, and how large the buffer must be in bytes."""
    placed = []
    byte_offset = 0
    for part in parts:
        placed.append(Placed(part, byte_offset))
        byte_offset += -(-part.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(placed), byte_offset


class Staged(Protocol):
    """Gives what was staged to whoever writes it."""

    def view(self, placed: Placed) -> Tensor:
        """Returns a part on the CPU, contiguous, in a storage of exactly its size."""


class OneAtATime:
    """Copies each part when it is asked for: for a training thread that waits, which so needs no second state.

    Args:
        live: What this rank holds.
    """

    def __init__(self, live: Mapping[TensorShard, Tensor]) -> None:
        self._live = live

    def view(self, placed: Placed) -> Tensor:
        """Returns a copy, so that what is compared with the live digest is what is written."""
        return torch.empty(placed.part.sizes, dtype=placed.part.dtype).copy_(self._live[placed.part])


class SharedBuffer:
    """Memory that two processes share through a descriptor; it ends with the last of them.

    Args:
        num_bytes: Its size.
        descriptor: Of one that was made elsewhere; it is taken over. None makes a new one.
    """

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        self.num_bytes = max(1, num_bytes)
        is_new = descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("genesis-staging", os.MFD_CLOEXEC)
        try:
            if is_new:
                os.ftruncate(descriptor, self.num_bytes)
            self._map = mmap.mmap(descriptor, self.num_bytes)
        except OSError:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self._pinned_address: int | None = None

    def view(self, placed: Placed) -> Tensor:
        """Returns a tensor over the part's place, in a storage of exactly its size."""
        part = placed.part
        count = math.prod(part.sizes)
        if count == 0:
            return torch.empty(part.sizes, dtype=part.dtype)
        return torch.frombuffer(self._map, dtype=part.dtype, count=count, offset=placed.byte_offset).view(part.sizes)

    def pin(self) -> None:
        """Makes copies from a CUDA device fast and asynchronous; a second call does nothing."""
        if self._pinned_address is None:
            address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives it no types
            code = int(runtime.cudaHostRegister(address, self.num_bytes, 0))
            if code != 0:
                raise SaveFailedError(f"{self.num_bytes} bytes for staging cannot be pinned: CUDA error {code}")
            self._pinned_address = address

    def close(self) -> None:
        """Gives the memory back once no tensor views it; a second call does nothing."""
        if self.descriptor >= 0:
            if self._pinned_address is not None:
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives it no types
                runtime.cudaHostUnregister(self._pinned_address)
            os.close(self.descriptor)
            self.descriptor = -1
            del self._map


def _bytes_of(tensor: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    flat: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def copy_into(target: Tensor, data: Tensor) -> None:
    """Copies a live tensor to its staged place.

    On the CPU by one thread, without the GIL: the training thread and its helpers go on. From a device it is started
    on the current stream.
    """
    is_plain = data.device.type == "cpu" and data.is_contiguous() and not data.is_conj() and not data.is_neg()
    if data.numel() > 0 and is_plain:
        np.copyto(_bytes_of(target), _bytes_of(data))
    else:
        target.copy_(data, non_blocking=True)
