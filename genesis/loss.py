"""The sum of next-token cross-entropy over the valid tokens, without the logits ever standing whole in memory.

N  tokens (all leading dimensions of `hidden` together)     D  model width     V  vocabulary
"""

from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""The label that the loss does not count (torch's convention)."""

MAX_LOGITS_BYTES = 8 * 2**20
"""Float32 logits that exist at one time."""


class _SumCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients chunk by chunk in the forward, so that no logits wait for the backward.

    The gradients of a scalar are known up to the factor that comes from above; backward multiplies by it. Both matrix
    products of the gradient use the logits while they exist: nothing is computed twice.

    References:
        Hsu et al., Liger Kernel, arXiv:2410.10989, section 3.2 (FusedLinearCrossEntropy).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        num_tokens, rows = hidden.shape[0], max(1, MAX_LOGITS_BYTES // (4 * weight.shape[0]))
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, num_tokens, rows):
            chunk, target = hidden[start : start + rows], labels[start : start + rows]
            is_valid = (target != IGNORE_INDEX).unsqueeze(1)
            index = target.unsqueeze(1).clamp(min=0)
            log_probs = torch.log_softmax((chunk @ weight.t()).float(), dim=-1)
            loss_sum -= (log_probs.gather(1, index) * is_valid).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            grad_logits = log_probs.exp_()  # d(-log p)/d(logits) = softmax - onehot, zero where the label is ignored
            grad_logits.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad_logits.dtype))
            grad_logits = grad_logits.mul_(is_valid).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[start : start + rows])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ chunk
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (scale,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * scale.to(grad_weight.dtype),
            None,
        )


def sum_cross_entropy(
    hidden: Float[Tensor, "*N D"], weight: Float[Tensor, "V D"], labels: Int64[Tensor, "*N"]
) -> Float32[Tensor, ""]:
    """Returns the sum of -log p(label) over the labels that are not `IGNORE_INDEX`, in nats.

    Args:
        hidden: What the decoder gives to its head.
        weight: The output weight; logits are `hidden @ weight.T`.
        labels: Of the shape of `hidden` without its last dimension.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device_type, enabled=False):
        loss_sum: Tensor = _SumCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            hidden.flatten(0, -2), weight, labels.flatten()
        )
    return loss_sum
