"""Attention by documents for any model of transformers that asks its registries: one name in both of them.

    mask        makes what a model passes on as `attention_mask`: a `DocumentMask`, once in a forward for each rule
    attention   reads it: document by document on a host, and by torch's kernel for documents on a GPU

transformers asks for a mask whether or not a model passes positions on, by which it would find documents itself: so
the documents come from `attending_to`, and never from the model. A block gets all that it needs as an argument: a
recomputation runs in the backward, in another thread on a GPU, and reads no context.

B  sequences of a micro-batch     S  tokens of a sequence     H  query heads     E  width of a head
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from genesis.base.device import is_host

NAME: Final = "genesis"
"""What a model is built with as `attn_implementation`."""
_CHANGES: Final = ("softcap", "s_aux", "position_bias")
"""Options by which a model changes scores or adds sinks: its own eager code then computes each document."""


class Documents(NamedTuple):
    """The documents of a forward."""

    ids: Int32[Tensor, "B S"]
    positions: Int64[Tensor, "B S"]
    """The place of each token in its document."""
    offsets: Int32[Tensor, " num_documents+1"]
    """Where documents begin in the flattened batch, and its end."""


class DocumentMask(NamedTuple):
    """What a block gets in the place of a mask."""

    offsets: Int32[Tensor, " num_documents+1"] | None
    """As in `Documents`: a tensor, because lengths on the host would be another compiled form for each packing."""
    window: int | None
    """The tokens that a token sees, itself included; None for all before it in its document."""
    dense: Bool[Tensor, "B 1 S S"] | None
    """Which tokens each token sees, where the rule is neither causal nor a window; the other fields are then None."""


_documents: ContextVar[Documents] = ContextVar("documents")


@contextmanager
def attending_to(documents: Documents) -> Iterator[None]:
    """Makes the masks of the forwards in the block those of `documents`."""
    token = _documents.set(documents)
    try:
        yield
    finally:
        _documents.reset(token)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> DocumentMask:
    """Returns the mask of one rule; transformers calls it, with its own names.

    The model gets an `attention_mask` of ones, with which transformers does not look for documents in positions, so
    that `mask_function` is the rule of a single document in every model.
    """
    documents = _documents.get()
    if _is_plain(mask_function, local_size, kv_length, use_vmap):
        window = None if mask_function is causal_mask_function else local_size
        return DocumentMask(documents.offsets, window, None)

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        is_same = documents.ids[batch, query] == documents.ids[batch, key]
        return is_same & mask_function(batch, head, documents.positions[batch, query], documents.positions[batch, key])

    sizes: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "local_size": local_size,
    }
    dense = sdpa_mask(**sizes, mask_function=rule, allow_is_causal_skip=False, device=device, use_vmap=use_vmap)
    return DocumentMask(None, None, dense)


def _is_plain(rule: Callable[..., Any], window: int | None, length: int, use_vmap: bool) -> bool:
    """Returns whether a rule is causal, or a window of this size: chunks, for one, are given by a size, too.

    Args:
        rule: The rule.
        window: The size.
        length: The length of the row; a size that a file claims may be any number.
        use_vmap: Whether the rule takes one token at a time.
    """
    if rule is causal_mask_function:
        return True
    if use_vmap or window is None:
        return False
    # The rule itself is asked, on the host: about some tokens before and behind the ends of windows and chunks.
    size = min(window, length)
    query = torch.tensor([0, size - 1, size, size + 1, 2 * size, 3 * size]).view(1, 1, -1, 1)
    key = torch.arange(3 * size + 1).view(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    return bool((rule(zero, zero, query, key) == ((key <= query) & (key > query - window))).all())


def attend(
    module: nn.Module,
    query: Float[Tensor, "B H S E"],
    key: Tensor,
    value: Tensor,
    attention_mask: DocumentMask,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "B S H E"], None]:
    """Returns the attention of each document; transformers calls it, with its own names."""
    mask = attention_mask
    is_own = any(options.get(name) is not None for name in _CHANGES) or query.shape[-1] != value.shape[-1]
    if mask.dense is not None:
        return _attend_densely(
            module, query, key, value, mask.dense, dropout, scaling, options if is_own else None
        ), None
    kind, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(kind):  # transformers rotates in float32, which the kernel does not take
        dtype = torch.get_autocast_dtype(kind)
    if is_host(kind) or is_own or dropout > 0.0 or dtype not in (torch.bfloat16, torch.float16):
        own = options if is_own else None
        return _attend_each(module, query, key, value, mask, dropout, scaling, own), None
    return _attend_by_kernel(query.to(dtype), key.to(dtype), value.to(dtype), mask, scaling), None


def _attend_by_kernel(query: Tensor, key: Tensor, value: Tensor, mask: DocumentMask, scaling: float | None) -> Tensor:
    rows, heads, length, _ = query.shape
    query, key, value = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    repeats = heads // key.shape[1]
    if repeats > 1:
        key, value = (one.repeat_interleave(repeats, 1) for one in (key, value))
    window = (-1 if mask.window is None else mask.window - 1, 0)
    assert mask.offsets is not None
    where = (mask.offsets, mask.offsets, length, length)
    out: Any = varlen_attn(query, key, value, *where, scale=scaling, window_size=window)
    by_head: Tensor = out.view(rows, length, heads, -1)
    return by_head


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths are read here: each packing would be compiled
def _attend_each(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: DocumentMask,
    dropout: float,
    scaling: float | None,
    own: Mapping[str, Any] | None,
) -> Tensor:
    assert mask.offsets is not None
    rows, _, length, _ = query.shape
    lengths = mask.offsets.diff().tolist()
    parts = (torch.split(one.transpose(1, 2).flatten(0, 1), lengths) for one in (query, key, value))
    documents = zip(*parts, strict=True)
    outs = []
    for of_one in documents:
        of_query, of_key, of_value = (one.transpose(0, 1)[None] for one in of_one)  # [1, H, s, E]
        seen = None
        size = of_query.shape[2]
        if own is not None or (mask.window is not None and size > mask.window):
            index = torch.arange(size, device=query.device)
            seen = index[None, :] <= index[:, None]
            if mask.window is not None:
                seen &= index[None, :] > index[:, None] - mask.window
            seen = seen[None, None]
        outs.append(_attend_densely(module, of_query, of_key, of_value, seen, dropout, scaling, own)[0])
    return torch.cat(outs).view(rows, length, *outs[0].shape[1:])


def _attend_densely(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    dropout: float,
    scaling: float | None,
    own: Mapping[str, Any] | None,
) -> Tensor:
    """Returns attention by torch, or by the model's own code if it gets its options; all before it without `seen`."""
    if own is None:
        is_shared = query.shape[1] != key.shape[1]
        is_causal = seen is None and query.shape[2] > 1
        found = scaled_dot_product_attention(
            *(query, key, value, seen, dropout, is_causal), scale=scaling, enable_gqa=is_shared
        )
        return found.transpose(1, 2)
    assert seen is not None
    added = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
    added = added.masked_fill(~seen, torch.finfo(query.dtype).min)
    eager: Any = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
    if eager is None:
        raise NotImplementedError(f"{type(module).__name__} has no eager attention for {sorted(own)}")
    out: Tensor = eager(module, query, key, value, added, dropout=dropout, scaling=scaling, **own)[0]
    return out


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
