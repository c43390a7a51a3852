"""The gradients of a model that may be sharded: which rank counts which of them, and which are not finite."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ._compat import compute_norms, local_tensor

__all__ = ["find_nonfinite", "measure_norms", "weigh_gradient"]


def weigh_gradient(gradient: Tensor, num_stage_ranks: int) -> float:
    """Returns the weight of this rank's part of a gradient, so that each element counts once over all ranks.

    Of the copies on the gradient's own mesh only the first counts. Ranks of the stage outside of that mesh hold equal
    copies, and so do all ranks of the stage for a plain tensor: each of these counts for its share.

    Args:
        gradient: A DTensor without partial placements, or a tensor that is whole on every rank of a stage.
        num_stage_ranks: The ranks that hold the same stage of a pipeline as this one; without a pipeline, all ranks.
    """
    if not isinstance(gradient, DTensor):
        return 1.0 / num_stage_ranks
    mesh = gradient.device_mesh
    is_partial = any(placement.is_partial() for placement in gradient.placements)
    assert not is_partial, "FSDP2 leaves no partial gradient"
    # Not `is_shard()`, which is false for torch's strided shard of tensor parallelism under FSDP2.
    copies = [axis for axis, placement in enumerate(gradient.placements) if placement.is_replicate()]
    is_first = all(mesh.get_local_rank(axis) == 0 for axis in copies)
    return mesh.size() / num_stage_ranks if is_first else 0.0


def measure_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the 2-norm of this rank's part of each gradient, in float32 and on the device of the first one.

    It neither communicates nor waits for the device.
    """
    parts = [local_tensor(gradient).detach() for gradient in gradients]
    parts = [part._values() if part.is_sparse else part for part in parts]
    norms = compute_norms(parts)
    return torch.stack([norm.to(norms[0].device, torch.float32, non_blocking=True) for norm in norms])


def find_nonfinite(named: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Returns the names of the parameters of which this rank's part of the gradient is not finite. It waits."""
    pairs = [(name, p.grad) for name, p in dict(named).items() if p.grad is not None]
    if not pairs:
        return []
    is_finite = measure_norms([gradient for _, gradient in pairs]).isfinite().tolist()
    return [name for (name, _), finite in zip(pairs, is_finite, strict=True) if not finite]
