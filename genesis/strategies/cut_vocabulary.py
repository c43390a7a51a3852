"""Losses over a vocabulary whose rows ranks share: no rank ever has the logits of all rows.

N  tokens (all leading dimensions together)     D  model width     R  rows of the vocabulary on this rank
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from genesis.model.cut import held
from genesis.model.loss import IGNORE_INDEX, add_product, find_product_dtype, split_chunks
from genesis.objectives.distillation_loss import (
    Comparisons,
    DistillationSums,
    TeacherClasses,
    sum_distillation,
    weigh,
)
from genesis.objectives.vocabulary import Vocabulary
from genesis.strategies.tensor_parallel import RowShare


class CutVocabulary(Vocabulary):
    """The losses of whole rows, the same on every rank that shares the vocabulary.

    The gradient of the hidden states is this rank's part, which the backward of the gather adds up.

    Args:
        share: The ranks that share the vocabulary and the tokens of rows.
    """

    def __init__(self, share: RowShare) -> None:
        self._share = share

    def sum_cross_entropy(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Returns the sum of -log p(label) over the labels that are not ignored, in nats. Communicates."""
        return self.token_losses(hidden, weight, labels).sum()

    def token_losses(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Returns -log p(label) of each token, with all leading dimensions in one. Communicates."""
        dtype = find_product_dtype(hidden)
        rows = self._share.gather(hidden).flatten(0, -2)
        with torch.autocast(hidden.device.type, enabled=False):
            losses: Tensor = _CutTokenLosses.apply(  # type: ignore[no-untyped-call]  # torch's
                rows, held(weight), labels.flatten(), dtype, self._share
            )
        return losses

    def sum_distillation(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        classes: TeacherClasses,
        *,
        temperature: float,
        share: float,
    ) -> DistillationSums:
        """Returns the sums of `genesis.objectives.distillation_loss`. Communicates."""
        compare = Comparisons(partial(_compare_label, self._share), partial(_compare_teacher, self._share))
        rows = self._share.gather(hidden)
        return sum_distillation(
            rows, held(weight), labels, classes, temperature=temperature, share=share, compare=compare
        )


class _CutTokenLosses(torch.autograd.Function):
    """Two small reductions a chunk: of the largest logits, and of the sums of exponentials and the labels' logits.

    The backward computes the logits of each chunk again and needs no further reduction, because the forward keeps the
    logarithm of each token's normaliser.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "N D"],
        weight: Float[Tensor, "R D"],
        labels: Int64[Tensor, " N"],
        dtype: torch.dtype,
        share: RowShare,
    ) -> Float32[Tensor, " N"]:
        assert len(hidden) == len(labels), "hidden states and labels are of the same tokens"
        normalisers = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        losses = torch.empty_like(normalisers)
        low_weight = weight.to(dtype)
        for run in split_chunks(len(labels), weight):
            own, is_own = _find_own(labels[run, None], len(weight), share)
            logits = (hidden[run].to(dtype) @ low_weight.t()).float()
            largest = _find_largest(share, logits)
            logits.sub_(largest)
            of_label = logits.gather(1, own).masked_fill_(~is_own, 0.0)
            sums = _add(share, torch.cat((logits.exp_().sum(1, keepdim=True), of_label), dim=1))
            log_total = sums[:, 0].log()
            losses[run] = (log_total - sums[:, 1]).masked_fill_(labels[run] == IGNORE_INDEX, 0.0)
            normalisers[run] = log_total + largest.squeeze(1)
            del logits  # before those of the next chunk exist
        ctx.save_for_backward(hidden, weight, labels, normalisers)
        ctx.dtype, ctx.share = dtype, share
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, normalisers = ctx.saved_tensors
        needs_hidden_grad, needs_weight_grad, *_ = ctx.needs_input_grad
        factors = grads[0].masked_fill(labels == IGNORE_INDEX, 0.0).unsqueeze(1)
        grad_hidden = torch.empty_like(hidden) if needs_hidden_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight_grad else None
        low_weight = weight.to(ctx.dtype)
        for run in split_chunks(len(labels), weight):
            own, is_own = _find_own(labels[run, None], len(weight), ctx.share)
            chunk = hidden[run].to(ctx.dtype)
            # d(-log p)/d(logits) = softmax - onehot, of this rank's rows.
            probs = (chunk @ low_weight.t()).float().sub_(normalisers[run, None]).exp_()
            probs.scatter_add_(1, own, -is_own.float())
            grad_logits = probs.mul_(factors[run]).to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[run] = grad_logits @ low_weight
            if grad_weight is not None:
                grad_weight = add_product(grad_weight, grad_logits.t(), chunk)
            del probs, grad_logits  # before those of the next chunk exist
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _compare_label(share: RowShare, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns -log p(label) of each row as a column, and its gradient in this rank's logits."""
    own, is_own = _find_own(target, logits.shape[1], share)
    largest = _find_largest(share, logits)
    probs = (logits - largest).exp_()
    of_label = (logits.gather(1, own) - largest).masked_fill_(~is_own, 0.0)
    sums = _add(share, torch.cat((probs.sum(1, keepdim=True), of_label), dim=1))
    total, of_label = sums[:, :1], sums[:, 1:]
    return total.log() - of_label, probs.div_(total).scatter_add_(1, own, -is_own.float())


def _compare_teacher(
    share: RowShare, logits: Tensor, teacher: TeacherClasses, grad_logits: Tensor | None, factor: float
) -> Tensor:
    """Returns the divergence of each row as a column; as `genesis.objectives.distillation_loss`, of some logits."""
    num_rows, num_ids = logits.shape[1], teacher.ids.shape[1]
    own, is_own = _find_own(teacher.ids, num_rows, share)
    top = _add(share, logits.gather(1, own).masked_fill_(~is_own, 0.0))
    log_normaliser = top.logsumexp(1, keepdim=True)
    probs, rest_prob = teacher.log_probs.exp(), teacher.log_rest.exp()
    has_rest = num_ids < num_rows * share.size
    if has_rest:
        # A column more for the ids of other ranks.
        is_top = torch.zeros((len(logits), num_rows + 1), dtype=torch.bool, device=logits.device)
        is_top.scatter_(1, own.masked_fill(~is_own, num_rows), value=True)
        rest = logits.masked_fill_(is_top[:, :-1], -math.inf)
        largest = _find_largest(share, rest)
        within = rest.sub_(largest).exp_()
        total = _add(share, within.sum(1, keepdim=True))
        log_rest_sum = largest + total.log()
        log_normaliser = torch.logaddexp(log_normaliser, log_rest_sum)
        log_rest = log_rest_sum - log_normaliser
    log_top = top - log_normaliser
    if grad_logits is not None:
        if has_rest:
            grad_logits.addcmul_(within.div_(total), log_rest.exp() - rest_prob, value=factor)
        of_ids = (log_top.exp() - probs).mul_(factor).masked_fill_(~is_own, 0.0)
        grad_logits.scatter_add_(1, own, of_ids)
    divergence = weigh(probs, teacher.log_probs, log_top)
    return divergence + weigh(rest_prob, teacher.log_rest, log_rest) if has_rest else divergence


def _find_largest(share: RowShare, logits: Tensor) -> Tensor:
    largest = logits.amax(1, keepdim=True)
    share.note_reduction(largest)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=share.group)
    return largest


def _add(share: RowShare, sums: Tensor) -> Tensor:
    share.note_reduction(sums)
    dist.all_reduce(sums, group=share.group)
    return sums


def _find_own(labels: Int64[Tensor, "N K"], num_rows: int, share: RowShare) -> tuple[Tensor, Tensor]:
    """Returns the row of each label on this rank, or 0, and whether the label is here."""
    own = labels - share.rank * num_rows
    is_own = (own >= 0) & (own < num_rows)
    return own.masked_fill(~is_own, 0), is_own
