"""Attention over a cache by lengths, against what torch documents of its kernel, which runs on GPUs alone."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from genesis.generate.batch import Batch, Request
from genesis.generate.sampling_options import SamplingOptions
from genesis.model.attend import cache
from genesis.model.attend import kernel as kernels
from genesis.model.attend.mask import needs_expanded_keys
from genesis.model.attend.metadata import AttentionMetadata, CachedTokens
from genesis.model.attend.table import FLASH, attend
from genesis.model.attention import AttentionConfig, build_attention_metadata
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.device_proofs import CACHED_ATTENTION_PROOF
from genesis.model.latent import LatentAttentionConfig
from genesis.model.mixer import ForwardTokens
from tests.generate.slow import NO_STOP

pytestmark = pytest.mark.skipif(
    "seqused_k" not in inspect.signature(varlen_attn).parameters,
    reason="the kernel of torch 2.11 takes no lengths, so that masks are used",
)

CPU = torch.device("cpu")
SHAPE = DecoderConfig(dim=48, num_layers=2, num_heads=6, num_kv_heads=2, ffn_dim=64, max_seq_len=64, vocab_size=97)


def slow_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
) -> Tensor:
    """Attends row by row and query by query, as `torch.nn.attention.varlen.varlen_attn` says that it does."""
    assert query_offsets.dtype == key_offsets.dtype == seqused_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    out = torch.empty_like(query)
    for row, used in enumerate(seqused_k.tolist()):
        start, end = query_offsets[row : row + 2].tolist()
        first, last = key_offsets[row : row + 2].tolist()
        assert used <= last - first <= max_k
        assert end - start <= max_q
        keys, values = (
            part[first : first + used].repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value)
        )
        for index in range(start, end):
            position = used - (end - index)  # the last query stands at the last key
            low = 0 if left < 0 else max(0, position - left)
            high = used if right < 0 else position + right + 1
            scores = torch.einsum("he,lhe->hl", query[index].float(), keys[low:high].float()) * query.shape[2] ** -0.5
            out[index] = torch.einsum("hl,lhe->he", scores.softmax(dim=1), values[low:high].float()).to(out.dtype)
    return out


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Makes the CPU a device with the kernel; returns what each call is given."""
    calls: list[dict[str, Any]] = []

    def watch(query: Tensor, key: Tensor, *inputs: Any, **options: Any) -> Tensor:
        calls.append({"shapes": (query.shape, key.shape), **options})
        return slow_varlen(query, key, *inputs, **options)

    monkeypatch.setattr(cache, "varlen_attn", watch)
    monkeypatch.setattr(cache, "find_flash_obstacle", lambda place: None)
    monkeypatch.setattr(FLASH, "_distrusted", {"cpu"})
    monkeypatch.setattr(cache, "_devices_without_lengths", set())
    return calls


def generate(decoder: Decoder) -> list[list[int]]:
    """Returns texts that join at different times, so that rows have different lengths."""
    batch = Batch(decoder, 3, NO_STOP)
    texts: dict[int, list[int]] = {}
    for start, (length, number) in enumerate([(5, 12), (1, 6), (9, 20), (3, 8), (2, 9)]):
        while not batch.num_free:
            for token in batch.step():
                texts[token.request].append(token.id)
        texts[batch.add(Request(list(range(start, start + length)), number, SamplingOptions(0.0)))] = []
        for token in batch.step():
            texts[token.request].append(token.id)
    while tokens := batch.step():
        for token in tokens:
            texts[token.request].append(token.id)
    return list(texts.values())


def build(window: int | None) -> Decoder:
    attention = AttentionConfig(6, 2, sliding_window=window)
    config = replace(SHAPE, num_heads=None, num_kv_heads=None, attention=attention, rope_theta=500_000.0)
    decoder = Decoder(config).eval()
    decoder.init_weights(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(4.0)
    return decoder


@pytest.mark.parametrize("window", [None, 1, 7])
def test_texts_are_the_same_by_lengths_and_under_a_mask(kernel: list[dict[str, Any]], window: int | None) -> None:
    decoder = build(window)
    by_lengths = generate(decoder)
    assert kernel
    num_calls = len(kernel)
    cache.distrust_lengths(CPU)
    assert generate(decoder) == by_lengths
    assert len(kernel) == num_calls


def test_shapes_depend_on_the_number_of_rows_and_on_no_length(kernel: list[dict[str, Any]]) -> None:
    generate(build(None))
    assert {call["shapes"] for call in kernel} == {
        ((num_rows, 6, 8), (num_rows * SHAPE.max_seq_len, 2, 8)) for num_rows in (1, 2, 3)
    }


def test_the_proof_holds_and_sees_a_kernel_that_is_wrong(
    kernel: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    CACHED_ATTENTION_PROOF.prove(CPU)
    assert {call["window_size"] for call in kernel} == {(-1, -1), (-1, 0), (8, 0)}

    def ignore_lengths(*inputs: Any, seqused_k: Tensor, **options: Any) -> Tensor:
        return slow_varlen(*inputs, seqused_k=torch.full_like(seqused_k, 64), **options)

    monkeypatch.setattr(cache, "varlen_attn", ignore_lengths)
    with pytest.raises(RuntimeError, match="attention by lengths differs from the slower way by"):
        CACHED_ATTENTION_PROOF.prove(CPU)


def test_where_the_proof_fails_masks_are_used(kernel: list[dict[str, Any]]) -> None:
    x, config = torch.zeros(2, 1, 48), AttentionConfig(6, 2)
    cached = CachedTokens(torch.tensor([3, 9]), 3, 9, 64)
    assert build_attention_metadata(config, ForwardTokens(x, cached=cached)).used is not None
    CACHED_ATTENTION_PROOF.take_slow(CPU)
    metadata = build_attention_metadata(config, ForwardTokens(x, cached=cached))
    assert metadata.used is None
    assert metadata.mask is not None


def test_latents_of_free_slots_are_not_expanded(kernel: list[dict[str, Any]]) -> None:
    config = LatentAttentionConfig(num_heads=4, latent_dim=16, key_dim=8, rotary_dim=8, value_dim=8)
    cached = CachedTokens(torch.tensor([3, 9]), 3, 9, 64)
    [block] = config.build_metadata(ForwardTokens(torch.zeros(2, 5, 48), cached=cached), [0])
    assert block.used is None
    assert block.num_keys == 9 + 5
    [token] = config.build_metadata(ForwardTokens(torch.zeros(2, 1, 48), cached=cached), [0])
    assert token.used is not None  # no latent is expanded


@pytest.mark.parametrize("num_queries", [1, 9])
@pytest.mark.parametrize("has_mask", [True, False])
def test_expanded_keys_give_the_same_attention_and_gradients(num_queries: int, has_mask: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, num_queries, 6, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    heads = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    mask = torch.ones(2, 1, num_queries, 9, dtype=torch.bool).tril(9 - num_queries) if has_mask else None
    found = []
    for expands_keys in (False, True):
        out = attend(*heads, AttentionMetadata(torch.empty(0), torch.empty(0), mask=mask, expands_keys=expands_keys))
        found.append((out, *torch.autograd.grad(out.square().sum(), heads)))
    for plain, expanded in zip(*found, strict=True):
        torch.testing.assert_close(plain, expanded)


def test_keys_are_expanded_where_cuda_has_no_fused_kernel_for_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "read_capability", lambda device: (8, 0))
    mask = torch.ones(1, dtype=torch.bool)

    class OnCUDA:
        device, dtype = torch.device("cuda"), torch.float32

    x: Any = OnCUDA()
    assert needs_expanded_keys(x, 64, None)
    x.dtype = torch.bfloat16
    assert not needs_expanded_keys(x, 64, None)
    assert needs_expanded_keys(x, 64, mask)
    assert not needs_expanded_keys(torch.empty(0), 64, mask)  # on the CPU
