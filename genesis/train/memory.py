"""Peak memory of this process on the device that it trains on."""

import resource
import sys

import torch

from genesis.device import read_peak_memory

_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def peak_memory_bytes(device: torch.device) -> dict[str, float]:
    """Returns the peak bytes since the start, by metric key.

    On CUDA and XPU these are the bytes of tensors and the bytes that the allocator reserved; elsewhere it is the peak
    resident memory of the process.
    """
    # The allocator's own counters are read on the host and do not wait for the device.
    peak = read_peak_memory(device.type, device.index)
    if peak is not None:
        return {
            "memory/allocated_bytes": float(peak.allocated_bytes),
            "memory/reserved_bytes": float(peak.reserved_bytes),
        }
    return {"memory/resident_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES)}
