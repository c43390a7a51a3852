"""Adapters on routed experts equal a slow reference, in values and gradients; the base's stacks are never changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from genesis.base.errors import UserError
from genesis.model.adapter import (
    AdapterConfig,
    adapters_off,
    attach_adapters,
    cut_adapter,
    init_adapters,
    is_adapter_tensor,
    merge_rows,
    name_adapter_tensors,
)
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.describe import count_flops_per_token
from genesis.model.expert_adapter import AdaptedExperts
from genesis.model.experts import Experts
from genesis.model.mixture import MixtureConfig
from genesis.model.recipe import read_adapter_config

DIM, WIDTH, RANK = 16, 24, 3
COUNTS = torch.tensor([4, 0, 7, 5])
TARGETS = [("gate_up", "down"), ("gate_up",), ("down",)]
CONFIG = DecoderConfig(
    dim=DIM,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=32,
    vocab_size=61,
    feed_forward=MixtureConfig(num_experts=4, top_k=2, ffn_dim=WIDTH, shared_ffn_dim=20),
)
IDS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(3))


def build(targets: tuple[str, ...], dtype: torch.dtype = torch.float64, rank: int = RANK) -> AdaptedExperts:
    experts = AdaptedExperts(Experts(4, 2, DIM, WIDTH).requires_grad_(False).to(dtype), targets, rank=rank, scaling=1.5)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in experts.named_parameters():
        kept = dtype if not is_adapter_tensor(name) else max(dtype, torch.float32, key=lambda one: one.itemsize)
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.4).to(kept)
    return experts


def slow_reference(experts: AdaptedExperts, rows: Tensor) -> Tensor:
    """Returns the outputs by the adapted weight of each expert, one row after the other."""
    outputs, end = [], 0
    for expert, count in enumerate(COUNTS.tolist()):
        weights = {}
        for name in ("gate", "up", "down"):
            weight = getattr(experts, name)[expert].to(rows.dtype)
            adapter = experts.down_adapter if name == "down" else experts.gate_up_adapter
            if adapter is not None:
                high = adapter.lora_B[expert].to(rows.dtype)
                if name != "down":
                    high = high[:WIDTH] if name == "gate" else high[WIDTH:]
                weight = weight + adapter.scaling * high @ adapter.lora_A[expert].to(rows.dtype)
            weights[name] = weight
        for row in rows[end : end + count]:
            inner = silu(linear(row, weights["gate"])) * linear(row, weights["up"])
            outputs.append(linear(inner, weights["down"]))
        end += count
    return torch.stack([*outputs, *(torch.zeros_like(rows[0]) for _ in rows[end:])])


def find_gradients(experts: AdaptedExperts, out: Tensor, rows: Tensor) -> dict[str, Tensor]:
    trained = {name: one for name, one in experts.named_parameters() if one.requires_grad}
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad((out * weights).sum(), [rows, *trained.values()])
    return dict(zip(["rows", *trained], found, strict=True))


def draw_rows(dtype: torch.dtype = torch.float64) -> Tensor:
    # Two rows behind the last group, as the exchange of rows between ranks may leave them.
    return torch.randn(18, DIM, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


@pytest.mark.parametrize("products", ["loop", "grouped"])
@pytest.mark.parametrize("targets", TARGETS, ids="-".join)
def test_values_and_gradients_equal_those_of_a_slow_reference(targets: tuple[str, ...], products: Any) -> None:
    # The kernel has no float64, and its loop on CPUs is float32.
    dtype = torch.float64 if products == "loop" else torch.float32
    experts, rows = build(targets, dtype), draw_rows(dtype)
    experts.products = products
    out, expected = experts(rows, COUNTS), slow_reference(experts, rows)
    tolerance = 1e-12 if products == "loop" else 1e-5
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance * float(expected.detach().abs().max()))
    found, wanted = find_gradients(experts, out, rows), find_gradients(experts, expected, rows)
    assert len(found) == 1 + 2 * len(targets)
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0.01
        atol = tolerance * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_recomputed_and_compiled_forwards_give_the_same_bits(compiles: bool) -> None:
    experts, rows = build(TARGETS[0], torch.float32), draw_rows(torch.float32)
    wanted = find_gradients(experts, experts(rows, COUNTS), rows)

    def run(rows: Tensor) -> Tensor:
        return checkpoint(experts, rows, COUNTS, use_reentrant=False)

    found = find_gradients(experts, (torch.compile(run, fullgraph=True) if compiles else run)(rows), rows)
    for name, gradient in wanted.items():
        if compiles:
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found[name], gradient), name


class Shapes(TorchDispatchMode):
    """Collects the shapes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= {tuple(one.shape) for one in (result if isinstance(result, tuple) else (result,))
                       if isinstance(one, Tensor) and not is_view(func)}  # fmt: skip
        return result


def is_view(func: Any) -> bool:
    return any(one.alias_info is not None for one in func._schema.returns)


def test_no_update_of_a_whole_weight_and_no_gradient_of_the_base_exists_in_training() -> None:
    experts, rows = build(TARGETS[0], torch.float32), draw_rows(torch.float32)
    with Shapes() as shapes:
        experts(rows, COUNTS).sum().backward()
    whole = {(4, WIDTH, DIM), (4, 2 * WIDTH, DIM), (4, DIM, WIDTH), (WIDTH, DIM), (2 * WIDTH, DIM), (DIM, WIDTH)}
    assert (4, 2 * WIDTH, RANK) in shapes.found
    assert not whole & shapes.found
    assert all((one.grad is not None) == is_adapter_tensor(name) for name, one in experts.named_parameters())


def test_a_base_in_bfloat16_keeps_its_products_and_adapters_stay_float32() -> None:
    experts, rows = build(TARGETS[0], torch.bfloat16), draw_rows(torch.bfloat16)
    out = experts(rows, COUNTS)
    assert out.dtype == torch.bfloat16
    expected = slow_reference(experts, rows.detach().float())
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.02 * float(expected.detach().abs().max()))
    found = find_gradients(experts, out, rows)
    assert {name: one.dtype for name, one in found.items() if name != "rows"} == dict.fromkeys(
        [name for name in found if name != "rows"], torch.float32
    )


# ---- in a decoder


def adapt(config: DecoderConfig = CONFIG, **adapter: Any) -> Decoder:
    decoder = Decoder(config)
    attach_adapters(decoder, AdapterConfig(**{"rank": RANK, "include_experts": ("*",), **adapter}))
    decoder.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0.0, 0.1, generator=generator)
            elif not is_adapter_tensor(name) and parameter.ndim > 1:
                parameter.mul_(4.0)
    return decoder


def list_targets(decoder: Decoder) -> set[str]:
    return {name.removesuffix(".lora_A") for name, _ in decoder.named_parameters() if name.endswith("lora_A")}


def test_patterns_choose_the_stacks_and_the_router_has_no_adapter() -> None:
    linears = list_targets(adapt(include_experts=()))
    assert not any("experts" in name or "router" in name for name in linears)
    experts = {f"blocks.{block}.feed_forward.experts.{target}_adapter" for block in (0, 1) for target in
               ("gate_up", "down")}  # fmt: skip
    assert list_targets(adapt()) == linears | experts
    assert list_targets(adapt(include=())) == experts
    assert list_targets(adapt(include=(), exclude=("*.gate_up",), include_experts=("blocks.1.*",))) == {
        "blocks.1.feed_forward.experts.down_adapter"
    }
    trained = {name for name, one in adapt().named_parameters() if one.requires_grad}
    assert all(is_adapter_tensor(name) for name in trained)


def test_new_adapters_change_no_logit_and_switched_off_ones_none_either() -> None:
    decoder = Decoder(CONFIG)
    decoder.init_weights(0)
    with torch.no_grad():
        before = decoder(IDS)
        names = set(decoder.state_dict())
        attach_adapters(decoder, AdapterConfig(rank=RANK, include_experts=("*",)))
        assert names <= set(decoder.state_dict())
        init_adapters(decoder, seed=5)
        torch.testing.assert_close(decoder(IDS), before, rtol=0, atol=1e-7)
        for name, parameter in decoder.named_parameters():
            if name.endswith("lora_B"):
                parameter.add_(1.0)
        assert not torch.allclose(decoder(IDS), before)
        with adapters_off(decoder):
            assert torch.equal(decoder(IDS), before)


def test_initial_values_follow_from_the_name_and_the_expert_alone() -> None:
    few, many = (
        adapt(DecoderConfig(**{**vars(CONFIG), "feed_forward": MixtureConfig(num_experts=n, top_k=2, ffn_dim=WIDTH)}))
        for n in (4, 8)
    )
    for target in ("gate_up", "down"):
        name = f"blocks.1.feed_forward.experts.{target}_adapter.lora_A"
        weight, other = few.get_parameter(name), many.get_parameter(name)
        assert torch.equal(weight, other[:4])
        bound = weight.shape[2] ** -0.5
        assert 0.9 * bound < float(weight.detach().abs().max()) <= bound
        assert len({*weight[:, 0, 0].tolist()}) == 4


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"exclude": ("*.down",)}])
def test_the_merged_weights_give_the_logits_of_the_adapters(options: dict[str, Any]) -> None:
    adapted = adapt(**options)
    held = adapted.state_dict()
    scaling = AdapterConfig(rank=RANK, **options).scaling
    state = {name: one for name, one in held.items() if not is_adapter_tensor(name)}
    num_merged = 0
    for name, weight in state.items():
        adapter = {role: held[full] for role, full in name_adapter_tensors(name).items() if full in held}
        if not adapter:
            continue
        num_merged += weight.ndim == 3
        # Some rows at a time, as an export merges them.
        halves = [slice(0, len(weight) // 2), slice(len(weight) // 2, len(weight))]
        parts = [merge_rows({"weight": weight[one], **cut_adapter(name, adapter, one)}, scaling) for one in halves]
        state[name] = torch.cat(parts).float()
    assert num_merged == (4 if "exclude" in options else 6)
    merged = Decoder(CONFIG)
    merged.load_state_dict(state)
    with torch.no_grad():
        assert not torch.allclose(merged(IDS), Decoder(CONFIG)(IDS))
        torch.testing.assert_close(merged(IDS), adapted(IDS), rtol=0, atol=1e-5)


def test_the_flops_of_a_token_are_those_of_the_experts_that_it_sees() -> None:
    without = count_flops_per_token(CONFIG, 32, AdapterConfig(rank=RANK))
    found = count_flops_per_token(CONFIG, 32, AdapterConfig(rank=RANK, include_experts=("*",)))
    # Of two layers, two experts each: an A and a B for the two stacks.
    assert found - without == 2 * 2 * 6 * RANK * (DIM + 2 * WIDTH + WIDTH + DIM)


@contextmanager
def refused(message: str) -> Iterator[None]:
    with pytest.raises(UserError) as caught:
        yield
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"include_experts": ("*.gate",)},
            "model.adapter.include_experts has '*.gate', which matches no stack of routed experts; their names are "
            "blocks.0.feed_forward.experts.gate_up, blocks.0.feed_forward.experts.down, ..., "
            "blocks.1.feed_forward.experts.down",
        ),
        ({"exclude": ("*.vision.*",)}, "exclude has '*.vision.*', which matches no linear layer of the blocks"),
        ({"exclude": ("*",)}, "takes away every layer of include ['*', '*']: leave a layer"),
        (
            {"include": (), "rank": 17},
            "rank is 17, more than the width 16 of blocks.0.feed_forward.experts.gate_up: set it to 16 or less, or "
            "exclude the layer by '*.gate_up'",
        ),
        (
            {"dora": True},
            "dora is true, and include_experts is ['*']: adapters of experts have neither dora nor dropout",
        ),
        ({"dropout": 0.1}, "dropout is 0.1, and include_experts is ['*']"),
    ],
)
def test_adapters_that_experts_cannot_have_are_refused(options: dict[str, Any], message: str) -> None:
    with refused(message):
        adapt(**options)


def test_patterns_of_experts_are_refused_for_a_dense_model_and_in_another_form() -> None:
    dense = DecoderConfig(**{**vars(CONFIG), "feed_forward": None, "ffn_dim": 20})
    with refused("include_experts has '*', and the model has no stack of routed experts: leave it out"):
        adapt(dense)
    with refused("include_experts is 'x': it must be a list of texts"):
        read_adapter_config({"model": {"adapter": {"include_experts": "x"}}}, where="the recipe")
