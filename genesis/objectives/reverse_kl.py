"""The reverse KL of a student from its teacher over the whole vocabulary, whose logits never stand whole in memory.

With logits z at temperature T, a student has q = softmax(z / T), and a teacher p likewise:

    KL of a token = sum_v q_v (log q_v - log p_v),     d KL / d z_v = q_v (log q_v - log p_v - KL) / T

It is the divergence of `kl_div(log p, log q)`, without a factor T^2. The teacher's logits are computed chunk by chunk
from its hidden states, which are much smaller. Of a teacher with more rows than the student only the student's count.

N  tokens (all leading dimensions of `hidden` together)     D  student's width     E  teacher's width     V  vocabulary

References:
    Agarwal et al., "On-Policy Distillation of Language Models", arXiv:2306.13649, equation 2 (with beta 1).
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from genesis.base.device import kind_of
from genesis.model.loss import IGNORE_INDEX, add_product, find_product_dtype, split_chunks


class ReverseKL(NamedTuple):
    """Sums over the tokens with a label, in nats; only `divergence` has a graph.

    Args:
        divergence: The reverse KL.
        entropy: The student's entropy.
    """

    divergence: Float32[Tensor, ""]
    entropy: Float32[Tensor, ""]


def sum_reverse_kl(
    hidden: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    labels: Int64[Tensor, "*N"],
    teacher_hidden: Float[Tensor, "*N E"],
    teacher_weight: Float[Tensor, "V E"],
    temperature: Float32[Tensor, "1"],
) -> ReverseKL:
    """Returns the sums over the labels that are not `IGNORE_INDEX`; which tokens they name does not matter.

    Dtypes are those of `genesis.model.loss.sum_cross_entropy`, and gradients are computed in the forward as there. The
    teacher's products run in the dtype of its hidden states.

    Args:
        hidden: What the student gives to its head.
        weight: The student's output weight.
        labels: Of the shape of `hidden` without its last dimension.
        teacher_hidden: What the teacher gives to its head, for the same tokens.
        teacher_weight: The teacher's output weight.
        temperature: T.
    """
    dtype = find_product_dtype(hidden)
    hidden, labels, teacher_hidden = hidden.flatten(0, -2), labels.flatten(), teacher_hidden.flatten(0, -2)
    with torch.autocast(hidden.device.type, enabled=False):
        if kind_of(hidden.device) == "cpu":  # elsewhere the host would have to wait for the number of labels
            valid = (labels != IGNORE_INDEX).nonzero().squeeze(1)
            hidden, labels, teacher_hidden = hidden[valid], labels[valid], teacher_hidden[valid]
        needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        sums = _SumReverseKL.apply(  # type: ignore[no-untyped-call]  # torch's
            *(hidden, weight, labels, teacher_hidden, teacher_weight, temperature, dtype),
            *(needs_grad, needs_grad and weight.requires_grad),
        )
    return ReverseKL(*sums)


class _SumReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        temperature: Tensor,
        dtype: torch.dtype,
        needs_grad: bool,
        needs_weight_grad: bool,  # not where the output weight is frozen
    ) -> tuple[Tensor, Tensor]:
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight_grad else None
        divergence, entropy = torch.zeros((2,), dtype=torch.float32, device=hidden.device).unbind()
        low_weight, teacher_weight = weight.to(dtype), teacher_weight.to(teacher_hidden.dtype)
        for run in split_chunks(len(labels), weight):
            chunk, is_ignored = hidden[run].to(dtype), labels[run, None] == IGNORE_INDEX
            log_probs = (chunk @ low_weight.t()).float().div_(temperature).log_softmax(1)
            log_teacher = (teacher_hidden[run] @ teacher_weight.t()).float().div_(temperature).log_softmax(1)
            probs = log_probs.exp()
            entropy -= (probs * log_probs).sum(1, keepdim=True).masked_fill_(is_ignored, 0).sum()
            excess = log_probs.sub_(log_teacher)
            del log_teacher
            of_tokens = (probs * excess).sum(1, keepdim=True)
            divergence += of_tokens.masked_fill(is_ignored, 0).sum()
            if grad_hidden is None:
                continue
            low = excess.sub_(of_tokens).mul_(probs).div_(temperature).to(dtype)
            # Ignored rows are cleared where they are narrow, after and before the products.
            grad_hidden[run] = (low @ low_weight).masked_fill_(is_ignored, 0)
            if grad_weight is not None:
                grad_weight = add_product(grad_weight, low.t(), chunk.masked_fill(is_ignored, 0))
            del log_probs, excess, probs, low  # before the logits of the next chunk exist
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(entropy)
        return divergence, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # In place, which saves two copies; autograd refuses a second backward, since the saved tensors have changed.
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        return grad_hidden.mul_(scale), None if grad_weight is None else grad_weight.mul_(scale), *(None,) * 7
