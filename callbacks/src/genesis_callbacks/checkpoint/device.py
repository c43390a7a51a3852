"""The accelerator that trains, as saves use it: the same path for CUDA, ROCm, XPU and any other that torch supports.

Streams and events are torch's device-neutral ones. Torch can page-lock existing memory on CUDA and ROCm only. A device
whose torch module has no such function copies to pageable memory, which is slower and equally exact.
"""

import contextlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

PIN_PIECE_BYTES = 256 << 20
"""The driver holds a lock while it pins a piece, and other threads' kernels wait for it."""


@dataclass(frozen=True)
class DevicePath:
    """The path that a save takes on a device; every path gives the same checkpoint.

    Attributes:
        has_pinning: Whether copies go to page-locked memory, if the driver provides it.
        has_digests: Whether digests are computed on the device, from the live tensors, or on the host, from the copies.
    """

    has_pinning: bool = True
    has_digests: bool = True


class PinError(RuntimeError):
    """The driver does not page-lock memory."""


@cache  # torch asks the driver at each call
def read_accelerator() -> torch.device | None:
    """Returns the kind of accelerator that this process can use, or None. It does not initialise the device."""
    return torch.accelerator.current_accelerator(check_available=True)


def is_host(device: torch.device) -> bool:
    """Returns whether tensors on `device` lie in the host's memory, or have no memory."""
    return device.type in ("cpu", "meta")


def find_device(tensors: Iterable[Tensor]) -> torch.device | None:
    """Returns the device of the first tensor that is not on the host; None if all are on the host."""
    if read_accelerator() is None:
        return None
    return next((tensor.device for tensor in tensors if not is_host(tensor.device)), None)


def record_event(device: torch.device) -> torch.Event:
    """Returns an event that marks the position of the calling thread's stream on `device`."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def build_timer(device: torch.device) -> torch.Event:
    """Returns an event that can measure the time to another one, and that has not been recorded yet."""
    return torch.Event(device, enable_timing=True)


def name_device(device: torch.device) -> str:
    """Returns the name that the driver gives to a device; the kind of device where there is no name."""
    read = None if is_host(device) else getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if read is None else str(read(device.index or 0))


def read_device_uuid(device: torch.device) -> str | None:
    """Returns the identity that the driver gives to a device; None for the host and where torch does not know it."""
    read = None if is_host(device) else getattr(torch.get_device_module(device), "get_device_properties", None)
    found = None if read is None else getattr(read(device.index or 0), "uuid", None)
    return None if found is None else str(found)


@dataclass(frozen=True)
class DeviceMemory:
    """What the allocator of a device counts in this process, in bytes.

    Attributes:
        allocated: Tensors.
        reserved: What the allocator has taken from the driver.
        peak: The most that tensors took since the start, or since somebody reset torch's peak.
        split: Unused pieces of blocks that are otherwise in use; no other process can have them.
    """

    allocated: int
    reserved: int
    peak: int
    split: int


def read_device_memory(device: torch.device) -> DeviceMemory | None:
    """Returns what torch counts on the host, without a wait; None for a device whose memory it does not count."""
    read = None if is_host(device) else getattr(torch.get_device_module(device), "memory_stats", None)
    if read is None:
        return None
    counts = read(device.index or 0)
    names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
    return DeviceMemory(*(int(counts.get(name, 0)) for name in (*names, "inactive_split_bytes.all.current")))


def build_stream(device: torch.device) -> torch.Stream:
    """Returns a new stream of `device`."""
    with torch.accelerator.device_index(device.index):
        return torch.Stream(device)


@contextlib.contextmanager
def working_on(stream: torch.Stream) -> Iterator[None]:
    """Runs the calling thread's work on `stream` and its device."""
    # Both are state of a thread in torch: the saves' thread starts with the first device, whatever training uses.
    with torch.accelerator.device_index(stream.device.index), stream:
        yield


# ---- page-locked memory
# `Tensor.pin_memory` allocates memory of its own, which no other process can map. So the staging buffer, which exists
# already, is registered with the driver.


def pin_memory(address: int, num_bytes: int, device: torch.device) -> None:
    """Page-locks memory of the host, so that copies from `device` into it are fast and do not wait.

    Raises:
        PinError: Torch cannot do that for the device, or the driver refuses; the memory is unchanged.
    """
    runtime = _read_runtime(device)
    if runtime is None:
        raise PinError(f"torch cannot pin memory for a device of type {device.type}")
    with torch.accelerator.device_index(device.index):
        code = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if code != 0:
            _clear_error(device)
            raise PinError(f"the driver does not pin {num_bytes} bytes (error {code})")


def unpin_memory(address: int, device: torch.device) -> None:
    """Unlocks page-locked memory. An error, as after the loss of the device, has no remedy and is cleared."""
    code = int(_read_runtime(device).cudaHostUnregister(address))
    if code != 0:
        _clear_error(device)


def _read_runtime(device: torch.device) -> Any:
    read = getattr(torch.get_device_module(device), "cudart", None)
    return None if read is None else read()


def _clear_error(device: torch.device) -> None:
    """Clears the runtime's last error, which this thread's next kernel would raise."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


# ---- random generators


def _read_generators() -> tuple[str, Any] | None:
    accelerator = read_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return None if accelerator is None or not hasattr(module, "get_rng_state_all") else (accelerator.type, module)


def read_device_rng() -> dict[str, list[Tensor]]:
    """Returns the state of each device's generator by the kind of device, such as `cuda`. It waits for the devices."""
    generators = _read_generators()
    return {} if generators is None else {generators[0]: generators[1].get_rng_state_all()}


def apply_device_rng(state: dict[str, Any]) -> None:
    """Sets each device's generator to its state in `state`, if this process has as many devices of that kind."""
    generators = _read_generators()
    if generators is None:
        return
    kind, module = generators
    if kind in state and len(state[kind]) == torch.accelerator.device_count():
        module.set_rng_state_all(state[kind])


def read_rng_state() -> dict[str, Any]:
    """Returns the state of every generator of this process. It waits for the devices, if any."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        **read_device_rng(),
    }


def apply_rng_state(state: dict[str, Any]) -> None:
    """Sets every generator to the state of `read_rng_state`; devices' only if the number of devices is equal."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    apply_device_rng(state)
