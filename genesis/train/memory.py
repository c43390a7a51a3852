"""Peak memory of this process, where it trains."""

import resource
import sys

import torch

_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def peak_memory_bytes(device: torch.device) -> dict[str, float]:
    """Returns the peak bytes since the start, by metric key.

    On CUDA these are the bytes of tensors and the bytes that the allocator reserved; elsewhere it is the peak resident
    memory of the process.
    """
    # The allocator's own counters are read on the host and do not wait for the device.
    if device.type == "cuda":
        return {
            "memory/allocated_bytes": float(torch.cuda.max_memory_allocated(device)),
            "memory/reserved_bytes": float(torch.cuda.max_memory_reserved(device)),
        }
    return {"memory/resident_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES)}
