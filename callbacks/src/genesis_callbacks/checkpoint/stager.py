"""Stages one rank's part of a save: digests of all parts that the rank holds, copies of those that it writes."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..base.local_shards import LocalShard, TensorShard
from .device import DevicePath, PinError, build_stream, find_device, is_host, record_event, working_on
from .digest import DigestScratch, digest_chunk
from .stage import OneAtATime, Placed, SharedBuffer, Staged, copy_into, place_shards


@dataclass(frozen=True)
class StagedShards:
    """The result of staging: the parts that this rank writes, their locations, and the digests of all its parts."""

    placed: tuple[Placed, ...]
    digests: dict[TensorShard, int]
    data: Staged
    num_bytes: int


# Spare room, so that a tensor that grows slightly needs no new buffer: pinning one takes seconds.
_SLACK_FRACTION = 64


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
