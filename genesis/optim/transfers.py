"""Copies between a device and the host's memory that run beside the kernels, and what they cost.

Streams, events and page-locking are those of the checkpoints (`genesis_callbacks.checkpoint`), the same for every kind
of device. On the CPU, host and device are one memory: a copy happens at once, so that the same code gives the same bits
there.
"""

import mmap
import time
import warnings
import weakref
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from genesis.base.device import is_host, record_timer
from genesis_callbacks.checkpoint.device import (
    PIN_PIECE_BYTES,
    PinError,
    build_stream,
    pin_memory,
    record_event,
    unpin_memory,
    working_on,
)


class PinWarning(UserWarning):
    """The driver does not page-lock memory of the host: copies are slower and wait, and give the same bits."""


class HostMemory:
    """Zeroed memory of the host, page-locked for a device where its driver does that.

    Args:
        num_bytes: Its size.
        device: The device that copies from it and to it.
        pin_bytes: The size of the pieces that are page-locked; no copy may reach over the border of two pieces.

    Attributes:
        bytes: The memory, as a tensor of uint8.
    """

    def __init__(self, num_bytes: int, device: torch.device, pin_bytes: int = PIN_PIECE_BYTES) -> None:
        # Whole pages of its own: a page that is shared with other memory could not be locked twice.
        mapped = mmap.mmap(-1, max(1, num_bytes))
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        address = memory.data_ptr()
        self.bytes = memory[:num_bytes]
        pinned: list[int] = []
        weakref.finalize(self, _unpin, pinned, device).atexit = False  # at the end of a process the driver does that
        if is_host(device.type):
            return
        try:
            for start in range(0, num_bytes, pin_bytes):
                pin_memory(address + start, min(pin_bytes, num_bytes - start), device)
                pinned.append(address + start)
        except PinError as error:
            text = f"{num_bytes} bytes of host memory are not page-locked, so that transfers are slower: {error}"
            warnings.warn(text, PinWarning, stacklevel=2)


def _unpin(addresses: list[int], device: torch.device) -> None:
    for address in addresses:
        unpin_memory(address, device)


@dataclass
class Traffic:
    """What was moved, and for how long the device had nothing else to do.

    Args:
        to_device_bytes: Bytes that went to the device.
        to_host_bytes: Bytes that came from it.
        idle_seconds: Time in which the device, or on the CPU the host, waited for a copy.
    """

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    idle_seconds: float = 0.0
    _waits: list[tuple[torch.Event, torch.Event]] = field(default_factory=list)

    def take(self) -> "Traffic":
        """Returns what happened since the last call. Waits that are not over yet count in a later call."""
        pending = []
        for begin, end in self._waits:
            if end.query():
                self.idle_seconds += begin.elapsed_time(end) / 1e3
            else:
                pending.append((begin, end))
        taken = replace(self, _waits=[])
        vars(self).update(vars(Traffic(_waits=pending)))
        return taken

    def wait_for(self, mark: "Mark", device: torch.device) -> None:
        """Makes what the current stream does next wait for a mark; the host does not wait."""
        if mark is None:
            return
        if mark.query():
            mark.wait()
            return
        begin = record_timer(device)
        mark.wait()
        self.note_wait(begin, record_timer(device))

    def note_wait(self, begin: torch.Event, end: torch.Event) -> None:
        """Counts the time between two timers of a stream as a wait, once they have passed."""
        self._waits.append((begin, end))


Mark = torch.Event | None
"""A position in a stream; None on the CPU, where everything before has happened."""


def mark_now(device: torch.device) -> Mark:
    """Returns the position of the calling thread's stream on a device."""
    return None if is_host(device.type) else record_event(device)


class CopyLane:
    """Copies of one device, one after the other, beside its other streams.

    The caller keeps both tensors until the mark of a copy has passed.

    Args:
        device: The device.
        traffic: Where its copies are counted.
    """

    def __init__(self, device: torch.device, traffic: Traffic) -> None:
        self._device, self._traffic = device, traffic
        self._stream = None if is_host(device.type) else build_stream(device)

    def fetch(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        """Copies from the host to the device once a mark has passed, and returns the mark of its end."""
        self._traffic.to_device_bytes += source.nbytes
        return self._copy(target, source, after)

    def store(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        """Copies from the device to the host once a mark has passed, and returns the mark of its end."""
        self._traffic.to_host_bytes += source.nbytes
        return self._copy(target, source, after)

    def synchronize(self) -> None:
        """Makes the host wait until all copies so far have ended."""
        if self._stream is not None:
            with working_on(self._stream):
                mark = record_event(self._device)
            mark.synchronize()

    def _copy(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        if self._stream is None:
            begin = time.perf_counter()
            target.copy_(source)
            self._traffic.idle_seconds += time.perf_counter() - begin
            return None
        with working_on(self._stream):
            if after is not None:
                after.wait()
            target.copy_(source, non_blocking=True)
            return record_event(self._device)
