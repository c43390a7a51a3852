"""On a real GPU: each kernel of attention equals a mask, repeats, and runs in compiled and recomputed blocks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.base.device import read_capability
from genesis.model.attend.kernel import Place
from genesis.model.attend.table import KERNELS, attend
from genesis.model.attention import AttentionConfig, build_attention_metadata
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.loss import sum_cross_entropy
from genesis.model.mixer import ForwardTokens
from genesis.strategies.wrap import apply_wrappers

# A compiler of kernels warns of its own code, and of what else depends on its version.
pytestmark = [pytest.mark.cuda, pytest.mark.process, pytest.mark.filterwarnings("ignore")]
NAMES = ("fa4", "flex", "flash")
LENGTHS = (1, 300, 7, 128, 500, 12, 1100)
"""Of documents: 2,048 tokens, which are several blocks of keys in every kernel."""
NUM_TOKENS = sum(LENGTHS)


def require(name: str, kind: str, dtype: torch.dtype, head_dim: int) -> None:
    device = torch.device(kind, 0)
    obstacle = KERNELS[name].find_obstacle(Place(device.type, read_capability(device), dtype, head_dim))
    if obstacle is not None:
        pytest.skip(f"{name}: {obstacle}")


def make_ids(kind: str, *, is_whole: bool = False) -> Tensor | None:
    """Returns the documents of two rows: one of several, one of a single one."""
    if is_whole:
        return None
    several = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return torch.stack((several, torch.zeros_like(several))).to(kind, torch.int32)


def run(name: str, config: AttentionConfig, kind: str, ids: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """Returns attention of random heads, and its gradients."""
    assert config.head_dim is not None
    generator = torch.Generator().manual_seed(0)
    query, key, value, upstream = (
        torch.randn(2, NUM_TOKENS, heads, config.head_dim, generator=generator).to(kind, dtype).requires_grad_()
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads)
    )
    metadata = build_attention_metadata(config, ForwardTokens(query.detach().flatten(2), ids, kernel=name))
    out = attend(query, key, value, metadata)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), upstream)]


@pytest.fixture
def deterministic() -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def assert_near(one: Tensor, other: Tensor) -> None:
    """Compares whole tensors: of a million elements in bfloat16, some round far from the others'."""
    one, other = one.float(), other.float()
    assert (one - other).norm() <= 2e-2 * other.norm()
    assert (one - other).abs().max() <= 0.1 * other.abs().max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [2, 8])
@pytest.mark.parametrize("window", [None, 200])
def test_values_and_gradients_are_those_under_a_mask(
    kind: str, name: str, head_dim: int, num_kv_heads: int, window: int | None
) -> None:
    require(name, kind, torch.bfloat16, head_dim)
    config = AttentionConfig(8, num_kv_heads, head_dim=head_dim, sliding_window=window)
    found, wanted = (run(each, config, kind, make_ids(kind), torch.bfloat16) for each in (name, "mask"))
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_whole_rows_are_those_of_torch(kind: str, name: str) -> None:
    require(name, kind, torch.bfloat16, 64)
    config = AttentionConfig(4, 2, head_dim=64)
    found, wanted = (run(each, config, kind, None, torch.bfloat16) for each in (name, "mask"))
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("head_dim", [24, 64, 80])
def test_flex_takes_float32_and_any_width(kind: str, head_dim: int) -> None:
    require("flex", kind, torch.float32, head_dim)
    config = AttentionConfig(4, 2, head_dim=head_dim)
    found, wanted = (run(each, config, kind, make_ids(kind), torch.float32) for each in ("flex", "mask"))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)  # products may take TF32


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_kernel_gives_the_same_bits_again(
    kind: str, name: str, head_dim: int, window: int | None, is_whole: bool
) -> None:
    require(name, kind, torch.bfloat16, head_dim)
    config = AttentionConfig(16, 4, head_dim=head_dim, sliding_window=window)
    ids = make_ids(kind, is_whole=is_whole)
    first = run(name, config, kind, ids, torch.bfloat16)
    for _ in range(5):
        for one, other in zip(run(name, config, kind, ids, torch.bfloat16), first, strict=True):
            assert torch.equal(one, other)


SHAPE = DecoderConfig(
    dim=256,
    num_layers=2,
    attention=AttentionConfig(4, 2, sliding_window=200, window_layers=(0,), qk_norm="head"),
    ffn_dim=256,
    max_seq_len=NUM_TOKENS,
    vocab_size=512,
)


def train(name: str, kind: str, **wrappers: Any) -> list[Tensor]:
    """Returns the loss and all gradients of a decoder under autocast."""
    decoder = Decoder(SHAPE)
    decoder.attention_kernel = name
    decoder.init_weights(0)
    decoder.to(kind)
    apply_wrappers(decoder, **wrappers)
    ids = (torch.arange(2 * NUM_TOKENS).view(2, -1) * 7 % SHAPE.vocab_size).to(kind)
    head = partial(sum_cross_entropy, labels=ids.roll(-1, dims=1))
    with torch.autocast(kind, torch.bfloat16):
        loss: Any = decoder(ids, document_ids=make_ids(kind), head=head)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in decoder.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_a_decoder_trains_as_under_a_mask_in_eager_compiled_and_recomputed_blocks(
    kind: str, name: str, is_compiled: bool, checkpointing: str
) -> None:
    assert SHAPE.attention_heads is not None
    require(name, kind, torch.bfloat16, SHAPE.attention_heads.head_dim)
    found = train(name, kind, activation_checkpointing=checkpointing, has_compiled_blocks=is_compiled)
    wanted = train("mask", kind)
    assert len(found) == len(wanted) > 2
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 5e-2 * other.norm()
