"""The random number generators of one rank: Python's, numpy's, torch's and each device's."""

import random
from typing import Any

import numpy as np
import torch

from .device import apply_device_rng, read_device_rng


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
