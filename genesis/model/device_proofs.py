"""Tests of an accelerator's kernels of attention, linear layers and the loss before Genesis uses them."""

import logging
from functools import cache, partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from genesis.base.device import find_missing_compiler
from genesis.model.attend.cache import distrust_lengths
from genesis.model.attend.metadata import CachedTokens, document_offsets
from genesis.model.attend.table import FLASH, KERNELS, MASK, attend
from genesis.model.attention import AttentionConfig, build_attention_metadata
from genesis.model.decoder import DecoderConfig
from genesis.model.delta_kernel import PACKAGE, distrust_kernel, find_version, run_kernel
from genesis.model.delta_rule import DeltaInputs, chunked
from genesis.model.loss import IGNORE_INDEX, distrust_fused, fuse, lose_rows_with_gradient, normalise
from genesis.model.proof_memory import prove_once
from genesis_callbacks.checkpoint import DeviceProof

_NUM_TOKENS, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 64, 4, 2, 32
_DOCUMENT_LENGTHS = (1, 20, 7, 36)
_CACHED_LENGTHS, _WINDOW = (0, 40, 7), 9
# bfloat16 has 8 bits of mantissa, and the two kernels add in different orders.
_TOLERANCE, _GRADIENT_TOLERANCE = 2e-2, 4e-2
_VOCAB_SIZE = 1000
_MAX_PROVED_TOKENS = 16_384
"""The mask of a longer sequence would take gigabytes."""
_LINEAR_NAME: Final = "linear_attention"
_log = logging.getLogger(__name__)


class ProvedShape(NamedTuple):
    """The attention that is proved.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        seq_len: Tokens of a sequence: several blocks of keys of every kernel, where a run does not give its own.
        dtype: The dtype of queries, keys and values.
    """

    num_heads: int = _NUM_HEADS
    num_kv_heads: int = _NUM_KV_HEADS
    head_dim: int = _HEAD_DIM
    seq_len: int = 640
    dtype: torch.dtype = torch.bfloat16


_SMALL: Final = ProvedShape()


def prove_kernel(name: str, shape: ProvedShape, device: torch.device) -> None:
    """Compares a kernel with attention under a mask: documents with and without a window, results and gradients.

    Raises:
        RuntimeError: The results differ, or the kernel fails.
    """
    num_tokens = min(shape.seq_len, _MAX_PROVED_TOKENS)
    config = AttentionConfig(shape.num_heads, shape.num_kv_heads, head_dim=shape.head_dim)
    numbers = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    drawn = _draw(numbers, num_tokens, shape.head_dim)
    query, key, value, upstream = (part.to(device, shape.dtype).requires_grad_() for part in drawn)
    x = query.detach().flatten(2)
    # A token, most of the sequence, seven tokens, the rest. The second document sees some blocks of keys whole, and
    # ends within a block behind them: queries that see a block of keys in part are not neighbours.
    last = num_tokens - num_tokens // 8
    ends = torch.tensor([1, last, last + 7])
    document_ids = torch.bucketize(torch.arange(num_tokens), ends, right=True).to(device, torch.int32)[None]
    for window in (None, num_tokens // 5 + 1):
        windowed = AttentionConfig(**{**vars(config), "sliding_window": window})
        metadata = build_attention_metadata(windowed, x, document_ids, kernel=name)
        masked = build_attention_metadata(windowed, x, document_ids, kernel=MASK.name)
        found, wanted = (attend(query, key, value, each) for each in (metadata, masked))
        _compare(f"by {name}", found, wanted)
        gradients = (torch.autograd.grad(out, (query, key, value), upstream) for out in (found, wanted))
        for one, other in zip(*gradients, strict=True):
            _compare(f"by {name} in its backward", one, other, _GRADIENT_TOLERANCE)


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


def _draw_cached(batch_size: int, num_queries: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_queries, _NUM_HEADS), (_NUM_TOKENS, _NUM_KV_HEADS), (_NUM_TOKENS, _NUM_KV_HEADS))
    query, key, value = (
        torch.randn(batch_size, *shape, _HEAD_DIM, generator=generator).to(device, torch.bfloat16) for shape in shapes
    )
    return query, key, value


def _compare(
    name: str, found: Tensor, wanted: Tensor, tolerance: float = _TOLERANCE, *, subject: str = "attention"
) -> None:
    found, wanted = found.detach().float(), wanted.detach().float()
    difference = float((found - wanted).abs().max())
    if not difference <= tolerance * max(1.0, float(wanted.abs().max())):  # NaN also counts as a difference
        raise RuntimeError(f"{subject} {name} differs from the slower way by {difference:.3g}")


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
    _compare("in one kernel", losses, wanted, subject="the loss")
    expected = (probs - is_label.float()).masked_fill(is_ignored, 0)
    _compare("in one kernel", gradient, expected, subject="the gradient of the loss")


LOSS_PROOF: Final = DeviceProof("loss", "compiled", "operators", prove_loss, distrust_fused)


def linear_attention_proofs(config: DecoderConfig) -> tuple[DeviceProof, ...]:
    """Returns the proof of the kernels of linear layers, if a model has such layers and their package is installed.

    The proof runs once on a machine (`proof_memory`), because Triton tries many forms of each kernel meanwhile.
    """
    return () if config.linear_attention is None else _list_linear_proofs()


def prepare_linear_layers(config: DecoderConfig, device: torch.device) -> None:
    """Selects the kernels of a model's linear layers on a CUDA device, for a model that no fit trains.

    Kernels that fail their proof are not used in this process; a warning names them.
    """
    if device.type == "cuda" and config.linear_attention is not None:
        _prove_linear_layers(device)


def _list_linear_proofs() -> tuple[DeviceProof, ...]:
    found = find_version()
    if found is None:
        return ()
    quick = f"{PACKAGE} {found}"
    prove = partial(prove_once, _LINEAR_NAME, quick, prove_linear_attention)
    return (DeviceProof(_LINEAR_NAME, quick, "chunks", prove, distrust_kernel),)


@cache  # once per process, also where the proof fails
def _prove_linear_layers(device: torch.device) -> None:
    for proof in _list_linear_proofs():
        try:
            proof.prove(device)
        except Exception as error:  # missing or wrong kernels are no error, because the computation in chunks remains
            proof.take_slow(device)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            _log.warning("%s: %s instead of %s in linear layers: %s", device, proof.slow, proof.fast, reason)
