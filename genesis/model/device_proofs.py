"""Tests of an accelerator's kernels of attention and the loss, and of those of mixers, before Genesis uses them."""

import logging
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from genesis.base.device import find_missing_compiler
from genesis.model.attend.cache import distrust_lengths
from genesis.model.attend.metadata import CachedTokens
from genesis.model.attend.table import FLASH, KERNELS, MASK, attend
from genesis.model.attention import AttentionConfig, build_attention_metadata
from genesis.model.decoder import DecoderConfig
from genesis.model.loss import IGNORE_INDEX, distrust_fused, fuse, lose_rows_with_gradient, normalise
from genesis.model.mixer import GRADIENT_TOLERANCE, ForwardTokens, compare
from genesis.model.proof_memory import prove_once
from genesis_callbacks.checkpoint.device_proof import DeviceProof

_NUM_TOKENS, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 64, 4, 2, 32
_CACHED_LENGTHS, _WINDOW = (0, 40, 7), 9
_VOCAB_SIZE = 1000
_MAX_PROVED_TOKENS = 16_384
"""The mask of a longer sequence would take gigabytes."""
_log = logging.getLogger(__name__)


class ProvedShape(NamedTuple):
    """The attention that is proved.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        seq_len: Tokens of a sequence: several blocks of keys of every kernel, where a run does not give its own.
        dtype: The dtype of queries, keys and values.
        has_sinks: Whether the softmax of each head has a sink.
    """

    num_heads: int = _NUM_HEADS
    num_kv_heads: int = _NUM_KV_HEADS
    head_dim: int = _HEAD_DIM
    seq_len: int = 640
    dtype: torch.dtype = torch.bfloat16
    has_sinks: bool = False


_SMALL: Final = ProvedShape()


def prove_kernel(name: str, shape: ProvedShape, device: torch.device) -> None:
    """Compares a kernel with attention under a mask: documents with and without a window, results and gradients.

    Raises:
        RuntimeError: The results differ, or the kernel fails.
    """
    num_tokens = min(shape.seq_len, _MAX_PROVED_TOKENS)
    config = AttentionConfig(shape.num_heads, shape.num_kv_heads, head_dim=shape.head_dim, has_sinks=shape.has_sinks)
    numbers = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    drawn = _draw(numbers, num_tokens, shape.head_dim)
    query, key, value, upstream = (part.to(device, shape.dtype).requires_grad_() for part in drawn)
    sinks = torch.linspace(-1.0, 1.0, shape.num_heads).to(device, shape.dtype).requires_grad_()
    x = query.detach().flatten(2)
    trained = (query, key, value, sinks) if shape.has_sinks else (query, key, value)
    # A token, most of the sequence, seven tokens, the rest. The second document sees some blocks of keys whole, and
    # ends within a block behind them: queries that see a block of keys in part are not neighbours.
    last = num_tokens - num_tokens // 8
    ends = torch.tensor([1, last, last + 7])
    document_ids = torch.bucketize(torch.arange(num_tokens), ends, right=True).to(device, torch.int32)[None]
    for window in (None, num_tokens // 5 + 1):
        windowed = AttentionConfig(**{**vars(config), "sliding_window": window})
        tokens = ForwardTokens(x, document_ids, kernel=name)
        metadata = build_attention_metadata(windowed, tokens)
        masked = build_attention_metadata(windowed, tokens._replace(kernel=MASK.name))
        given = sinks if shape.has_sinks else None
        found, wanted = (attend(query, key, value, each, given) for each in (metadata, masked))
        compare(f"by {name}", found, wanted)
        gradients = (torch.autograd.grad(out, trained, upstream) for out in (found, wanted))
        for one, other in zip(*gradients, strict=True):
            compare(f"by {name} in its backward", one, other, GRADIENT_TOLERANCE)


def _draw(num_heads: tuple[int, ...], num_tokens: int, head_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, num_tokens, number, head_dim, generator=generator) for number in num_heads]


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
            query, key, value = _draw_cached(len(lengths), num_new, device)
            with torch.no_grad():
                metadata = build_attention_metadata(config, ForwardTokens(query.flatten(2), cached=cached))
                if metadata.used is None:
                    return
                positions = cached.lengths.view(-1, 1, 1, 1) + torch.arange(num_new, device=device).unsqueeze(1)
                slots = torch.arange(_NUM_TOKENS, device=device)
                mask = (slots <= positions) & (slots > positions - (window or _NUM_TOKENS))
                masked = attend(query, key, value, metadata._replace(used=None, mask=mask))
                compare("by lengths", attend(query, key, value, metadata), masked)


def _draw_cached(batch_size: int, num_queries: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_queries, _NUM_HEADS), (_NUM_TOKENS, _NUM_KV_HEADS), (_NUM_TOKENS, _NUM_KV_HEADS))
    query, key, value = (
        torch.randn(batch_size, *shape, _HEAD_DIM, generator=generator).to(device, torch.bfloat16) for shape in shapes
    )
    return query, key, value


def attention_proof(name: str, shape: ProvedShape = _SMALL, label: str = "attention") -> DeviceProof:
    """Returns the proof of a kernel, which is not used any more on devices of this kind if it fails.

    Args:
        name: The kernel.
        shape: The attention that is proved.
        label: The name of the proof.
    """
    kernel = KERNELS[name]
    return DeviceProof(
        label,
        kernel.describe(),
        MASK.name,
        partial(prove_kernel, name, shape),
        lambda device: kernel.distrust(device.type),
    )


TORCH_ATTENTION_PROOF: Final = attention_proof(FLASH.name)
"""Of the kernel by which a decoder attends that no fit has built."""
CACHED_ATTENTION_PROOF: Final = DeviceProof(
    "cached_attention", "lengths", "mask", prove_cached_attention, distrust_lengths
)


def prove_loss(device: torch.device) -> None:
    """Compares the compiled loss of a chunk, and its gradient, with separate operators, in 16 bits.

    Raises:
        RuntimeError: They differ, the function cannot be compiled, or there is no compiler.
    """
    missing = find_missing_compiler(device.type)
    if missing is not None:
        raise RuntimeError(f"{missing}; without it the loss is slower and takes more memory")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_NUM_TOKENS, _VOCAB_SIZE, generator=generator).to(device, torch.bfloat16)
    labels = torch.randint(_VOCAB_SIZE, (_NUM_TOKENS, 1), generator=generator)
    labels[::5] = IGNORE_INDEX
    labels = labels.to(device)
    losses, gradient = fuse(lose_rows_with_gradient)(logits, labels, None)
    probs, log_normaliser = normalise(logits)
    is_ignored = labels == IGNORE_INDEX
    target = labels.masked_fill(is_ignored, 0)
    wanted = (log_normaliser - logits.gather(1, target)).float().masked_fill(is_ignored, 0)
    is_label = torch.arange(_VOCAB_SIZE, device=device) == target
    compare("in one kernel", losses, wanted, subject="the loss")
    expected = (probs - is_label.float()).masked_fill(is_ignored, 0)
    compare("in one kernel", gradient, expected, subject="the gradient of the loss")


LOSS_PROOF: Final = DeviceProof("loss", "compiled", "operators", prove_loss, distrust_fused)


def list_mixer_proofs(config: DecoderConfig) -> list[DeviceProof]:
    """Returns the proofs of the kernels of a model's mixers; a long one runs once on a machine (`proof_memory`)."""
    return [
        DeviceProof(
            *(proof.name, proof.fast, proof.slow),
            partial(prove_once, proof.name, proof.fast, proof.prove) if proof.is_long else proof.prove,
            proof.take_slow,
        )
        for proof in config.list_proofs()
    ]


def prepare_kernels(config: DecoderConfig, device: torch.device) -> None:
    """Selects the kernels of a model's mixers on a CUDA device, for a model that no fit trains.

    Kernels that fail their proof are not used in this process; a warning names them.

    Args:
        config: The model.
        device: The device.
    """
    if device.type != "cuda":
        return
    for proof in list_mixer_proofs(config):
        if (proof.name, device) not in _proved:
            _proved.add((proof.name, device))
            _prove_or_warn(proof, device)


_proved: Final[set[tuple[str, torch.device]]] = set()
"""What was tried in this process: a proof that fails would fail again."""


def _prove_or_warn(proof: DeviceProof, device: torch.device) -> None:
    try:
        proof.prove(device)
    except Exception as error:  # missing or wrong kernels are no error, because the slower way remains
        proof.take_slow(device)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        operation = proof.name.replace("_", " ")
        _log.warning("%s: %s instead of %s in %s: %s", device, proof.slow, proof.fast, operation, reason)
