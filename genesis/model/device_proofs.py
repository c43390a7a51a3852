"""Tests of an accelerator's attention kernels before Genesis uses them."""

from typing import Final

import torch

from genesis.model.attend import (
    AttentionMetadata,
    CachedTokens,
    attend,
    distrust_lengths,
    distrust_offsets,
    document_mask,
    document_offsets,
)
from genesis.model.attention import AttentionConfig, build_attention_metadata
from genesis.model.delta_kernel import PACKAGE, distrust_kernel, find_version, run_kernel
from genesis.model.delta_rule import DeltaInputs, chunked
from genesis_callbacks.checkpoint import DeviceProof

_NUM_TOKENS, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 64, 4, 2, 32
_DOCUMENT_LENGTHS = (1, 20, 7, 36)
_CACHED_LENGTHS, _WINDOW = (0, 40, 7), 9
# bfloat16 has 8 bits of mantissa, and the two kernels add in different orders.
_TOLERANCE = 2e-2


def prove_attention(device: torch.device) -> None:
    """Compares attention document by document with attention under a mask, on a few short documents.

    Raises:
        RuntimeError: The results differ, or the device has no kernel for attention by documents.
    """
    query, key, value = _draw_heads(1, _NUM_TOKENS, _NUM_TOKENS, device)
    lengths = torch.tensor(_DOCUMENT_LENGTHS)
    document_ids = torch.arange(len(lengths)).repeat_interleave(lengths).to(device, torch.int32)[None]
    tables = torch.empty(0, device=device), torch.empty(0, device=device)  # the rotation has been applied before
    with torch.no_grad():
        by_document = attend(query, key, value, AttentionMetadata(*tables, offsets=document_offsets(document_ids)))
        masked = attend(query, key, value, AttentionMetadata(*tables, mask=document_mask(document_ids)))
    _compare("document by document", by_document, masked)


def prove_cached_attention(device: torch.device) -> None:
    """Compares attention over a cache by lengths with attention under a mask: for one and for several new tokens.

    If no kernel takes lengths, the mask is used anyway, and no test is needed.

    Raises:
        RuntimeError: The results differ, or the kernel fails.
    """
    lengths = torch.tensor(_CACHED_LENGTHS)
    cached = CachedTokens(lengths.to(device), int(lengths.min()), int(lengths.max()), _NUM_TOKENS)
    for window in (None, _WINDOW):
        config = AttentionConfig(_NUM_HEADS, _NUM_KV_HEADS, sliding_window=window)
        for num_new in (1, 5):
            query, key, value = _draw_heads(len(lengths), num_new, _NUM_TOKENS, device)
            with torch.no_grad():
                metadata = build_attention_metadata(config, query.flatten(2), None, cached=cached)
                if metadata.used is None:
                    return
                positions = cached.lengths.view(-1, 1, 1, 1) + torch.arange(num_new, device=device).unsqueeze(1)
                slots = torch.arange(_NUM_TOKENS, device=device)
                mask = (slots <= positions) & (slots > positions - (window or _NUM_TOKENS))
                masked = attend(query, key, value, metadata._replace(used=None, mask=mask))
                _compare("by lengths", attend(query, key, value, metadata), masked)


def prove_linear_attention(device: torch.device) -> None:
    """Compares the kernels of linear layers with the computation in chunks: for documents, a text, and one new token.

    Raises:
        RuntimeError: The results differ, or a kernel fails.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, _NUM_TOKENS, *shape, generator=generator)

    heads, width = _NUM_KV_HEADS, _HEAD_DIM
    value = draw(_NUM_HEADS, width)
    inputs = DeltaInputs(draw(heads, width), draw(heads, width), value, -draw(_NUM_HEADS).abs(), draw(_NUM_HEADS))
    inputs = inputs._replace(beta=inputs.beta.sigmoid())
    inputs = DeltaInputs(*(part.to(device, torch.bfloat16) for part in inputs))
    one = DeltaInputs(*(part[:, :1] for part in inputs))
    lengths = torch.tensor(_DOCUMENT_LENGTHS * 2)
    document_ids = torch.arange(len(lengths)).repeat_interleave(lengths).view(2, -1).to(device, torch.int32)
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    state = torch.zeros(2, _NUM_HEADS, width, width, device=device)
    with torch.no_grad():
        found, wanted = run_kernel(inputs, document_offsets(document_ids))[0], chunked(inputs, is_start)[0]
        _compare("in linear layers", found, wanted)
        after, state = run_kernel(inputs, None, state)[1], chunked(inputs)[1]
        assert after is not None
        _compare("in linear layers", after, state)
        _compare("of a new token in linear layers", run_kernel(one, None, state)[0], chunked(one, None, state)[0])


def _draw_heads(
    batch_size: int, num_queries: int, num_keys: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_queries, _NUM_HEADS), (num_keys, _NUM_KV_HEADS), (num_keys, _NUM_KV_HEADS))
    query, key, value = (
        torch.randn(batch_size, *shape, _HEAD_DIM, generator=generator).to(device, torch.bfloat16) for shape in shapes
    )
    return query, key, value


def _compare(name: str, found: torch.Tensor, masked: torch.Tensor) -> None:
    difference = float((found.float() - masked.float()).abs().max())
    if not difference <= _TOLERANCE:  # NaN also counts as a difference
        raise RuntimeError(f"attention {name} differs from the slower way by {difference:.3g}")


ATTENTION_PROOF: Final = DeviceProof("attention", "varlen", "mask", prove_attention, distrust_offsets)
CACHED_ATTENTION_PROOF: Final = DeviceProof(
    "cached_attention", "lengths", "mask", prove_cached_attention, distrust_lengths
)


def linear_attention_proofs() -> tuple[DeviceProof, ...]:
    """Returns the proof of the kernels of linear layers, if their package is installed; its name has the version."""
    found = find_version()
    if found is None:
        return ()
    quick = f"{PACKAGE} {found}"
    return (DeviceProof("linear_attention", quick, "chunks", prove_linear_attention, distrust_kernel),)
