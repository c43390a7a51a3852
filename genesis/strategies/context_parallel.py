"""Context parallelism: ranks share the tokens of each row, and exchange them for heads where tokens meet (Ulysses).

Everything but a sequence mixer computes this rank's tokens alone. Before a mixer's tokens read each other, one
all-to-all gives each rank all tokens of some of the heads, and a second one brings the results back. The metadata of
the mixers is that of whole rows, so that documents, windows and offsets need no cutting: every rank reads whole rows.

B  sequences     s  tokens of this rank     S  tokens of a row     H  heads     h  heads of this rank     E  width

References:
    Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509, section 3.
"""

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd, wait_tensor

from genesis.base.errors import UserError
from genesis.model.exchange import HeadExchange
from genesis.objectives.vocabulary import Vocabulary
from genesis.strategies.degrees import Degrees, list_divisors
from genesis.strategies.run_options import RunOptions


class ContextExchange(HeadExchange):
    """The ranks of a group share the tokens of each row, in the order of the row.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.size(), group.rank())
        self._group = group

    def sum_over_row(self, counts: Tensor) -> Tensor:
        """Returns the sum of what the ranks have counted in their tokens, without a gradient. Communicates."""
        summed: Tensor = wait_tensor(all_reduce(counts, "sum", self._group))  # type: ignore[no-untyped-call]  # torch's
        return summed

    def swap(self, packed: Float[Tensor, "ranks B s width"]) -> Float[Tensor, "ranks B s width"]:
        """Returns what the ranks have packed for this one."""
        ones = [1] * self.size
        sent = packed.contiguous().flatten(1)
        # The wait is a part of the graph. Without it, a compiled block would take the tensor with its pending
        # communication for an input, and cut its gradient in silence.
        arrived: Tensor = wait_tensor(all_to_all_single_autograd(sent, ones, ones, self._group))  # type: ignore[no-untyped-call]
        return arrived.view(packed.shape)


class ContextVocabulary(Vocabulary):
    """The losses of this rank's tokens of each row.

    Args:
        of_rows: The losses of the tokens that the rank, or those with which it shares matrices, has.
        exchange: The ranks that share rows.
    """

    def __init__(self, of_rows: Vocabulary, exchange: HeadExchange) -> None:
        self._of_rows, self._exchange = of_rows, exchange

    def sum_cross_entropy(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Returns the sum of -log p(label) over this rank's labels that are not ignored, in nats."""
        return self._of_rows.sum_cross_entropy(hidden, weight, self._exchange.cut(labels))


def check_context(run: RunOptions, degrees: Degrees) -> None:
    """Checks that the ranks can divide the heads of every mixer and the rows of a run, and that its objective can.

    Raises:
        UserError: They cannot; the message has the nearest number of ranks that can.
    """
    for mixer, _ in run.decoder.list_mixers():
        num_heads = mixer.count_shared_heads()
        if num_heads is None:
            raise UserError(
                f"context_parallel is {degrees.cp}, and {type(mixer).__name__} does not know how ranks could share its "
                "heads (`SequenceMixerConfig.count_shared_heads`): set context_parallel to 1"
            )
        _check_divisible(degrees, num_heads, f"the {num_heads} heads of {type(mixer).__name__}")
    if "context" not in run.objective.trains_under:
        raise UserError(
            f"model.objective is {type(run.objective).__name__}, whose loss needs whole rows, and context_parallel "
            f"{degrees.cp} gives a rank a part of each row: set context_parallel to 1"
        )
    if run.seq_len is not None:
        _check_divisible(degrees, run.seq_len, f"data.seq_len {run.seq_len}")


def _check_divisible(degrees: Degrees, number: int, what: str) -> None:
    if number % (degrees.cp * degrees.tp):
        nearest = max(cp for cp in list_divisors(degrees.cp) if number % (cp * degrees.tp) == 0 or cp == 1)
        of_matrices = f" * tensor_parallel {degrees.tp}" if degrees.tp > 1 else ""
        raise UserError(
            f"context_parallel {degrees.cp}{of_matrices} does not divide {what}; set context_parallel to {nearest}"
        )
