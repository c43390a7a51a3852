"""Peak memory of this process, where it trains."""

import resource
import sys

import torch

_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def peak_memory_bytes(device: torch.device) -> dict[str, float]:
    """Returns the peak bytes since the start, by metric key.

    On CUDA what tensors took and what the allocator reserved for them; elsewhere the peak resident memory of the
    process.
    """
    if device.type == "cuda":
        return {
            "memory/allocated_bytes": float(torch.cuda.max_memory_allocated(device)),
            "memory/reserved_bytes": float(torch.cuda.max_memory_reserved(device)),
        }
    return {"memory/resident_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES)}
