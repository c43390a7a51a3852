"""Measures the machine's matmul rate: multiplies large matrices with as many operations as the windows need.

Its tokens per second are therefore those of a trainer at peak speed, and a contender's tokens per second divided by
this worker's are the share of the peak that the contender reaches. The matrix size is the fastest of several; the data
type is that of the model's matrix multiplications.
"""

import sys
import time

import torch

from benchmarks.workers.protocol import Gate, Workload, workload_from_json
from genesis.base.device import synchronize

_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_MAX_SHARE_OF_WINDOW = 0.25
_SECONDS_PER_SIZE = 0.5


def _pick_size(workload: Workload, dtype: torch.dtype) -> int:
    """Returns the size of square matrices with the highest number of operations per second."""
    flops_per_window = workload.tokens_per_window * workload.flops_per_token
    sizes = [size for size in _SIZES if 2 * size**3 <= _MAX_SHARE_OF_WINDOW * flops_per_window] or _SIZES[:1]
    return max(sizes, key=lambda size: _measure_flops_per_second(workload.device, dtype, size))


def _measure_flops_per_second(device: str, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    synchronize(device)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < _SECONDS_PER_SIZE:
        torch.mm(a, b, out=out)
        synchronize(device)
        count += 1
    return count * 2 * size**3 / (time.perf_counter() - begin)


def main(arguments: list[str]) -> None:
    """Multiplies until the parent sends `quit`."""
    workload = workload_from_json(arguments[0])
    gate = Gate(workload, ["torch"])
    dtype = torch.float32 if workload.precision == "32-true" else torch.bfloat16
    size = _pick_size(workload, dtype)
    a, b = (torch.randn(size, size, device=workload.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    owed_flops = 0.0
    for _ in gate.passes():
        owed_flops += workload.tokens_per_window * workload.flops_per_token
        while owed_flops > 0:
            torch.mm(a, b, out=out)
            owed_flops -= 2 * size**3


if __name__ == "__main__":
    main(sys.argv[1:])
