"""What training wants to know of an accelerator when a fit starts, beside what the checkpoints prove there."""

import torch

from genesis.model.attention import AttentionMetadata, attend, distrust_offsets, document_mask, document_offsets
from genesis_callbacks.checkpoint import DeviceProof

_NUM_TOKENS, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 64, 4, 2, 32
_DOCUMENT_LENGTHS = (1, 20, 7, 36)
# bfloat16 has 8 bits of mantissa, and the two kernels add in another order.
_TOLERANCE = 2e-2


def prove_attention(device: torch.device) -> None:
    """Compares attention document by document with attention under a mask, on a few short documents.

    Raises:
        RuntimeError: They differ, or the device has no kernel for the former.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, _NUM_TOKENS, heads, _HEAD_DIM, generator=generator).to(device, torch.bfloat16)
        for heads in (_NUM_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS)
    )
    lengths = torch.tensor(_DOCUMENT_LENGTHS)
    document_ids = torch.arange(len(lengths)).repeat_interleave(lengths).to(device, torch.int32)[None]
    tables = torch.empty(0, device=device), torch.empty(0, device=device)  # rotation comes before
    with torch.no_grad():
        by_document = attend(query, key, value, AttentionMetadata(*tables, offsets=document_offsets(document_ids)))
        masked = attend(query, key, value, AttentionMetadata(*tables, mask=document_mask(document_ids)))
    difference = float((by_document.float() - masked.float()).abs().max())
    if not difference <= _TOLERANCE:  # NaN is a difference, too
        raise RuntimeError(f"attention document by document differs from attention under a mask by {difference:.3g}")


ATTENTION_PROOF = DeviceProof("attention", "varlen", "mask", prove_attention, distrust_offsets)
