"""The proof of attention when a fit starts: it holds, it sees wrong kernels, and then masks are used."""

import pytest
import torch

from genesis.model import attend
from genesis.model.attention import AttentionConfig, build_attention_metadata
from genesis.model.device_proofs import ATTENTION_PROOF

CPU = torch.device("cpu")


def test_attention_by_documents_and_under_a_mask_agree() -> None:
    ATTENTION_PROOF.prove(CPU)


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_kernel_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    right = attend._attend_each_document
    monkeypatch.setattr(attend, "_attend_each_document", lambda *inputs: right(*inputs) * wrong)
    with pytest.raises(RuntimeError, match="differs from attention under a mask by"):
        ATTENTION_PROOF.prove(CPU)


def test_where_the_proof_fails_masks_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "_distrusted_devices", set())
    config = AttentionConfig(num_heads=2, num_kv_heads=2)
    ids = torch.arange(2, dtype=torch.int32).repeat_interleave(64)[None]
    x = torch.zeros(1, 128, 32)
    assert build_attention_metadata(config, x, ids).offsets is not None
    ATTENTION_PROOF.take_slow(CPU)
    metadata = build_attention_metadata(config, x, ids)
    assert metadata.offsets is None
    assert metadata.mask is not None
