"""Lightning's accelerator for any kind of device: its own for CPU and CUDA, a `torch.accelerator` one for others."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator

from genesis.base.device import count_devices, is_available, select_device


class TorchAccelerator(Accelerator):
    """A kind of device that torch knows and Lightning does not, such as XPU.

    Args:
        kind: The kind of device in torch, such as `xpu`.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def setup_device(self, device: torch.device) -> None:
        """Makes the device the current one."""
        select_device(device.type, device.index or 0)

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Returns no statistics, because `MemoryWatch` logs `memory/...`."""
        return {}

    def teardown(self) -> None:
        """Does nothing."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Returns the devices as given."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Returns the current accelerator's devices."""
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return [torch.device(found.type, index) for index in range(int(devices))]

    @staticmethod
    def auto_device_count() -> int:
        """Returns the number of devices."""
        found = torch.accelerator.current_accelerator()
        return 0 if found is None else count_devices(found.type)

    @staticmethod
    def is_available() -> bool:
        """Returns whether torch finds an accelerator."""
        found = torch.accelerator.current_accelerator()
        return found is not None and is_available(found.type)

    @staticmethod
    def name() -> str:
        """Returns the kind that torch finds."""
        found = torch.accelerator.current_accelerator()
        return "none" if found is None else found.type


def build_accelerator(kind: str) -> Accelerator:
    """Returns the accelerator of a Trainer for a kind of device."""
    if kind == "cpu":
        return CPUAccelerator()
    return CUDAAccelerator() if kind == "cuda" else TorchAccelerator(kind)
