"""The exchange of tokens for heads between ranks that share the tokens of each row.

s  tokens of this rank     S  tokens of a row     H  heads     h  heads of this rank     B  sequences     E  width
"""

import math
from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from genesis.base.errors import UserError, numbered


class HeadExchange(ABC):
    """The ranks that share the tokens of each row, of which each computes whole rows of some heads.

    A mixer projects its tokens, gets whole rows of this rank's heads by `to_heads`, lets their tokens read each other,
    and returns to its own tokens by `to_tokens`, for a projection of all heads. If several ranks need a head, because
    there are fewer heads than ranks, each of them has it. `genesis.strategies.context_parallel` communicates.

    Args:
        size: The number of ranks.
        rank: This one, by the order of the tokens.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    @abstractmethod
    def swap(self, packed: Float[Tensor, "ranks B s width"]) -> Float[Tensor, "ranks B s width"]:
        """Returns what the ranks have packed for this one. Communicates, like its backward."""

    @abstractmethod
    def sum_over_row(self, counts: Tensor) -> Tensor:
        """Returns the sum of what the ranks have counted in their tokens, without a gradient. Communicates."""

    def cut(self, rows: Tensor) -> Tensor:
        """Returns this rank's tokens of whole rows (B S ...). Does not communicate.

        Raises:
            UserError: The rows cannot be divided; on every rank of the group alike.
        """
        if rows.shape[1] % self.size:
            raise UserError(
                f"a row has {rows.shape[1]} tokens, which context_parallel {self.size} does not divide; give rows of a "
                f"multiple of {numbered(self.size, 'tokens')}"
            )
        return rows.chunk(self.size, dim=1)[self.rank]

    def cut_heads(self, x: Float[Tensor, "H ..."]) -> Float[Tensor, "h ..."]:
        """Returns the part of a parameter of all heads that belongs to this rank's heads. Does not communicate."""
        return self._spread(x, 0).chunk(self.size)[self.rank]

    def to_heads(self, *parts: Float[Tensor, "B s _ _"]) -> list[Float[Tensor, "B S _ _"]]:
        """Returns the tokens of whole rows of this rank's heads, for tensors of any number of heads. Communicates."""
        spread = [self._spread(part, 2) for part in parts]
        flat = [part.reshape(*part.shape[:2], self.size, -1) for part in spread]
        batch_size, num_tokens = parts[0].shape[:2]
        widths = [part.shape[3] for part in flat]
        arrived = self.swap(torch.cat(flat, dim=3).permute(2, 0, 1, 3))
        rows = arrived.permute(1, 0, 2, 3).reshape(batch_size, self.size * num_tokens, sum(widths))
        pieces = zip(torch.split(rows, widths, dim=2), parts, strict=True)
        return [piece.reshape(*piece.shape[:2], -1, part.shape[3]) for piece, part in pieces]

    def to_tokens(self, x: Float[Tensor, "B S h E"]) -> Float[Tensor, "B s H E"]:
        """Returns this rank's tokens of all heads. Communicates."""
        batch_size, num_tokens, width = x.shape[0], x.shape[1] // self.size, x.shape[3]
        arrived = self.swap(x.reshape(batch_size, self.size, num_tokens, -1).permute(1, 0, 2, 3))
        return arrived.permute(1, 2, 0, 3).reshape(batch_size, num_tokens, -1, width)

    def _spread(self, x: Tensor, dim: int) -> Tensor:
        """Returns heads that ranks can divide: where several ranks need a head, as many copies of it."""
        copies = math.lcm(x.shape[dim], self.size) // x.shape[dim]
        return x if copies == 1 else x.repeat_interleave(copies, dim=dim)
