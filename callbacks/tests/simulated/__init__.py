"""A simulated accelerator, `device.cpp`, which g++ compiles against the installed torch.

Load it in a process of its own (a rank of `run_ranks`): a process that has a device keeps it.
"""

import os
import shutil

import pytest
import torch
from lightning.pytorch.accelerators import Accelerator

from .runtime import COMPILER, NAME, build_library, load

__all__ = ["COMPILER", "NAME", "SimulatedAccelerator", "build_library", "load", "require_compiler", "the_device"]


def require_compiler() -> None:
    """Skips the test where there is no compiler; with GENESIS_REQUIRE_COMPILER=1 it fails."""
    if shutil.which(COMPILER) is None:
        if os.environ.get("GENESIS_REQUIRE_COMPILER") == "1":
            pytest.fail(f"there is no {COMPILER}, and GENESIS_REQUIRE_COMPILER is 1")
        pytest.skip(f"there is no {COMPILER} to compile the simulated device with")


def the_device() -> torch.device:
    return torch.device(NAME, 0)


class SimulatedAccelerator(Accelerator):
    """Lets a Lightning Trainer train on it."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def get_device_stats(self, device: torch.device) -> dict[str, object]:
        return {}

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: int) -> int:
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [the_device()]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME
