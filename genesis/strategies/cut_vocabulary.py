"""Losses over a vocabulary whose rows ranks share: no rank ever has the logits of all rows.

N  tokens (all leading dimensions together)     D  model width     R  rows of the vocabulary on this rank
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from genesis.model.cut import held
from genesis.model.loss import IGNORE_INDEX, add_product, find_product_dtype, split_chunks
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
            largest = logits.amax(1, keepdim=True)
            share.note_reduction(largest)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=share.group)
            logits.sub_(largest)
            of_label = logits.gather(1, own).masked_fill_(~is_own, 0.0)
            sums = torch.cat((logits.exp_().sum(1, keepdim=True), of_label), dim=1)
            share.note_reduction(sums)
            dist.all_reduce(sums, group=share.group)
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


def _find_own(labels: Int64[Tensor, "N 1"], num_rows: int, share: RowShare) -> tuple[Tensor, Tensor]:
    """Returns the row of each label on this rank, or 0, and whether the label is here."""
    own = labels - share.rank * num_rows
    is_own = (own >= 0) & (own < num_rows)
    return own.masked_fill(~is_own, 0), is_own
