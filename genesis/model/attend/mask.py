"""Attention under a mask, or over whole rows, by torch's `scaled_dot_product_attention`: it runs everywhere.

Letters as in `metadata`.
"""

from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from genesis.base.device import kind_of
from genesis.model.attend.kernel import CUDA, AttentionKernel, Place, find_flash_obstacle
from genesis.model.attend.metadata import AttentionMetadata, Rows, document_mask

SINK_WIDTH: Final = 8
"""Dimensions beside those of a head for its sink: fused kernels on CUDA take widths that this divides."""


class MaskKernel(AttentionKernel):
    """Torch's own attention with a mask of all pairs of tokens, which whole rows without a window do not need."""

    name = "mask"

    def _find_obstacle(self, place: Place) -> str | None:
        return None

    def prepare(self, metadata: AttentionMetadata, rows: Rows) -> AttentionMetadata:
        """Makes the mask if tokens do not see whole rows."""
        mask = None if rows.is_whole else document_mask(rows.find_ids(), rows.window)
        expands_keys = needs_expanded_keys(rows.x, rows.head_dim, mask)
        return metadata._replace(kernel=self.name, mask=mask, expands_keys=expands_keys)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        """Attends under the mask, or over whole rows."""
        return attend_rows(query, key, value, metadata.mask, sinks, expands_keys=metadata.expands_keys)


def needs_expanded_keys(x: Tensor, head_dim: int, mask: Tensor | None) -> bool:
    """Whether torch lacks a fused kernel in which a key head serves several query heads.

    On CUDA only the flash kernel does this, which supports no mask and no float32. Otherwise torch would hold the whole
    matrix of scores.
    """
    if kind_of(x.device) != CUDA:
        return False
    return mask is not None or find_flash_obstacle(Place.of(x, head_dim)) is not None


def attend_rows(
    query: Float[Tensor, "B S H E"],
    key: Float[Tensor, "B L K E"],
    value: Float[Tensor, "B L K E"],
    mask: Bool[Tensor, "B 1 S L"] | None,
    sinks: Float[Tensor, " H"] | None = None,
    *,
    expands_keys: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "B S H E"]:
    """Returns attention under a mask; without one, over the tokens before each token, or over all for a single query.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        mask: The tokens that each token sees.
        sinks: A logit for each head, which joins its softmax and has no value.
        expands_keys: Whether keys and values are repeated for each query head of a group.
        scale: The factor of the products of queries and keys; None for 1 / sqrt(E).
    """
    if sinks is not None:
        return attend_with_sinks(query, key, value, mask, sinks, expands_keys=expands_keys)
    groups, seq_len = query.shape[2] // key.shape[2], query.shape[1]
    if groups > 1 and seq_len == 1:
        # The query heads of a group become queries of one head, so that the longer keys and values need no copy.
        grouped = query.reshape(query.shape[0], key.shape[2], groups, -1)
        out = _attend_heads(grouped, key.transpose(1, 2), value.transpose(1, 2), mask, is_causal=False, scale=scale)
        return out.reshape(query.shape)
    if groups > 1 and expands_keys:
        key, value = (part.repeat_interleave(groups, dim=2) for part in (key, value))
    is_causal = mask is None and seq_len > 1  # torch would align the queries with the first key
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return _attend_heads(query, key, value, mask, is_causal=is_causal, scale=scale).transpose(1, 2)


def attend_with_sinks(
    query: Float[Tensor, "B S H E"],
    key: Float[Tensor, "B L K E"],
    value: Float[Tensor, "B L K E"],
    mask: Bool[Tensor, "B 1 S L"] | None,
    sinks: Float[Tensor, " H"],
    *,
    expands_keys: bool,
) -> Float[Tensor, "B S H E"]:
    """Returns attention in which a first key, whose value is zero, has the logit of each head's sink.

    A further dimension has the sinks in all queries and a one in that key alone, so that the query heads of a group
    have sinks of their own and no kernel needs a bias. A first query for that key keeps rows causal without a mask.
    """
    width, has_rows = query.shape[-1], mask is None and query.shape[1] > 1
    of_heads = pad((sinks * width**0.5).to(query.dtype).unsqueeze(1), (0, SINK_WIDTH - 1))
    query = torch.cat((query, of_heads.expand(*query.shape[:3], -1)), dim=-1)
    key, value = (pad(part, (0, SINK_WIDTH, 0, 0, 1, 0)) for part in (key, value))
    key[:, 0, :, width] = 1.0
    if mask is not None:
        mask = pad(mask, (1, 0), value=True)
    if has_rows:
        query = pad(query, (0, 0, 0, 0, 1, 0))
    out = attend_rows(query, key, value, mask, expands_keys=expands_keys, scale=width**-0.5)
    return out[:, has_rows:, :, :width]


def _attend_heads(
    query: Float[Tensor, "B H S E"],
    key: Float[Tensor, "B K L E"],
    value: Float[Tensor, "B K L E"],
    mask: Bool[Tensor, "B 1 S L"] | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> Float[Tensor, "B H S E"]:
    has_groups = query.shape[1] != key.shape[1]
    out: Tensor = scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=has_groups
    )
    return out
