"""What every kernel of attention gets: the positions of the tokens of a forward, and which tokens each of them sees.

B  sequences of a micro-batch     S  tokens of a sequence     L  slots of a key-value cache
H  query heads                    K  key and value heads      E  width of a head
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor
from torch.nn.functional import pad


class CachedTokens(NamedTuple):
    """The numbers of tokens of each row in a cache, before those of this forward."""

    lengths: Int64[Tensor, " B"]
    """The numbers on the device."""
    shortest: int
    longest: int
    num_slots: int
    """The number of tokens of a row that fit into the cache."""
    num_new: Int64[Tensor, " B"] | None = None
    """The number of this forward's tokens of each row that are no padding, on the device; None if all are none."""


class UsedSlots(NamedTuple):
    """The slots of a cache that a forward reads, as numbers for kernels whose shapes depend on no length."""

    num_keys: Int32[Tensor, " B"]
    """For each row the number of cached tokens and tokens of this forward, padding included."""
    query_offsets: Int32[Tensor, " B+1"]
    """The index of each row's beginning in the flattened queries."""
    key_offsets: Int32[Tensor, " B+1"]
    """The index of each row's beginning in the flattened slots."""


class KeyBlocks(NamedTuple):
    """The blocks of keys that each block of queries sees, and the reverse, for FlexAttention.

    Each block of queries has the number of its blocks of keys and their indices; indices behind that number mean
    nothing. A pair of blocks is full if every query of the one sees every key of the other.
    """

    first_seen: Int32[Tensor, "B S"]
    """The index in its row of the first token that each token sees."""
    num_partial: Int32[Tensor, "B 1 num_blocks"]
    partial: Int32[Tensor, "B 1 num_blocks num_blocks"]
    num_full: Int32[Tensor, "B 1 num_blocks"]
    full: Int32[Tensor, "B 1 num_blocks num_blocks"]
    num_partial_queries: Int32[Tensor, "B 1 num_blocks"]
    partial_queries: Int32[Tensor, "B 1 num_blocks num_blocks"]
    num_full_queries: Int32[Tensor, "B 1 num_blocks"]
    full_queries: Int32[Tensor, "B 1 num_blocks num_blocks"]


class AttentionMetadata(NamedTuple):
    """The position of each token of a forward and the tokens that it may see: computed once, read by every block.

    `kernel` decides which of the other fields are read. `used` is for attention over a cache alone. A change of the
    scores that all layers share, such as a soft cap, would be a field here, and a case of
    `AttentionKernel.find_obstacle` for the kernels that lack it.
    """

    cos: Float[Tensor, "B S 1 E"]
    sin: Float[Tensor, "B S 1 E"]
    kernel: str = "mask"
    """The name of the kernel in `genesis.model.attend.table`."""
    offsets: Int32[Tensor, " num_documents+1"] | None = None
    """The index of each document's beginning in the flattened batch, and the end of the batch."""
    mask: Bool[Tensor, "B 1 S L"] | None = None
    """Without a mask, a token sees the tokens before it in its row; a row's only token sees all `num_keys` slots."""
    blocks: KeyBlocks | None = None
    window: int | None = None
    """The number of tokens that a token sees, itself included, if `offsets` or `used` is given; a mask and blocks
    include it."""
    slots: Int64[Tensor, " B*S"] | None = None
    """The slots of these tokens in the flattened cache."""
    num_keys: int | None = None
    """The number of slots of each row that are read if `used` is not given."""
    used: UsedSlots | None = None
    expands_keys: bool = False
    """Whether keys and values are repeated for each query head of a group before the attention under a mask."""
    query_factor: Float[Tensor, "B S 1 1"] | None = None
    """The factor of each token's queries; None for 1."""


class Rows(NamedTuple):
    """The rows of a micro-batch without a cache, for which a kernel prepares."""

    x: Float[Tensor, "B S D"]
    """The input of the first block, whose device, dtype and sizes are used."""
    head_dim: int
    document_ids: Int32[Tensor, "B S"] | None = None
    """Which document of its row each token belongs to; None for one document per row."""
    offsets: Int32[Tensor, " num_documents+1"] | None = None
    """As in `AttentionMetadata`; None for one document per row, and for kernels that do not need it."""
    window: int | None = None
    """The number of tokens that a token sees, itself included; None if it is not less than a row."""
    has_sinks: bool = False

    @property
    def num_documents(self) -> int:
        """The number of documents of all rows."""
        return self.x.shape[0] if self.offsets is None else self.offsets.numel() - 1

    @property
    def is_whole(self) -> bool:
        """Whether each token sees all tokens before it in its row."""
        return self.num_documents == self.x.shape[0] and self.window is None

    def find_ids(self) -> Int32[Tensor, "B S"]:
        """Returns the document of each token."""
        if self.document_ids is not None:
            return self.document_ids
        return torch.zeros(self.x.shape[:2], device=self.x.device, dtype=torch.int32)

    def find_offsets(self) -> Int32[Tensor, " num_documents+1"]:
        """Returns where documents begin in the flattened batch, and its end."""
        return row_offsets(self.x.shape[0], self.x.shape[1], self.x.device) if self.offsets is None else self.offsets


def row_offsets(num_rows: int, length: int, device: torch.device) -> Int32[Tensor, " num_rows+1"]:
    """Returns where rows of one length begin in the flattened batch, and its end."""
    return torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, device=device)


def document_positions(document_ids: Int32[Tensor, "B S"]) -> Int64[Tensor, "B S"]:
    """Returns each token's place in its document, from 0."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    starts: Tensor = torch.where(_is_start(document_ids), index, 0).cummax(dim=1).values
    return index - starts


def document_lengths(document_ids: Int32[Tensor, "B S"]) -> Int64[Tensor, "B S"]:
    """Returns the number of tokens of each token's document."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    ends = pad(_is_start(document_ids)[:, 1:], (0, 1), value=True)
    last: Tensor = torch.where(ends, index, len(index)).flip(1).cummin(dim=1).values.flip(1)
    return last - index + document_positions(document_ids) + 1


def mark_padding(lengths: Sequence[int]) -> Int32[Tensor, "B S"]:
    """Returns the documents of rows of these lengths, padded to the longest: 0 for its tokens, 1 behind them."""
    return (torch.arange(max(lengths)) >= torch.tensor(lengths).unsqueeze(1)).to(torch.int32)


def document_offsets(document_ids: Int32[Tensor, "B S"]) -> Int32[Tensor, " num_documents+1"]:
    """Returns where documents begin in the flattened batch, and its end. Waits for the device, which has the count."""
    starts = _is_start(document_ids).flatten().nonzero().flatten()
    return pad(starts, (0, 1), value=document_ids.numel()).to(torch.int32)


def document_mask(document_ids: Int32[Tensor, "B S"], window: int | None = None) -> Bool[Tensor, "B 1 S S"]:
    """Returns which tokens (last dimension) each token may see: tokens of its document and window up to itself."""
    is_same = document_ids[:, :, None] == document_ids[:, None, :]
    is_seen = is_same.tril() if window is None else is_same.tril().triu(1 - window)
    return is_seen.unsqueeze(1)


def _is_start(document_ids: Tensor) -> Tensor:
    return pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
