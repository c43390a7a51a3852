"""The norm of a gradient that may be sharded, and the scaling of gradients."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from genesis_callbacks.gradients import weigh_gradient


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """Returns the 2-norm of all of the whole tensors together, summed in float32 or more."""
    # torch gives the norm of a 16-bit tensor in 16 bits: too few digits for a clip, and float16 overflows early.
    if all(gradient.element_size() >= torch.float32.itemsize for gradient in gradients):
        return get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def global_gradient_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, *, num_stage_ranks: int, world_size: int
) -> float:
    """Returns the result of `measure_gradients` as a float. Waits for the device."""
    norm = measure_gradients(parameters, device, num_stage_ranks=num_stage_ranks, world_size=world_size)
    return float(norm)


def measure_gradients(
    parameters: Iterable[nn.Parameter], device: torch.device, *, num_stage_ranks: int, world_size: int
) -> Tensor:
    """Returns the 2-norm of all gradients together, the same on every rank; 0 without gradients.

    Gradients may be sharded over any axes, of one mesh or of several, and stages of a pipeline may each hold some. It
    communicates once over all ranks, unless each of them holds every gradient whole: every rank calls it. It does not
    wait for the device.

    Args:
        parameters: Parameters whose `.grad` is a DTensor without partial placements, or whole on every rank of a stage.
        device: The device of the default process group; offloaded gradients are on another device.
        num_stage_ranks: The ranks that hold the same stage as this one.
        world_size: The number of all ranks.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if num_stage_ranks == world_size and not any(isinstance(gradient, DTensor) for gradient in gradients):
        return _total_norm(gradients) if gradients else torch.zeros((), device=device)
    by_weight: dict[float, list[Tensor]] = {}
    for gradient in gradients:
        by_weight.setdefault(weigh_gradient(gradient, num_stage_ranks), []).append(_local(gradient))
    # float64, because the squares of float32 norms may overflow float32. One number for each rank costs no time.
    squared = torch.zeros((), device=device, dtype=torch.float64)
    for weight, parts in by_weight.items():
        if weight:
            squared += _total_norm(parts).to(squared).square() * weight
    dist.all_reduce(squared)
    return squared.sqrt()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies every gradient by `factor` in place. Does not communicate."""
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)
