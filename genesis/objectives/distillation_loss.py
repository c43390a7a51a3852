"""The loss of distillation, and the teacher's side of it; the logits never stand whole in memory.

At temperature T a model with logits z gives id j the probability softmax(z / T)[j]. The teacher's K most probable ids
are classes of their own, and all other ids together are one further class, the *rest*:

    p_1, ..., p_K, p_rest    the teacher's classes, over the tokenizer's ids: padding rows of its head are left out
    q_1, ..., q_K, q_rest    the student's probabilities of the same ids, and of all its other ids together

    loss of a token = (1 - a) CE + a T^2 KL,     KL = sum_i p_i (log p_i - log q_i) + p_rest (log p_rest - log q_rest)

CE is the usual cross-entropy of the label, at temperature 1. The logarithm of a rest is a logsumexp over its own
logits, never log(1 - sum): a rest of 1e-20 keeps all its digits. With K equal to the number of ids the rest is empty,
p_rest is 0, and its term is 0.

N  tokens (all leading dimensions of `hidden` together)     D  model width     V  vocabulary     K  top ids

References:
    Hinton et al., "Distilling the Knowledge in a Neural Network", arXiv:1503.02531, section 2 (temperature and T^2).
"""

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from genesis.model.loss import IGNORE_INDEX, add_product, normalise, split_chunks


class TeacherClasses(NamedTuple):
    """A teacher's probabilities for each token.

    Args:
        ids: The most probable ids, each once, from the most probable one on.
        log_probs: Their log-probabilities at the temperature.
        log_rest: The log-probability of all other ids together; minus infinity if there are none.
    """

    ids: Int32[Tensor, "*N K"]
    log_probs: Float32[Tensor, "*N K"]
    log_rest: Float32[Tensor, "*N"]


class DistillationSums(NamedTuple):
    """Sums over the valid tokens; only `loss` has a graph.

    Args:
        loss: The loss, in nats.
        cross_entropy: The cross-entropy of the labels, in nats.
        divergence: The divergence from the teacher, in nats, without the factor T^2.
        rest: The teacher's probability of the rest.
    """

    loss: Float32[Tensor, ""]
    cross_entropy: Float32[Tensor, ""]
    divergence: Float32[Tensor, ""]
    rest: Float32[Tensor, ""]


@torch.no_grad()
def read_classes(
    hidden: Float[Tensor, "*N D"], weight: Float[Tensor, "V D"], *, vocab_size: int, top_k: int, temperature: float
) -> TeacherClasses:
    """Returns a teacher's classes for each token. The product runs in the dtype of `hidden`, the rest in float32.

    Args:
        hidden: What the teacher gives to its head.
        weight: The teacher's output weight.
        vocab_size: Number of the tokenizer's ids; further rows of `weight` are padding.
        top_k: K, at most `vocab_size`.
        temperature: T.
    """
    shape, hidden, weight = hidden.shape[:-1], hidden.flatten(0, -2), weight[:vocab_size].to(hidden.dtype)
    ids = torch.empty((len(hidden), top_k), dtype=torch.int32, device=hidden.device)
    log_probs = torch.empty((len(hidden), top_k), dtype=torch.float32, device=hidden.device)
    log_rest = torch.full((len(hidden),), -math.inf, dtype=torch.float32, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for run in split_chunks(len(hidden), weight):
            logits = (hidden[run] @ weight.t()).float().div_(temperature)
            values, indices = logits.topk(top_k)
            log_normaliser = values.logsumexp(1)
            if top_k < vocab_size:
                rest = logits.scatter_(1, indices, -math.inf).logsumexp(1)
                log_normaliser = torch.logaddexp(log_normaliser, rest)
                log_rest[run] = rest - log_normaliser
            ids[run] = indices.int()
            log_probs[run] = values - log_normaliser[:, None]
    return TeacherClasses(ids.view(*shape, top_k), log_probs.view(*shape, top_k), log_rest.view(shape))


def sum_distillation(
    hidden: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    labels: Int64[Tensor, "*N"],
    classes: TeacherClasses,
    *,
    temperature: float,
    share: float,
    compare: "Comparisons | None" = None,
) -> DistillationSums:
    """Returns the sums over the labels that are not `IGNORE_INDEX`.

    Dtypes are those of `genesis.model.loss.sum_cross_entropy`, and gradients are computed in the forward as there.

    Args:
        hidden: What the student gives to its head.
        weight: The student's output weight.
        labels: Of the shape of `hidden` without its last dimension.
        classes: The teacher's, for the same tokens, at the same temperature.
        temperature: T.
        share: a, from 0 (cross-entropy alone) to 1 (the teacher alone).
        compare: How logits are compared if this rank has those of some rows of the weight; None if it has all.
    """
    # As in `genesis.model.loss`: autocast does not cast a custom Function; inside it would cast float32 products.
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
    flat = TeacherClasses(classes.ids.flatten(0, -2), classes.log_probs.flatten(0, -2), classes.log_rest.flatten())
    with torch.autocast(device_type, enabled=False):
        needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        sums = _SumDistillation.apply(  # type: ignore[no-untyped-call]  # torch's
            *(hidden.flatten(0, -2), weight, labels.flatten(), flat, temperature, share, dtype),
            *(needs_grad, needs_grad and weight.requires_grad, compare or _WHOLE),
        )
    return DistillationSums(*sums)


class _SumDistillation(torch.autograd.Function):
    """Computes the sums and gradients of the loss chunk by chunk, as `genesis.model.loss` does for cross-entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        classes: TeacherClasses,
        temperature: float,
        share: float,
        dtype: torch.dtype,
        needs_grad: bool,
        needs_weight_grad: bool,  # not where the output weight is frozen
        compare: "Comparisons",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight_grad else None
        cross_entropy, divergence, rest_mass = torch.zeros((3,), dtype=torch.float32, device=hidden.device).unbind()
        low_weight = weight.to(dtype)
        for run in split_chunks(len(labels), weight):
            chunk, target = hidden[run].to(dtype), labels[run, None]
            is_ignored = target == IGNORE_INDEX
            logits = (chunk @ low_weight.t()).float()
            of_label, grad_logits = compare.label(logits, target.masked_fill(is_ignored, 0))
            of_chunk = TeacherClasses(
                classes.ids[run].long(),
                classes.log_probs[run].masked_fill(is_ignored, 0),
                classes.log_rest[run, None].masked_fill(is_ignored, 0),
            )
            of_teacher = compare.teacher(
                logits.div_(temperature),  # the last use of the logits at temperature 1
                of_chunk,
                # d(a T^2 KL) / d(logits) = a T d(KL) / d(logits / T)
                grad_logits.mul_(1.0 - share) if grad_hidden is not None else None,
                share * temperature,
            )
            cross_entropy += of_label.masked_fill_(is_ignored, 0).sum()
            divergence += of_teacher.masked_fill_(is_ignored, 0).sum()
            rest_mass += of_chunk.log_rest.exp().masked_fill_(is_ignored, 0).sum()
            if grad_hidden is None:
                continue
            low = grad_logits.to(dtype)
            # Ignored rows are cleared where they are narrow, after and before the products.
            grad_hidden[run] = (low @ low_weight).masked_fill_(is_ignored, 0)
            if grad_weight is not None:
                grad_weight = add_product(grad_weight, low.t(), chunk.masked_fill(is_ignored, 0))
            del logits, grad_logits, low  # before the logits of the next chunk exist
        loss = (1.0 - share) * cross_entropy + share * temperature**2 * divergence
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(cross_entropy, divergence, rest_mass)
        return loss, cross_entropy, divergence, rest_mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # In place, which saves two copies; autograd refuses a second backward, since the saved tensors have changed.
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        return grad_hidden.mul_(scale), None if grad_weight is None else grad_weight.mul_(scale), *(None,) * 8


def _compare_label(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns -log p(label) of each row as a column, and its gradient in the logits."""
    probs, log_normaliser = normalise(logits)
    of_label = log_normaliser - logits.gather(1, target)
    return of_label, probs.scatter_add_(1, target, probs.new_full(target.shape, -1.0))


def _compare_teacher(logits: Tensor, teacher: TeacherClasses, grad_logits: Tensor | None, factor: float) -> Tensor:
    """Returns the divergence of each row as a column, and adds its gradient times `factor` to `grad_logits`.

    Args:
        logits: The student's, at the temperature; they are overwritten.
        teacher: The classes of the rows, the rest as a column.
        grad_logits: Where the gradient is added; None to compute none.
        factor: The factor of the gradient.
    """
    top = logits.gather(1, teacher.ids)
    log_normaliser = top.logsumexp(1, keepdim=True)
    probs, rest_prob = teacher.log_probs.exp(), teacher.log_rest.exp()
    if teacher.ids.shape[1] == logits.shape[1]:  # without a rest, whose softmax would be 0 / 0
        log_top = top - log_normaliser
        if grad_logits is not None:
            grad_logits.scatter_add_(1, teacher.ids, (log_top.exp() - probs).mul_(factor))
        return weigh(probs, teacher.log_probs, log_top)
    # The softmax over the rest alone: one exponential for each logit serves the normaliser, the rest and the gradient,
    # and a rest far below the largest logit keeps its digits.
    rest = logits.scatter_(1, teacher.ids, -math.inf)
    within, log_rest_sum = normalise(rest)
    log_normaliser = torch.logaddexp(log_normaliser, log_rest_sum)
    log_top, log_rest = top - log_normaliser, log_rest_sum - log_normaliser
    if grad_logits is not None:
        # d(KL)/d(z_i) = q_i - p_i for the teacher's classes, and softmax-within-the-rest times q_rest - p_rest.
        grad_logits.addcmul_(within, log_rest.exp() - rest_prob, value=factor)
        grad_logits.scatter_add_(1, teacher.ids, (log_top.exp() - probs).mul_(factor))
    return weigh(probs, teacher.log_probs, log_top) + weigh(rest_prob, teacher.log_rest, log_rest)


class Comparisons(NamedTuple):
    """How the logits of a chunk of tokens are compared with the label and with the teacher.

    Args:
        label: Returns -log p(label) of each row as a column, and its gradient in the logits.
        teacher: Returns the divergence of each row as a column, and adds its gradient times a factor to the gradient in
            the logits, unless that is None; it may overwrite the logits, which are those at the temperature.
    """

    label: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    teacher: Callable[[Tensor, TeacherClasses, Tensor | None, float], Tensor]


_WHOLE: Final = Comparisons(_compare_label, _compare_teacher)


def weigh(probs: Tensor, log_probs: Tensor, log_student: Tensor) -> Tensor:
    """Returns the sum of p (log p - log q) over each row as a column, in which a class with p = 0 counts as 0."""
    terms = probs * (log_probs - log_student)
    return terms.masked_fill_(probs == 0, 0).sum(1, keepdim=True)
