"""Context parallelism: ranks share the tokens of each row, and exchange them for heads where tokens meet (Ulysses).

Everything but a sequence mixer computes this rank's tokens alone. Before a mixer's tokens read each other, one
all-to-all gives each rank all tokens of some of the heads, and a second one brings the results back. The metadata of
the mixers is that of whole rows, so that documents, windows and offsets need no cutting: every rank reads whole rows.

B  sequences     s  tokens of this rank     S  tokens of a row     H  heads     h  heads of this rank     E  width

References:
    Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509, section 3.
"""

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd, wait_tensor
from torch.nn.functional import pad

from genesis.model.exchange import HeadExchange
from genesis.objectives.distillation_loss import DistillationSums, TeacherClasses
from genesis.objectives.vocabulary import Vocabulary
from genesis.strategies.axis_traffic import AxisTraffic, reduced_bytes


class ContextExchange(HeadExchange):
    """The ranks of a group share the tokens of each row, in the order of the row.

    Args:
        group: The ranks.
        traffic: Counts what this rank sends to the others.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: AxisTraffic | None = None) -> None:
        super().__init__(group.size(), group.rank())
        self._group, self._traffic = group, traffic or AxisTraffic()

    def place(self, of_tokens: Float[Tensor, " N"], num_rows: int) -> Float[Tensor, " M"]:
        """Returns values of whole rows that are 0 for the tokens of other ranks, with all dimensions in one."""
        own = of_tokens.view(num_rows, -1)
        before = self.rank * own.shape[1]
        return pad(own, (before, (self.size - 1) * own.shape[1] - before)).flatten()

    def sum_over_row(self, counts: Tensor) -> Tensor:
        """Returns the sum of what the ranks have counted in their tokens, without a gradient. Communicates."""
        self._traffic.note(reduced_bytes(counts, self.size))
        summed: Tensor = wait_tensor(all_reduce(counts, "sum", self._group))  # type: ignore[no-untyped-call]  # torch's
        return summed

    def sum_terms(self, sums: Tensor) -> Tensor:
        """Returns sums over whole rows, the same on every rank. Communicates.

        The gradient of this rank's addend is that of the sum: all ranks compute the same of it, and FSDP2's reduction
        adds what their own tokens give to the parameters.
        """
        return sums + (self.sum_over_row(sums.detach()) - sums.detach())

    def swap(self, packed: Float[Tensor, "ranks B s width"]) -> Float[Tensor, "ranks B s width"]:
        """Returns what the ranks have packed for this one."""
        ones = [1] * self.size
        sent = packed.contiguous().flatten(1)
        # The wait is a part of the graph. Without it, a compiled block would take the tensor with its pending
        # communication for an input, and cut its gradient in silence.
        arrived: Tensor = wait_tensor(all_to_all_single_autograd(sent, ones, ones, self._group))  # type: ignore[no-untyped-call]
        arrived = self._traffic.note_both(arrived, sent.nbytes * (self.size - 1) // self.size)
        return arrived.view(packed.shape)


class ContextVocabulary(Vocabulary):
    """The losses of whole rows, the same on every rank that shares their tokens; each computes those of its tokens.

    Args:
        exchange: The ranks.
        inner: Computes the losses of this rank's tokens.
    """

    def __init__(self, exchange: ContextExchange, inner: Vocabulary) -> None:
        self._exchange, self._inner = exchange, inner

    def sum_cross_entropy(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Returns the sum of -log p(label) over the labels that are not ignored, in nats. Communicates."""
        return self.sum_over_rows(self._inner.sum_cross_entropy(hidden, weight, self._exchange.cut(labels)))

    def token_losses(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Returns -log p(label) of this rank's tokens, and 0 for the others, with all leading dimensions in one."""
        losses = self._inner.token_losses(hidden, weight, self._exchange.cut(labels))
        return self._exchange.place(losses, labels.shape[0])

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
        """Returns the sums of `genesis.objectives.distillation_loss` of the tokens of all ranks. Communicates."""
        labels, *cut = map(self._exchange.cut, (labels, *classes))
        own = self._inner.sum_distillation(
            hidden, weight, labels, TeacherClasses(*cut), temperature=temperature, share=share
        )
        loss, *figures = self.sum_over_rows(torch.stack(own)).unbind()
        return DistillationSums(loss, *(figure.detach() for figure in figures))

    def sum_over_rows(self, sums: Tensor) -> Tensor:
        """Returns the sums of the tokens of all ranks, the same on each. Communicates."""
        return self._exchange.sum_terms(sums)
