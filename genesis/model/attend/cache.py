"""Attention over a key-value cache by the lengths of rows, for new tokens while text is generated.

Letters as in `metadata`. Generation keeps these two ways, whatever kernel a fit trains with: a kernel of torch that
takes the lengths as numbers, so that shapes depend on no length, and where it is missing a mask.
"""

import inspect
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from genesis.model.attend.kernel import Place, find_flash_obstacle
from genesis.model.attend.metadata import UsedSlots

KEYS_STEP = 128
"""On accelerators, the number of slots under a mask is a multiple of this, so that shapes change rarely."""

_HAS_USED_KEYS: Final = "seqused_k" in inspect.signature(varlen_attn).parameters  # missing in torch 2.11
_devices_without_lengths: set[str] = set()


def distrust_lengths(device: torch.device) -> None:
    """Makes attention over a cache on this device type use masks from now on, after the kernel by lengths failed."""
    _devices_without_lengths.add(device.type)


def suits_lengths(x: Tensor, head_dim: int) -> bool:
    """Whether a kernel that takes the lengths of rows as numbers is available and has given correct results."""
    if not _HAS_USED_KEYS or x.device.type in _devices_without_lengths:
        return False
    return find_flash_obstacle(Place.of(x, head_dim)) is None


def attend_used(query: Tensor, key: Tensor, value: Tensor, used: UsedSlots, window: int | None) -> Tensor:
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
