"""Stages a save: copies live tensors to memory that training cannot change.

If the training thread waits until everything is written, one tensor at a time is copied, just before it is written.
Otherwise all are copied into one shared buffer without a name (`memfd_create`), which a writer process maps by its
descriptor. The buffer is pinned for copies from an accelerator.
"""

import contextlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..base.errors import naming
from ..base.local_shards import LocalShard, TensorShard
from .device import (
    PIN_PIECE_BYTES,
    DevicePath,
    PinError,
    build_stream,
    find_device,
    is_host,
    pin_memory,
    record_event,
    unpin_memory,
    working_on,
)
from .digest import DigestScratch, digest_chunk

_COPIES = Path("the memory for the copies of a save")  # as errors name it: a limit of the size of files applies to it
_ALIGNMENT_BYTES = 64  # a cache line, and a multiple of every element's size, as typed views require

# Spare room, so that a tensor that grows slightly needs no new buffer: pinning one takes seconds.
_SLACK_FRACTION = 64


@dataclass(frozen=True)
class Placed:
    """A part and the location of its elements in a shared buffer."""

    part: TensorShard
    byte_offset: int


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


@dataclass(frozen=True)
class StagedShards:
    """The result of staging: the parts that this rank writes, their locations, and the digests of all its parts."""

    placed: tuple[Placed, ...]
    digests: dict[TensorShard, int]
    data: Staged
    num_bytes: int


class SharedStager:
    """Stages into one shared buffer, which all saves use. One thread at a time uses the stager.

    Using the buffer again is safe because a save ends, on this rank, before the next one begins.

    Args:
        path: The path that staging takes on an accelerator.
    """

    def __init__(self, path: DevicePath | None = None) -> None:
        self.buffer: SharedBuffer | None = None
        self._notices: dict[str, str] = {}
        self._reported: set[str] = set()
        self._path = path or DevicePath()
        self._stream: torch.Stream | None = None
        self._scratch: DigestScratch | None = None

    @property
    def scratch_bytes(self) -> int:
        """Memory that digests hold on the device as long as the fit lasts."""
        return 0 if self._scratch is None else self._scratch.num_bytes

    def take_notices(self) -> list[str]:
        """Returns the warnings that the user has not seen yet: one for each kind of problem."""
        new = [text for kind, text in self._notices.items() if kind not in self._reported]
        self._reported |= self._notices.keys()
        return new

    def reserve(self, device: torch.device, ours: Sequence[TensorShard]) -> None:
        """Allocates and pins all memory that saves of these parts need, before the first of them. Waits for the driver.

        It raises no error, because the save would meet the same error and report it.
        """
        try:
            with self._on_save_stream(device):
                self._reserve_pinned(device, place_shards(ours)[1])
        except (OSError, RuntimeError) as error:
            self._notices["reserve"] = f"staging memory could not be allocated before the first save: {error}"

    def reserve_scratch(self, device: torch.device) -> None:
        """Allocates only the memory on the device, on the calling thread's stream, for saves without staging."""
        if self._scratch is None and self._path.has_digests:
            try:
                self._scratch = DigestScratch(device)
            except torch.OutOfMemoryError as error:
                self._note_no_room(error)

    def stage(
        self, live: Mapping[TensorShard, Tensor], ours: Sequence[TensorShard], event: torch.Event | None
    ) -> StagedShards:
        """Stages this rank's parts and returns when the copy is complete.

        Args:
            live: All parts that this rank holds.
            ours: The parts that this rank writes.
            event: The position of the training stream when the snapshot was taken; None on the CPU.
        """
        placed, num_bytes = place_shards(ours)
        if event is None:
            buffer = self._reserve(num_bytes)
            digests = _digest_and_copy(live, placed, buffer)
        else:
            device = event.device
            with self._on_save_stream(device) as stream:
                buffer = self._reserve_pinned(device, num_bytes)
                stream.wait_event(event)  # the device waits, this thread does not
                digests = self._stage_from_device(stream, live, placed, buffer)
        return StagedShards(placed, digests, buffer, num_bytes)

    def stage_one_at_a_time(self, live: Mapping[TensorShard, Tensor], ours: Sequence[TensorShard]) -> StagedShards:
        """Returns the digests of all live parts; each part is copied when it is written, while training waits."""
        placed, num_bytes = place_shards(ours)
        device = find_device(live.values())
        with torch.no_grad():
            if device is None:
                digests = {part: digest_chunk(data, part.shape, part.offsets) for part, data in live.items()}
            else:
                self.reserve_scratch(device)
                digests = self._digest_on_device(live) or _digest_on_host(live, {})
        return StagedShards(placed, digests, OneAtATime(live), num_bytes)

    @contextlib.contextmanager
    def _on_save_stream(self, device: torch.device) -> Iterator[torch.Stream]:
        """Runs the calling thread's work on the saves' own stream."""
        self._stream = self._stream or build_stream(device)
        with working_on(self._stream):
            yield self._stream

    def _stage_from_device(
        self, stream: torch.Stream, live: Mapping[TensorShard, Tensor], placed: Sequence[Placed], buffer: SharedBuffer
    ) -> dict[TensorShard, int]:
        # The caching allocator may reuse freed memory while another stream still reads it. The live tensors need no
        # `record_stream` against that: `live` refers to them until the wait below.
        with torch.no_grad():
            for item in placed:
                data = live[item.part]
                if is_host(data.device):
                    copy_into(buffer.view(item), data)
                else:
                    buffer.copy_from_device(item, data)
            # Queued after the copies on the same stream, so that here, too, the digest comes after the copy.
            digests = self._digest_on_device(live)
            # Copies to pinned memory return before they are done: without this wait a writer would read old bytes.
            stream.synchronize()
            if digests is None:
                digests = _digest_on_host(live, {item.part: buffer.view(item) for item in placed})
        return digests

    def _digest_on_device(self, live: Mapping[TensorShard, Tensor]) -> dict[TensorShard, int] | None:
        """Returns the digests of all live tensors, with one wait for the device; None if the device lacks memory."""
        if self._scratch is None:
            return None
        there = {part: data for part, data in live.items() if not is_host(data.device)}
        try:
            sums = self._scratch.digest_all([(data, part.shape, part.offsets) for part, data in there.items()])
        except torch.OutOfMemoryError as error:
            self._note_no_room(error)
            return None
        found = dict(zip(there, sums, strict=True))
        return {
            part: found[part] if part in found else digest_chunk(data, part.shape, part.offsets)
            for part, data in live.items()
        }

    def _reserve_pinned(self, device: torch.device, num_bytes: int) -> SharedBuffer:
        """Returns a buffer, pinned if possible, and allocates the digests' scratch. On the current stream."""
        self.reserve_scratch(device)
        buffer = self._reserve(num_bytes, num_bytes // _SLACK_FRACTION)
        if self._path.has_pinning:
            try:
                buffer.pin(device)
            except PinError as error:
                self._path = replace(self._path, has_pinning=False)
                self._notices["pin"] = (
                    f"staging memory is not pinned, so that copies from the device are slower: {error}"
                )
        return buffer

    def _reserve(self, num_bytes: int, slack_bytes: int = 0) -> SharedBuffer:
        if self.buffer is None or self.buffer.num_bytes < num_bytes:
            if self.buffer is not None:
                self.buffer.close()  # first, so that the old and the new buffer never coexist
            self.buffer = SharedBuffer(num_bytes + slack_bytes)
        return self.buffer

    def _note_no_room(self, error: BaseException) -> None:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._notices["room"] = (
            f"the device has no memory left for digests, so that they are computed from the staged copies: {reason}"
        )

    def close(self) -> None:
        """Frees the buffer once no tensor views it; a second call does nothing."""
        self._scratch = self._stream = None
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None


def record_staging_event(parts: Sequence[LocalShard]) -> torch.Event | None:
    """Marks the position of the training stream, for copies on another; None if all tensors are on the CPU."""
    device = find_device(local.data for local in parts)
    return None if device is None else record_event(device)


def _digest_on_host(live: Mapping[TensorShard, Tensor], copies: Mapping[TensorShard, Tensor]) -> dict[TensorShard, int]:
    """Returns the digests of all live tensors; for a tensor on a device, from its copy or a temporary one."""

    def on_host(part: TensorShard, data: Tensor) -> Tensor:
        return copies[part] if part in copies and not is_host(data.device) else data.to("cpu")

    return {part: digest_chunk(on_host(part, data), part.shape, part.offsets) for part, data in live.items()}


def _digest_and_copy(
    live: Mapping[TensorShard, Tensor], placed: Sequence[Placed], buffer: SharedBuffer
) -> dict[TensorShard, int]:
    """Returns the digests of all live tensors and copies those that this rank writes. On the CPU."""
    # The digest is of the live tensor, after its copy. A digest of the copy would agree with the file in any case, and
    # would hide a write that came while the tensor was copied.
    targets = {item.part: buffer.view(item) for item in placed}
    digests: dict[TensorShard, int] = {}
    with torch.no_grad():
        for part, data in live.items():
            if part in targets:
                copy_into(targets[part], data)
            digests[part] = digest_chunk(data, part.shape, part.offsets)
    return digests
