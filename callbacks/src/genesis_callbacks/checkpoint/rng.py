"""The random number generators of one rank: Python's, numpy's, torch's and each CUDA device's."""

import random
from functools import cache
from typing import Any

import numpy as np
import torch


@cache  # it asks the driver each time
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def read_rng_state() -> dict[str, Any]:
    """Returns the state of every generator of this process. It waits for CUDA where that is in use."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if _has_cuda():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def apply_rng_state(state: dict[str, Any]) -> None:
    """Sets every generator to what `read_rng_state` returned; CUDA's only if this process has as many devices."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if len(state.get("cuda", ())) == torch.cuda.device_count() and "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
