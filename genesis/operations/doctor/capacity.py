"""What the device of an examination can do, roughly: enough to decide what must be cut."""

from typing import Final

import torch

from genesis.base.device import is_host
from genesis.operations.doctor.facts import read_available_bytes
from genesis.operations.doctor.recipe import BuiltRecipe, Capacity

_FLOPS_PER_CORE: Final = 15e9
"""What training in float32 reaches on a core of a few years ago."""
_FLOPS_OF_DEVICE: Final = 2e13
_USED_SHARE: Final = 0.6


def measure_capacity(built: BuiltRecipe) -> Capacity:
    """Returns the capacity of the device that a recipe trains on."""
    device = built.trainer.strategy.root_device
    if is_host(device.type):
        return Capacity(int(_USED_SHARE * read_available_bytes()), _FLOPS_PER_CORE * torch.get_num_threads())
    module = torch.get_device_module(device)
    free = module.mem_get_info(device)[0] if hasattr(module, "mem_get_info") else read_available_bytes()
    return Capacity(int(_USED_SHARE * free), _FLOPS_OF_DEVICE)
