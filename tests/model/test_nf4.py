"""Weights in NF4: the nearest codes, exact products, and bytes alone between them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear

from genesis.base.errors import UserError
from genesis.model.adapter import (
    BASE_FORMATS,
    AdapterConfig,
    BaseFormat,
    adapters_off,
    attach_adapters,
    init_adapters,
    list_nf4_weights,
    read_plain_state,
    use_nf4,
)
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.initial import is_unset, mark_unset
from genesis.model.mixture import MixtureConfig
from genesis.model.nf4 import BYTES, Nf4Linear, compute, dequantise, dequantise_rows, list_shapes, quantise

VALUES = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""Table of appendix E of QLoRA, to eight digits."""
SHAPE = DecoderConfig(
    vocab_size=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, max_seq_len=32, dropout=0.0
)
MIXTURE = replace(SHAPE, ffn_dim=None, feed_forward=MixtureConfig(num_experts=4, top_k=2, ffn_dim=64))
IDS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def build_layer(weight: Tensor, bias: Tensor | None = None) -> Nf4Linear:
    shell = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    layer = Nf4Linear(shell)
    layer.load_state_dict(quantise(weight) | ({} if bias is None else {"bias": bias}))
    return layer


def quantised(decoder: Decoder, config: AdapterConfig | None, base: BaseFormat = BASE_FORMATS["nf4"]) -> Decoder:
    """Returns a copy of a decoder with its linear layers in NF4, and adapters if there is a config."""
    other = Decoder(decoder.config)
    if config is None:
        use_nf4(other)
    else:
        attach_adapters(other, config, base)
    plain = decoder.state_dict()
    weights = list_nf4_weights(decoder)
    state = {name: tensor for name, tensor in plain.items() if name not in weights}
    for name in weights:
        held = quantise(plain[name])
        state |= {f"{name.removesuffix('.weight')}.{tensor}": values for tensor, values in held.items()}
    other.load_state_dict(state, strict=False)
    if config is not None:
        init_adapters(other, seed=0)
    return other


# ---- bytes


def test_each_value_of_the_code_is_found_again_at_its_place() -> None:
    weight = torch.zeros(2, 64)
    weight[0, :16], weight[1, :16] = torch.tensor(VALUES), torch.tensor(VALUES) * 3.0
    packed = quantise(weight)["packed"]
    codes = torch.stack((packed[:, :8] >> 4, packed[:, :8] & 15), dim=-1).flatten(1)
    assert codes.tolist() == [list(range(16))] * 2
    assert packed[0, 8:].unique().tolist() == [0x77], "zeros have the code of 0 in both halves of a byte"


def test_no_weight_has_a_nearer_value_than_that_of_its_code() -> None:
    weight = draw(96, 192)
    held = quantise(weight)
    largest = weight.view(-1, 64).abs().amax(1, keepdim=True)
    codes = torch.stack((held["packed"] >> 4, held["packed"] & 15), dim=-1).view(-1, 64).long()
    values = torch.tensor(VALUES)
    distance = (weight.view(-1, 64) - values[codes] * largest).abs()
    nearest = (weight.view(-1, 64, 1) - values * largest.unsqueeze(2)).abs().amin(2)
    assert bool((distance <= nearest + 1e-9).all())


def test_scales_cost_less_than_a_part_in_a_hundred_of_the_largest() -> None:
    weight = draw(256, 256, seed=3)
    restored = dequantise(quantise(weight), torch.float32)
    largest, found = weight.view(-1, 64).abs().amax(1), restored.view(-1, 64).abs().amax(1)
    assert float((largest - found).abs().max()) < 0.01 * float(largest.max())
    assert 0.05 < float((restored - weight).norm() / weight.norm()) < 0.12


@pytest.mark.parametrize("weight", [torch.zeros(64, 64), torch.full((3, 128), 1e-30), torch.full((1, 64), 1e30)])
def test_blocks_of_one_size_are_restored_and_stay_finite(weight: Tensor) -> None:
    restored = dequantise(quantise(weight), torch.float32)
    torch.testing.assert_close(restored, weight, rtol=1e-6, atol=0.0)


def test_rows_alone_are_the_rows_of_the_whole() -> None:
    held = quantise(draw(70, 128))
    whole = dequantise(held, torch.float32)
    assert torch.equal(dequantise_rows(held, slice(13, 41)), whole[13:41])
    stack = quantise(draw(5, 14, 128))
    assert torch.equal(dequantise(stack, torch.float32), whole.view(5, 14, 128))
    assert torch.equal(dequantise_rows(stack, slice(1, 3)), whole.view(5, 14, 128)[1:3])


def test_the_number_of_threads_changes_no_byte() -> None:
    weight, threads = draw(512, 1024, seed=5), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = quantise(weight)
        torch.set_num_threads(2)
        two = quantise(weight)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one[name], two[name]) for name in BYTES)
    assert {name: tuple(tensor.shape) for name, tensor in one.items()} == list_shapes(512, 1024)


def test_what_has_no_nearest_code_is_refused() -> None:
    weight = draw(4, 64)
    weight[2, 7] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        quantise(weight)
    with pytest.raises(ValueError, match=r"\(4, 96\) is no matrix whose width is a multiple of 64"):
        quantise(draw(4, 96))


def test_unset_bytes_are_told_from_every_weight() -> None:
    layer = build_layer(torch.zeros(64, 64))
    assert [is_unset(parameter) for parameter in layer.parameters()] == [False] * 4
    for parameter in layer.parameters():
        mark_unset(parameter)
    assert [is_unset(parameter) for parameter in layer.parameters()] == [True] * 4


# ---- products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_the_dense_layer_of_its_dequantised_weight(dtype: torch.dtype) -> None:
    bias = draw(96, seed=2).to(dtype)
    layer = build_layer(draw(96, 128).to(dtype), bias)
    dense = dequantise({name: getattr(layer, name) for name in BYTES}, dtype)
    x = draw(2, 10, 128, seed=4).to(dtype).requires_grad_()
    other = x.detach().clone().requires_grad_()
    out, expected = layer(x), linear(other, dense) + bias
    out.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(out, expected)
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)


def test_a_backward_keeps_bytes_and_no_weight() -> None:
    layer = build_layer(draw(128, 128))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(draw(4, 128, seed=1).requires_grad_())
    assert {tensor.dtype for tensor in kept} == {torch.uint8}
    assert sum(tensor.nbytes for tensor in kept) < 128 * 128 * 0.54


def test_autocast_multiplies_in_its_dtype() -> None:
    layer = build_layer(draw(64, 64), draw(64))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(draw(3, 64)).dtype == torch.bfloat16


@pytest.mark.slow
def test_the_compiled_weight_has_the_bits_of_the_eager_one() -> None:
    held, code = quantise(draw(192, 256)), torch.tensor(VALUES)
    pairs = torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=1)
    compiled = torch.compile(compute)
    for dtype in (torch.float32, torch.bfloat16):
        arguments = (*(held[name] for name in BYTES), pairs, torch.linspace(-1.0, 1.0, 256), dtype)
        assert torch.equal(compiled(*arguments), compute(*arguments))


# ---- decoders


@pytest.mark.parametrize(
    ("adapter", "shape"),
    [
        ({}, SHAPE),
        ({"dora": True}, SHAPE),
        ({"dora": True, "dropout": 0.2}, SHAPE),
        ({}, MIXTURE),
        ({"include_experts": ("*",), "exclude": ()}, MIXTURE),
    ],
    ids=["lora", "dora", "drop", "experts", "adapted-experts"],
)
def test_adapters_beside_bytes_train_as_beside_the_dequantised_weights(
    adapter: dict[str, Any], shape: DecoderConfig
) -> None:
    decoder = Decoder(shape)
    decoder.init_weights(3)
    config = AdapterConfig(**{"rank": 4, "exclude": ("*.down",), **adapter})
    ours = quantised(decoder, config, BaseFormat(is_nf4=True))
    theirs = Decoder(shape)
    attach_adapters(theirs, config)
    plain = read_plain_state(ours)
    theirs.load_state_dict(plain)
    assert plain.keys() == theirs.state_dict().keys()
    gradients = []
    for one in (ours, theirs):
        torch.manual_seed(0)
        one(IDS).float().square().mean().backward()
        gradients.append({name: tensor.grad for name, tensor in one.named_parameters() if tensor.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == {n for n in plain if n.rpartition(".")[2].startswith("lora")}
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-9)
    with torch.no_grad(), adapters_off(ours):
        off = ours(IDS)
    base = quantised(decoder, None)
    with torch.no_grad():
        assert torch.equal(off, base(IDS))


def test_linear_layers_of_the_blocks_are_bytes_and_nothing_else_is() -> None:
    with torch.device("meta"):
        decoder = Decoder(SHAPE)
        attach_adapters(decoder, AdapterConfig(rank=2, include=("*.query",)), BASE_FORMATS["nf4"])
    dtypes = {name: parameter.dtype for name, parameter in decoder.named_parameters()}
    layers = {name.rpartition(".")[0] for name, dtype in dtypes.items() if dtype == torch.uint8}
    assert layers == {
        f"blocks.{block}.{name}"
        for block in range(2)
        for name in (
            *(f"attention.{one}" for one in ("query", "key", "value", "output")),
            *(f"feed_forward.{one}" for one in ("gate", "up", "down")),
        )
    }
    assert dtypes["embedding.weight"] == dtypes["norm.weight"] == torch.bfloat16
    assert dtypes["blocks.1.attention.query.lora_A"] == torch.float32
    assert {name for name, parameter in decoder.named_parameters() if parameter.requires_grad} == {
        f"blocks.{block}.attention.query.lora_{matrix}" for block in range(2) for matrix in "AB"
    }
    assert decoder.parameter_groups().keys() >= dtypes.keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 96}, "widths that are multiples of 64, and blocks.0.attention.query reads 96"),
        (
            {"ffn_dim": None, "feed_forward": MixtureConfig(num_experts=4, top_k=2, ffn_dim=32)},
            "widths that are multiples of 64, and blocks.0.feed_forward.experts.down reads 32",
        ),
    ],
)
def test_a_model_that_cannot_be_bytes_is_refused_by_the_name_of_a_layer(changes: dict[str, Any], words: str) -> None:
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig(**{**vars(SHAPE), **changes}))
        with pytest.raises(UserError, match=f"{words}.*import it with --dtype bfloat16"):
            use_nf4(decoder)
