"""Attention by torch's FlexAttention: one compiled kernel for documents and windows, whose backward is repeatable.

Letters as in `metadata`. Documents are contiguous and attention is causal, so that one number for each token, the first
token that it sees, is the whole mask; and which blocks of keys a block of queries sees follows from the numbers of its
first and its last token. No pair of tokens is evaluated, and nothing waits for the device.
"""

from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from genesis.model.attend.kernel import AMPERE, AttentionKernel, Place
from genesis.model.attend.metadata import AttentionMetadata, KeyBlocks, Rows, document_positions
from genesis.model.compilation import compile_each_shape

BLOCK_TOKENS: Final = 128
"""Queries, and keys, of a block."""
_WIDTHS: Final = (16, 256)
"""The least and the greatest width of a head. Torch pads a width that is no power of two."""


class FlexKernel(AttentionKernel):
    """FlexAttention, compiled by inductor also where the blocks of a decoder are not compiled.

    Its eager form would hold the scores of all pairs of tokens. A row of one document takes the same kernel, so that
    compiled blocks have one form.
    """

    name = "flex"
    needs_offsets = False

    def _find_obstacle(self, place: Place) -> str | None:
        older = place.find_older(AMPERE)
        if older is not None:
            return older
        least, greatest = _WIDTHS
        if not least <= place.head_dim <= greatest:
            return f"it takes heads of a width from {least} to {greatest}, not {place.head_dim}"
        return None

    def prepare(self, metadata: AttentionMetadata, rows: Rows) -> AttentionMetadata:
        """Finds the blocks of keys that each block of queries sees."""
        return metadata._replace(kernel=self.name, blocks=build_blocks(find_first_seen(rows)))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        """Attends by the compiled kernel."""
        assert metadata.blocks is not None
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast casts no inputs of this kernel
        if torch.compiler.is_compiling():
            return attend_blocks(query, key, value, metadata.blocks, sinks)
        if query.requires_grad or key.requires_grad or value.requires_grad:
            # One form of the kernel, whichever of them have adapters.
            query, key, value = (x if x.requires_grad else x.detach().requires_grad_() for x in (query, key, value))
        out: Tensor = compile_kernel()(query, key, value, metadata.blocks, sinks)
        return out


@cache
def compile_kernel() -> Callable[..., Any]:
    """Returns `attend_blocks` as a compiled function; what torch cannot compile is an error, and never runs eagerly."""
    return compile_each_shape(attend_blocks, fullgraph=True)


def attend_blocks(
    query: Float[Tensor, "B S H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K E"],
    blocks: KeyBlocks,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B S H E"]:
    """Returns attention over the tokens from the first one that each token sees to itself, and the sinks of heads."""
    first_seen = blocks.first_seen

    def is_seen(row: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        return (key_index <= query_index) & (key_index >= first_seen[row, query_index])

    # Made here, from tensors alone, so that every wrapper of a block passes them on like any others.
    mask = BlockMask(
        seq_lengths=(query.shape[1], key.shape[1]),
        kv_num_blocks=blocks.num_partial,
        kv_indices=blocks.partial,
        full_kv_num_blocks=blocks.num_full,
        full_kv_indices=blocks.full,
        q_num_blocks=blocks.num_partial_queries,
        q_indices=blocks.partial_queries,
        full_q_num_blocks=blocks.num_full_queries,
        full_q_indices=blocks.full_queries,
        BLOCK_SIZE=(BLOCK_TOKENS, BLOCK_TOKENS),
        mask_mod=is_seen,
    )
    has_groups = query.shape[2] != key.shape[2]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    if sinks is None:
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=has_groups).transpose(1, 2)
    aux = AuxRequest(lse=True)
    out, found = flex_attention(query, key, value, block_mask=mask, enable_gqa=has_groups, return_aux=aux)
    # The share of the softmax that the sink leaves to the keys.
    assert found.lse is not None
    share = (found.lse - sinks.to(found.lse.dtype).unsqueeze(1)).sigmoid().unsqueeze(-1)
    return (out * share).to(out.dtype).transpose(1, 2)


def find_first_seen(rows: Rows) -> Int32[Tensor, "B S"]:
    """Returns the index of the first token that each token sees: its document's first, or its window's."""
    index = torch.arange(rows.x.shape[1], device=rows.x.device)
    first = torch.zeros_like(index) if rows.document_ids is None else index - document_positions(rows.document_ids)
    if rows.window is not None:
        first = torch.maximum(first, index - (rows.window - 1))
    return first.expand(rows.x.shape[:2]).to(torch.int32, memory_format=torch.contiguous_format)


def build_blocks(first_seen: Int32[Tensor, "B S"]) -> KeyBlocks:
    """Returns which blocks of keys each block of queries sees.

    `first_seen` never decreases within a row. The first query of a block therefore sees the earliest keys of all its
    queries and every key from there to itself; and a block of keys before them is seen whole by all of them if the last
    query sees its first key.

    Args:
        first_seen: See `KeyBlocks`.
    """
    first_block = first_seen[:, ::BLOCK_TOKENS, None] // BLOCK_TOKENS
    index = torch.arange(first_block.shape[1], device=first_seen.device)
    is_before = index < index[:, None]
    seen = (index >= first_block) & (is_before | (index == index[:, None]))
    # The last query of each block; a last block that is shorter counts as full nowhere, as in torch.
    last_seen = first_seen[:, BLOCK_TOKENS - 1 :: BLOCK_TOKENS, None]
    full = torch.zeros_like(seen)
    full[:, : last_seen.shape[1]] = (index * BLOCK_TOKENS >= last_seen) & is_before[: last_seen.shape[1]]
    partial, full = (seen & ~full).unsqueeze(1), full.unsqueeze(1)
    lists = (_list(pairs.contiguous()) for pairs in (partial, full, partial.mT, full.mT))
    return KeyBlocks(first_seen, *chain.from_iterable(lists))


def _list(pairs: Bool[Tensor, "B 1 N M"]) -> tuple[Int32[Tensor, "B 1 N"], Int32[Tensor, "B 1 N M"]]:
    """Returns for each N the number of its M, and their indices in front of those of the others.

    Args:
        pairs: Contiguous, as the lists are then: the kernel reads a list as neighbours in memory, whatever its strides.
    """
    order = pairs.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)
