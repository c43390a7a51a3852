"""Context parallelism: ranks share the tokens of each row, and exchange them for heads where tokens meet (Ulysses).

Everything but a sequence mixer computes this rank's tokens alone. Before a mixer's tokens read each other, one
all-to-all gives each rank all tokens of some of the heads, and a second one brings the results back. The metadata of
the mixers is that of whole rows, so that documents, windows and offsets need no cutting: every rank reads whole rows.

B  sequences     s  tokens of this rank     S  tokens of a row     H  heads     h  heads of this rank     E  width

References:
    Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509, section 3.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd, wait_tensor
from torch.nn.functional import pad

from genesis.base.errors import UserError
from genesis.model.decoder import Decoder
from genesis.model.mixture import find_routers
from genesis.objectives.vocabulary import Vocabulary
from genesis.strategies.degrees import Degrees, list_divisors
from genesis.strategies.run_options import RunOptions


class ContextExchange:
    """The ranks of a group share the tokens of each row, in the order of the row. See `HeadExchange`.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size, self._rank = group, group.size(), group.rank()

    def cut(self, rows: Tensor) -> Tensor:
        """Returns this rank's tokens of whole rows (B S ...). Does not communicate.

        Raises:
            UserError: The rows cannot be divided; on every rank of the group alike.
        """
        if rows.shape[1] % self._size:
            raise UserError(
                f"a row has {rows.shape[1]} tokens, which context_parallel {self._size} does not divide; give rows "
                f"of a multiple of {self._size} tokens"
            )
        return rows.chunk(self._size, dim=1)[self._rank]

    def cut_heads(self, x: Float[Tensor, "H ..."]) -> Float[Tensor, "h ..."]:
        """Returns the part of a parameter of all heads that belongs to this rank's heads. Does not communicate."""
        return self._spread(x, 0).chunk(self._size)[self._rank]

    def to_heads(self, *parts: Float[Tensor, "B s _ _"]) -> list[Float[Tensor, "B S _ _"]]:
        """Returns the tokens of whole rows of this rank's heads, for tensors of any number of heads. Communicates."""
        spread = [self._spread(part, 2) for part in parts]
        flat = [part.reshape(*part.shape[:2], self._size, -1) for part in spread]
        batch_size, num_tokens = parts[0].shape[:2]
        widths = [part.shape[3] for part in flat]
        arrived = self._swap(torch.cat(flat, dim=3).permute(2, 0, 1, 3))
        rows = arrived.permute(1, 0, 2, 3).reshape(batch_size, self._size * num_tokens, sum(widths))
        pieces = zip(torch.split(rows, widths, dim=2), parts, strict=True)
        return [piece.view(*piece.shape[:2], -1, part.shape[3]) for piece, part in pieces]

    def to_tokens(self, x: Float[Tensor, "B S h E"]) -> Float[Tensor, "B s H E"]:
        """Returns this rank's tokens of all heads. Communicates."""
        by_rank = x.reshape(len(x), self._size, x.shape[1] // self._size, -1)
        arrived = self._swap(by_rank.permute(1, 0, 2, 3))
        return arrived.permute(1, 2, 0, 3).reshape(len(x), by_rank.shape[2], -1, x.shape[3])

    def place(self, of_tokens: Float[Tensor, " N"], num_rows: int) -> Float[Tensor, " M"]:
        """Returns values of whole rows that are 0 for the tokens of other ranks, with all dimensions in one."""
        own = of_tokens.view(num_rows, -1)
        before = self._rank * own.shape[1]
        return pad(own, (before, (self._size - 1) * own.shape[1] - before)).flatten()

    def sum_counts(self, counts: Tensor) -> Tensor:
        """Returns the sum of what the ranks have counted in their tokens, without a gradient. Communicates."""
        summed: Tensor = wait_tensor(all_reduce(counts, "sum", self._group))  # type: ignore[no-untyped-call]  # torch's
        return summed

    def sum_terms(self, sums: Tensor) -> Tensor:
        """Returns sums over whole rows, the same on every rank. Communicates.

        The gradient of this rank's addend is that of the sum: all ranks compute the same of it, and FSDP2's reduction
        adds what their own tokens give to the parameters.
        """
        return sums + (self.sum_counts(sums.detach()) - sums.detach())

    def _spread(self, x: Tensor, dim: int) -> Tensor:
        """Returns heads that ranks can divide: where several ranks need a head, as many copies of it."""
        copies = math.lcm(x.shape[dim], self._size) // x.shape[dim]
        return x if copies == 1 else x.repeat_interleave(copies, dim=dim)

    def _swap(self, packed: Float[Tensor, "ranks B s width"]) -> Float[Tensor, "ranks B s width"]:
        ones = [1] * self._size
        sent = packed.contiguous().flatten(1)
        # The wait is a part of the graph. Without it, a compiled block would take the tensor with its pending
        # communication for an input, and cut its gradient in silence.
        arrived: Tensor = wait_tensor(all_to_all_single_autograd(sent, ones, ones, self._group))  # type: ignore[no-untyped-call]
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

    def sum_over_rows(self, sums: Tensor) -> Tensor:
        """Returns the sums of the tokens of all ranks, the same on each. Communicates."""
        return self._exchange.sum_terms(sums)


def share_context(decoder: Decoder, group: dist.ProcessGroup) -> ContextExchange:
    """Makes a freshly built decoder compute this rank's tokens of each row, in place, and returns the ranks."""
    exchange = ContextExchange(group)
    decoder.context = exchange
    for block in decoder.numbered_blocks.values():
        block.sequence_mixer.exchange = exchange
    for router in find_routers(decoder).values():
        router.sum_over_row = partial(_sum_counts, exchange, router.sum_over_row)
    return exchange


def _sum_counts(exchange: ContextExchange, within: Callable[[Tensor], Tensor] | None, counts: Tensor) -> Tensor:
    return exchange.sum_counts(counts if within is None else within(counts))


def check_context(run: RunOptions, degrees: Degrees) -> None:
    """Checks that ranks can share the rows of a run, and the heads of every mixer.

    Raises:
        UserError: They cannot; the message has the nearest number of ranks that can.
    """
    if "context" not in run.objective.trains_under:
        raise UserError(
            f"context_parallel is {degrees.cp}, and {type(run.objective).__name__} does not train under context "
            "parallelism, where a rank has a part of each row: set context_parallel to 1"
        )
    sizes = {} if run.seq_len is None else {f"data.seq_len {run.seq_len}": run.seq_len}
    for mixer, _ in run.decoder.list_mixers():
        num_heads = mixer.count_shared_heads()
        if num_heads is None:
            raise UserError(
                f"context_parallel is {degrees.cp}, and {type(mixer).__name__} does not know how ranks could share its "
                "heads (`SequenceMixerConfig.count_shared_heads`): set context_parallel to 1"
            )
        sizes[f"the {num_heads} heads of {type(mixer).__name__}"] = num_heads
    for what, number in sizes.items():
        if number % (degrees.cp * degrees.tp):
            fitting = (cp for cp in list_divisors(degrees.cp) if number % (cp * degrees.tp) == 0)
            of_matrices = f" * tensor_parallel {degrees.tp}" if degrees.tp > 1 else ""
            raise UserError(
                f"context_parallel {degrees.cp}{of_matrices} does not divide {what}; set context_parallel to "
                f"{max(fitting, default=1)}"
            )
