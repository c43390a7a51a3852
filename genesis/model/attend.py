"""Ways to attend: whole rows, documents, a cache, under a mask or by a kernel that takes lengths; and which suits.

B  sequences of a micro-batch     S  tokens of a sequence     L  slots of a key-value cache
H  query heads                    K  key and value heads      E  width of a head
"""

import inspect
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from genesis.device import read_capability

MIN_MEAN_DOCUMENT_TOKENS = 24
"""On CPU, shorter documents are masked: attention one by one would cost more in calls than it saves in work."""

FLASH_CAPABILITY, FLASH_HEAD_DIM = (8, 0), 256
"""The oldest GPUs (Ampere) and the widest heads that flash kernels exist for."""

KEYS_STEP = 128
"""On accelerators, the slots under a mask grow in steps of so many."""

_HAS_USED_KEYS = "seqused_k" in inspect.signature(varlen_attn).parameters  # torch 2.11 has it not
_distrusted_devices: set[str] = set()
_devices_without_lengths: set[str] = set()


def distrust_offsets(device: torch.device) -> None:
    """Makes attention on devices of this type use masks from now on: document by document it was found wrong there."""
    _distrusted_devices.add(device.type)


def distrust_lengths(device: torch.device) -> None:
    """Makes attention over a cache on devices of this type use masks from now on: by lengths it was wrong there."""
    _devices_without_lengths.add(device.type)


class CachedTokens(NamedTuple):
    """How many tokens of each row a cache holds, before those of this forward."""

    lengths: Int64[Tensor, " B"]
    """On the device."""
    shortest: int
    longest: int
    num_slots: int
    """How many tokens of a row it can hold."""


class UsedSlots(NamedTuple):
    """Which slots of a cache a forward reads, for kernels that take this as numbers: shapes depend on no length."""

    num_keys: Int32[Tensor, " B"]
    """Of each row, the cached tokens and those of this forward, padding included."""
    query_offsets: Int32[Tensor, " B+1"]
    """Where rows begin in the flattened queries."""
    key_offsets: Int32[Tensor, " B+1"]
    """Where rows begin in the flattened slots."""


class AttentionMetadata(NamedTuple):
    """Where each token of a forward stands and what it may see: computed once, read by every block.

    At most one of `offsets`, `mask` and `used` is given. Without any, a token sees those before it in its row; where
    there is one new token in each row, it sees all `num_keys` slots.
    """

    cos: Float[Tensor, "B S 1 E"]
    sin: Float[Tensor, "B S 1 E"]
    offsets: Int32[Tensor, " num_documents+1"] | None = None
    """Where documents begin in the flattened batch, and its end."""
    mask: Bool[Tensor, "B 1 S L"] | None = None
    window: int | None = None
    """How many tokens each token sees, itself included, where `offsets` or `used` are given; a mask holds it."""
    slots: Int64[Tensor, " B*S"] | None = None
    """Where in the flattened cache these tokens go."""
    num_keys: int | None = None
    """How many slots of each row are read, where `used` is not given."""
    used: UsedSlots | None = None
    expands_keys: bool = False
    """Whether keys and values are repeated for each query head of a group before the attention, where neither
    `offsets` nor `used` are given."""


def suits_offsets(x: Tensor, num_documents: int, head_dim: int) -> bool:
    """Whether attention document by document beats a mask, and exists at all."""
    if x.device.type in _distrusted_devices:
        return False
    if x.device.type == "cpu":
        return num_documents * MIN_MEAN_DOCUMENT_TOKENS <= x.shape[0] * x.shape[1]
    return has_flash(x, head_dim)


def suits_lengths(x: Tensor, head_dim: int) -> bool:
    """Whether there is a kernel that takes the lengths of rows as numbers, and can be trusted."""
    return _HAS_USED_KEYS and x.device.type not in _devices_without_lengths and has_flash(x, head_dim)


def needs_expanded_keys(x: Tensor, head_dim: int, mask: Tensor | None) -> bool:
    """Whether torch lacks a fused kernel in which a key head serves several query heads.

    On CUDA only the flash kernel does that, which takes no mask and no float32. Elsewhere torch would hold the whole
    matrix of scores.
    """
    return x.device.type == "cuda" and (mask is not None or not has_flash(x, head_dim))


def has_flash(x: Tensor, head_dim: int) -> bool:
    """Whether torch has a flash kernel for heads of this width, on this device and in this dtype."""
    if x.device.type != "cuda" or (read_capability(x.device) or (0, 0)) < FLASH_CAPABILITY:
        return False
    is_autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if is_autocast else x.dtype
    return dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= FLASH_HEAD_DIM


def document_positions(document_ids: Int32[Tensor, "B S"]) -> Int64[Tensor, "B S"]:
    """Returns each token's place in its document, from 0."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    starts: Tensor = torch.where(_is_start(document_ids), index, 0).cummax(dim=1).values
    return index - starts


def document_offsets(document_ids: Int32[Tensor, "B S"]) -> Int32[Tensor, " num_documents+1"]:
    """Returns where documents begin in the flattened batch, and its end. Waits for the device: the count is data."""
    starts = _is_start(document_ids).flatten().nonzero().flatten()
    return pad(starts, (0, 1), value=document_ids.numel()).to(torch.int32)


def document_mask(document_ids: Int32[Tensor, "B S"], window: int | None = None) -> Bool[Tensor, "B 1 S S"]:
    """Returns which tokens (last dimension) each token may see: those of its document and window up to itself."""
    is_same = document_ids[:, :, None] == document_ids[:, None, :]
    is_seen = is_same.tril() if window is None else is_same.tril().triu(1 - window)
    return is_seen.unsqueeze(1)


def _is_start(document_ids: Tensor) -> Tensor:
    return pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)


def attend(
    query: Float[Tensor, "B S H E"],
    key: Float[Tensor, "B L K E"],
    value: Float[Tensor, "B L K E"],
    metadata: AttentionMetadata,
) -> Float[Tensor, "B S H E"]:
    """Returns softmax(query key^T / sqrt(E)) value over what `metadata` lets each token see."""
    if metadata.used is not None:
        return _attend_used(query, key, value, metadata.used, metadata.window)
    if metadata.offsets is None:
        return _attend_rows(query, key, value, metadata.mask, expands_keys=metadata.expands_keys)
    if query.device.type == "cpu":
        by_document: Tensor = _attend_each_document(query, key, value, metadata.offsets, metadata.window)
        return by_document
    groups, seq_len = query.shape[2] // key.shape[2], query.shape[1]
    out = varlen_attn(
        query.flatten(0, 1),
        key.repeat_interleave(groups, dim=2).flatten(0, 1),  # torch 2.11's has no enable_gqa
        value.repeat_interleave(groups, dim=2).flatten(0, 1),
        metadata.offsets,
        metadata.offsets,
        seq_len,
        seq_len,
        window_size=(-1 if metadata.window is None else metadata.window - 1, 0),  # causal; itself is not counted
    )
    return cast("Tensor", out).view(query.shape)


def _attend_used(query: Tensor, key: Tensor, value: Tensor, used: UsedSlots, window: int | None) -> Tensor:
    """Returns attention over the used slots; the last of a row's queries stands at its last used slot."""
    seq_len = query.shape[1]
    # One new token sees every used slot: without causality the kernel may split a long row over its processors.
    is_whole = seq_len == 1 and window is None
    out = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        used.query_offsets,
        used.key_offsets,
        seq_len,
        key.shape[1],
        window_size=(-1, -1) if is_whole else (-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[2] != key.shape[2],
        seqused_k=used.num_keys,
    )
    return cast("Tensor", out).view(query.shape)


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, expands_keys: bool = False
) -> Tensor:
    groups, seq_len = query.shape[2] // key.shape[2], query.shape[1]
    if groups > 1 and seq_len == 1:
        # The query heads of a group become queries of one head: keys and values, long beside them, stay as they are.
        grouped = query.reshape(query.shape[0], key.shape[2], groups, -1)
        out = _attend_heads(grouped, key.transpose(1, 2), value.transpose(1, 2), mask, is_causal=False)
        return out.reshape(query.shape)
    if groups > 1 and expands_keys:
        key, value = (part.repeat_interleave(groups, dim=2) for part in (key, value))
    is_causal = mask is None and seq_len > 1  # torch would count the queries from the first key on
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return _attend_heads(query, key, value, mask, is_causal=is_causal).transpose(1, 2)


def _attend_heads(
    query: Float[Tensor, "B H S E"],
    key: Float[Tensor, "B K L E"],
    value: Float[Tensor, "B K L E"],
    mask: Bool[Tensor, "B 1 S L"] | None,
    *,
    is_causal: bool,
) -> Float[Tensor, "B H S E"]:
    has_groups = query.shape[1] != key.shape[1]
    out: Tensor = scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=has_groups)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _attend_each_document(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, window: int | None) -> Tensor:
    lengths = offsets.diff().tolist()  # not traced by torch.compile, which would compile again for every packing
    documents = zip(*(torch.split(x.flatten(0, 1), lengths) for x in (query, key, value)), strict=True)
    attended = [_attend_rows(q[None], k[None], v[None], _window_mask(q, window))[0] for q, k, v in documents]
    return torch.cat(attended).view(query.shape)


def _window_mask(query: Float[Tensor, "S H E"], window: int | None) -> Bool[Tensor, "1 1 S S"] | None:
    """Returns which tokens of one document each of its tokens may see; None where the window holds all of them."""
    seq_len = query.shape[0]
    if window is None or seq_len <= window:
        return None
    return document_mask(torch.zeros((1, seq_len), device=query.device, dtype=torch.int32), window)
