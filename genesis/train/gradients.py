"""The norm of a gradient that may be sharded, and what to do with it."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _shard_group(gradients: list[Tensor]) -> dist.ProcessGroup | None:
    """Returns the group over which `gradients` are sharded, or None where every rank holds them whole."""
    groups = {
        gradient.device_mesh.get_group(axis)
        for gradient in gradients
        if isinstance(gradient, DTensor)
        for axis, placement in enumerate(gradient.placements)
        if isinstance(placement, Shard)
    }
    if len(groups) > 1:
        raise RuntimeError("gradients are sharded over more than one mesh axis, so that no one group sums their norm")
    return groups.pop() if groups else None


def global_gradient_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> float:
    """Returns the 2-norm of all gradients together, the same float on every rank; 0.0 where there are none.

    Communicates once under sharding: every rank calls it. Waits for the device.

    Args:
        parameters: Their `.grad` is either whole on every rank or a DTensor.
        device: Where the process group of the shards communicates; offloaded gradients are on another.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    local_norm = torch.nn.utils.get_total_norm([_local(gradient) for gradient in gradients])
    group = _shard_group(gradients)
    if group is None:
        return float(local_norm)
    squared = local_norm.to(device=device, dtype=torch.float64).square()
    dist.all_reduce(squared, group=group)
    return math.sqrt(float(squared))


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies every gradient by `factor` in place. Does not communicate."""
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)
