"""Kinds of attention (whole rows, documents, a cache; with a mask or a kernel that takes lengths) and their selection.

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
from genesis.model.tape import FLOAT32_BYTES, Tape, Value

MIN_MEAN_DOCUMENT_TOKENS = 24
"""On CPU, shorter documents use a mask: for them, one call per document costs more than it saves."""

FLASH_CAPABILITY, FLASH_HEAD_DIM = (8, 0), 256
"""The oldest GPUs (Ampere) and the widest heads with flash kernels."""

KEYS_STEP = 128
"""On accelerators, the number of slots under a mask is a multiple of this, so that shapes change rarely."""

_HAS_USED_KEYS = "seqused_k" in inspect.signature(varlen_attn).parameters  # missing in torch 2.11
_distrusted_devices: set[str] = set()
_devices_without_lengths: set[str] = set()


def distrust_offsets(device: torch.device) -> None:
    """Makes attention on this device type use masks from now on, after attention by documents gave wrong results."""
    _distrusted_devices.add(device.type)


def distrust_lengths(device: torch.device) -> None:
    """Makes attention over a cache on this device type use masks from now on, after the kernel by lengths failed."""
    _devices_without_lengths.add(device.type)


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


class AttentionMetadata(NamedTuple):
    """The position of each token of a forward and the tokens that it may see: computed once, read by every block.

    At most one of `offsets`, `mask` and `used` is given. Without all three, a token sees the tokens before it in its
    row; if each row has one new token, this token sees all `num_keys` slots.
    """

    cos: Float[Tensor, "B S 1 E"]
    sin: Float[Tensor, "B S 1 E"]
    offsets: Int32[Tensor, " num_documents+1"] | None = None
    """The index of each document's beginning in the flattened batch, and the end of the batch."""
    mask: Bool[Tensor, "B 1 S L"] | None = None
    window: int | None = None
    """The number of tokens that a token sees, itself included, if `offsets` or `used` is given; a mask includes it."""
    slots: Int64[Tensor, " B*S"] | None = None
    """The slots of these tokens in the flattened cache."""
    num_keys: int | None = None
    """The number of slots of each row that are read if `used` is not given."""
    used: UsedSlots | None = None
    expands_keys: bool = False
    """Whether keys and values are repeated for each query head of a group before the attention, if neither `offsets`
    nor `used` is given."""


def suits_offsets(x: Tensor, num_documents: int, head_dim: int) -> bool:
    """Whether attention document by document is available and faster than a mask."""
    if x.device.type in _distrusted_devices:
        return False
    if x.device.type == "cpu":
        return num_documents * MIN_MEAN_DOCUMENT_TOKENS <= x.shape[0] * x.shape[1]
    return has_flash(x, head_dim)


def suits_lengths(x: Tensor, head_dim: int) -> bool:
    """Whether a kernel that takes the lengths of rows as numbers is available and has given correct results."""
    return _HAS_USED_KEYS and x.device.type not in _devices_without_lengths and has_flash(x, head_dim)


def needs_expanded_keys(x: Tensor, head_dim: int, mask: Tensor | None) -> bool:
    """Whether torch lacks a fused kernel in which a key head serves several query heads.

    On CUDA only the flash kernel does this, which supports no mask and no float32. Otherwise torch would hold the whole
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


def attend(
    query: Float[Tensor, "B S H E"],
    key: Float[Tensor, "B L K E"],
    value: Float[Tensor, "B L K E"],
    metadata: AttentionMetadata,
) -> Float[Tensor, "B S H E"]:
    """Returns softmax(query key^T / sqrt(E)) value over the tokens that `metadata` lets each token see."""
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
    """Returns attention over the used slots; a row's last query is at the position of its last used slot."""
    seq_len = query.shape[1]
    # One new token sees every used slot; without causality the kernel can split a long row over its processors.
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
        # The query heads of a group become queries of one head, so that the longer keys and values need no copy.
        grouped = query.reshape(query.shape[0], key.shape[2], groups, -1)
        out = _attend_heads(grouped, key.transpose(1, 2), value.transpose(1, 2), mask, is_causal=False)
        return out.reshape(query.shape)
    if groups > 1 and expands_keys:
        key, value = (part.repeat_interleave(groups, dim=2) for part in (key, value))
    is_causal = mask is None and seq_len > 1  # torch would align the queries with the first key
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
    lengths = offsets.diff().tolist()  # excluded from torch.compile, which would compile again for every packing
    documents = zip(*(torch.split(x.flatten(0, 1), lengths) for x in (query, key, value)), strict=True)
    attended = [_attend_rows(q[None], k[None], v[None], _window_mask(q, window))[0] for q, k, v in documents]
    return torch.cat(attended).view(query.shape)


def _window_mask(query: Float[Tensor, "S H E"], window: int | None) -> Bool[Tensor, "1 1 S S"] | None:
    """Returns which tokens of a document each of its tokens may see; None if the window contains all of them."""
    seq_len = query.shape[0]
    if window is None or seq_len <= window:
        return None
    return document_mask(torch.zeros((1, seq_len), device=query.device, dtype=torch.int32), window)


def record_attention(tape: Tape, query: Value, key: Value, value: Value, num_heads: int, window: int | None) -> Value:
    """Records `attend` without a cache: it keeps its inputs, its result, and a number for each token and head.

    Args:
        tape: The tape.
        query: Queries, of all heads.
        key: Keys, of all their heads.
        value: Values, likewise.
        num_heads: Number of query heads.
        window: The tokens that a token sees; None for all.
    """
    setting = tape.setting
    sums = tape.value(setting.num_tokens * num_heads, FLOAT32_BYTES)
    is_masked = setting.kernel == "efficient" and (setting.has_documents or window is not None)
    if setting.kernel != "cpu" and (is_masked or setting.kernel == "efficient" or setting.has_documents):
        # Where a kernel does not serve several query heads by one key head, keys and values are repeated.
        key, value = (_record_repeats(tape, part, query.num_elements) for part in (key, value))
    if setting.kernel == "cpu" and setting.has_documents:
        # One call for each document: the results are joined in a tensor of their own, and so are the gradients.
        parts = tape.apply(
            (query, key, value),
            query.num_elements,
            query.element_bytes,
            saved=(query, key, value, sums),
            saves_output=True,
            backward_bytes=query.num_bytes + key.num_bytes + value.num_bytes,
        )
        return tape.apply((parts,), query.num_elements, query.element_bytes, passes_gradient=True)
    mask = _record_mask(tape, query.element_bytes) if is_masked else ()
    return tape.apply(
        (query, key, value),
        query.num_elements,
        query.element_bytes,
        saved=(query, key, value, sums, *mask),
        saves_output=True,
        # The flash kernel adds up the gradient of the queries in float32.
        backward_bytes=query.num_elements * FLOAT32_BYTES if setting.kernel == "flash" else 0,
    )


def _record_repeats(tape: Tape, part: Value, num_elements: int) -> Value:
    return part if part.num_elements == num_elements else tape.apply((part,), num_elements, part.element_bytes)


def _record_mask(tape: Tape, element_bytes: int) -> tuple[Value, ...]:
    """Returns the mask in the type of the scores, which torch makes of the shared one for each call."""
    return (tape.value(tape.setting.num_tokens * tape.setting.seq_len, element_bytes),)
