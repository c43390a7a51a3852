"""Attention by torch's own flash kernels: whole rows, documents on CUDA in one call, on the CPU in a call for each.

Letters as in `metadata`.
"""

import inspect
from typing import Any, Final, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from genesis.base.device import CPU, kind_of
from genesis.model.attend.kernel import AttentionKernel, Place, find_flash_obstacle
from genesis.model.attend.mask import MaskKernel, attend_rows
from genesis.model.attend.metadata import AttentionMetadata, Rows, document_mask

MIN_MEAN_DOCUMENT_TOKENS = 24
"""On CPU, shorter documents use a mask: for them, one call per document costs more than it saves."""

_HAS_GROUPS: Final = "enable_gqa" in inspect.signature(varlen_attn).parameters  # missing in torch 2.11


class FlashKernel(AttentionKernel):
    """Torch's flash kernels. Where a forward does not suit them, it uses a mask.

    Under torch's deterministic algorithms, their backward is repeatable on CUDA.
    """

    name = "flash"

    def __init__(self, mask: MaskKernel) -> None:
        super().__init__()
        self._mask = mask

    def _find_obstacle(self, place: Place) -> str | None:
        if place.kind == CPU:
            return None
        return "it has no attention sinks" if place.has_sinks else find_flash_obstacle(place)

    def prepare(self, metadata: AttentionMetadata, rows: Rows) -> AttentionMetadata:
        """Gives the offsets of documents to the kernel, or lets rows, or a mask, replace them."""
        place = Place.of(rows.x, rows.head_dim)._replace(has_sinks=rows.has_sinks)
        is_short = place.kind == CPU and rows.num_documents * MIN_MEAN_DOCUMENT_TOKENS > rows.x.shape[:2].numel()
        if rows.is_whole or is_short or self.find_obstacle(place) is not None:
            return self._mask.prepare(metadata, rows)
        return metadata._replace(kernel=self.name, offsets=rows.find_offsets(), window=rows.window)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        """Attends document by document."""
        assert metadata.offsets is not None
        if kind_of(query.device) == CPU:
            by_document: Tensor = _attend_each_document(query, key, value, metadata.offsets, metadata.window, sinks)
            return by_document
        assert sinks is None, "they are an obstacle"
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast casts no inputs of this kernel
        groups, seq_len = query.shape[2] // key.shape[2], query.shape[1]
        if groups > 1 and not _HAS_GROUPS:
            key, value = (part.repeat_interleave(groups, dim=2) for part in (key, value))
        options: dict[str, Any] = {"enable_gqa": groups > 1} if _HAS_GROUPS else {}
        out = varlen_attn(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            metadata.offsets,
            metadata.offsets,
            seq_len,
            seq_len,
            window_size=(-1 if metadata.window is None else metadata.window - 1, 0),  # causal; itself is not counted
            **options,
        )
        return cast("Tensor", out).view(query.shape)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _attend_each_document(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    lengths = offsets.diff().tolist()  # excluded from torch.compile, which would compile again for every packing
    documents = zip(*(torch.split(x.flatten(0, 1), lengths) for x in (query, key, value)), strict=True)
    attended = [attend_rows(q[None], k[None], v[None], _window_mask(q, window), sinks)[0] for q, k, v in documents]
    return torch.cat(attended).view(query.shape)


def _window_mask(query: Float[Tensor, "S H E"], window: int | None) -> Bool[Tensor, "1 1 S S"] | None:
    """Returns which tokens of a document each of its tokens may see; None if the window contains all of them."""
    seq_len = query.shape[0]
    if window is None or seq_len <= window:
        return None
    return document_mask(torch.zeros((1, seq_len), device=query.device, dtype=torch.int32), window)
