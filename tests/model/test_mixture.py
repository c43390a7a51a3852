"""A mixture of experts equals a slow reference in values and gradients, for every option; it refuses wrong shapes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from genesis.base.errors import UserError
from genesis.model.adapter import find_linears
from genesis.model.balance import LayerBalance, split_loads, update_balance_biases
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.describe import count_flops_per_token, describe
from genesis.model.dispatch import _sum_rows, sort_by_expert
from genesis.model.experts import Experts
from genesis.model.feed_forward import Dense
from genesis.model.initial import InitialValues
from genesis.model.mixture import ENTROPY, LOAD, Mixture, MixtureConfig
from genesis.model.recipe import build_decoder_config, dump_decoder_config
from genesis.optim import Muon, build_optimizer

DIM, ROWS, LENGTH = 16, 3, 11
BASE = MixtureConfig(num_experts=8, top_k=2, ffn_dim=24)
SHAPE: dict[str, Any] = {
    "dim": DIM, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 64, "vocab_size": 97,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "one": {"top_k": 1, "has_normalized_weights": False},
    "all": {"top_k": 8},
    "unnormalized": {"has_normalized_weights": False, "routed_scale": 2.5},
    "sigmoid": {"scores": "sigmoid", "top_k": 3, "routed_scale": 1.5},
    "bias": {"scores": "sigmoid", "has_balance_bias": True},
    "softmax_bias": {"has_balance_bias": True},
    "groups": {"scores": "sigmoid", "num_groups": 4, "top_groups": 2, "top_k": 3, "has_balance_bias": True},
    "shared": {"shared_ffn_dim": 20},
    "gated": {"shared_ffn_dim": 20, "has_shared_gate": True},
    "balance": {"balance_loss": 0.3},
    "sigmoid_balance": {"scores": "sigmoid", "balance_loss": 0.3},
    "z": {"z_loss": 0.2},
    "everything": {
        "num_experts": 9, "top_k": 3, "shared_ffn_dim": 20, "has_shared_gate": True, "scores": "sigmoid",
        "has_balance_bias": True, "balance_loss": 0.1, "z_loss": 0.2, "routed_scale": 0.5, "num_groups": 3,
        "top_groups": 2,
    },
}  # fmt: skip


def build(config: MixtureConfig, dtype: torch.dtype = torch.float32) -> Mixture:
    part = Mixture(config, DIM)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in part.named_parameters():
        size = 0.3 if "bias" in name else 0.5
        parameter.data = (torch.randn(parameter.shape, generator=generator) * size).to(dtype)
    return part


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def slow_reference(part: Mixture, x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Returns output, auxiliary loss, loads and entropy, one token and one expert after the other."""
    c, w = part.config, dict(part.named_parameters())
    outputs, loss, loads, entropy = torch.empty_like(x), x.new_zeros(()), [0] * c.num_experts, x.new_zeros(())
    for b in range(len(x)):
        used, mean, tokens = [0] * c.num_experts, x.new_zeros(c.num_experts), int(counted[b].sum())
        for s in range(x.shape[1]):
            token = x[b, s]
            logits = w["router.weight"] @ token
            scores = logits.sigmoid() if c.scores == "sigmoid" else logits.softmax(0)
            judged = (scores + w.get("router.balance_bias", torch.zeros(()))).tolist()
            size = c.num_experts // c.num_groups
            groups = [range(start, start + size) for start in range(0, c.num_experts, size)]
            groups.sort(key=lambda group: -sum(sorted(judged[e] for e in group)[-2:]))
            candidates = [e for group in groups[: c.top_groups] for e in group]
            chosen = sorted(candidates, key=lambda e: -judged[e])[: c.top_k]
            total = sum(scores[e] for e in chosen) if c.has_normalized_weights else 1.0
            output = x.new_zeros(DIM)
            for e in chosen:
                expert = swiglu(token, w["experts.gate"][e], w["experts.up"][e], w["experts.down"][e])
                output = output + c.routed_scale * scores[e] / total * expert
            if c.shared_ffn_dim:
                shared = swiglu(token, *(w[f"shared.{name}.weight"] for name in ("gate", "up", "down")))
                output = output + shared * (linear(token, w["shared_gate"]).sigmoid() if c.has_shared_gate else 1.0)
            outputs[b, s] = output
            if counted[b, s]:
                shares = scores / scores.sum()
                entropy = entropy - (shares * shares.log()).sum()
                loss = loss + c.z_loss * logits.logsumexp(0) ** 2
                mean = mean + shares / tokens
                for e in chosen:
                    loads[e] += 1
                    used[e] += 1
        for e in range(c.num_experts):
            fraction = c.num_experts / (c.top_k * max(tokens, 1)) * used[e]
            loss = loss + c.balance_loss * tokens * fraction * mean[e]
    return outputs, loss, loads, entropy


def run(
    part: Mixture, forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], x: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    part.zero_grad()
    x = x.clone().requires_grad_()
    out, loss = forward(x, counted)
    (out.square().sum() + loss).backward()
    assert x.grad is not None
    gradients = {name: p.grad.clone() for name, p in part.named_parameters() if p.grad is not None}
    return out.detach(), loss.detach(), {**gradients, "x": x.grad}


def fast(part: Mixture, x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    out, statistics = part(x, counted)
    assert statistics is not None
    return out, x.new_zeros(()) if statistics.loss_sum is None else statistics.loss_sum


def tokens(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counted = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    counted[1, 7:] = False
    counted[2] = False  # a row of padding alone
    return torch.randn(ROWS, LENGTH, DIM, generator=generator), counted


@pytest.mark.parametrize("products", ["loop", "grouped"])
@pytest.mark.parametrize("option", OPTIONS)
def test_values_and_gradients_are_those_of_a_slow_reference(option: str, products: Any) -> None:
    # The kernel has no float64.
    dtype, tolerance = (torch.float64, 1e-12) if products == "loop" else (torch.float32, 1e-5)
    config = replace(BASE, **OPTIONS[option])
    part, slow = build(config, dtype), build(config, torch.float64)
    part.experts.products = products
    x, counted = tokens()
    expected = run(slow, lambda x, counted: slow_reference(slow, x, counted)[:2], x.double(), counted)
    out, loss, gradients = run(part, partial(fast, part), x.to(dtype), counted)
    assert largest(out - expected[0]) < tolerance * largest(expected[0])
    assert float(loss) == pytest.approx(float(expected[1]), rel=tolerance)
    assert gradients.keys() == {"x"} | {name for name, _ in part.named_parameters() if "bias" not in name}
    for name, gradient in gradients.items():
        wanted = expected[2].get(name, torch.zeros_like(gradient))
        assert largest(gradient - wanted) <= tolerance * max(largest(wanted), 1.0), name
    _, statistics = part(x.to(dtype), counted)
    _, _, loads, entropy = slow_reference(slow, x.double(), counted)
    assert statistics is not None
    assert statistics.counts[LOAD].tolist() == loads
    assert float(statistics.counts[ENTROPY]) == pytest.approx(float(entropy.detach()), rel=1e-5)


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def test_one_expert_without_a_router_is_the_dense_part() -> None:
    part, dense = build(replace(BASE, num_experts=1, top_k=1)), Dense(DIM, 24)
    for name in ("gate", "up", "down"):
        getattr(dense, name).weight.data = getattr(part.experts, name).data[0]
    x, _ = tokens()
    torch.testing.assert_close(part(x)[0], dense(x)[0])


@pytest.mark.parametrize("products", ["loop", "grouped"])
def test_rows_behind_the_last_expert_give_zeros_and_get_no_gradient(products: Any) -> None:
    experts = Experts(4, 1, DIM, 8)
    experts.products = products
    experts.init_weights(InitialValues("0 experts", 0.02))
    rows = torch.randn(12, DIM)
    rows[9:] = torch.nan
    rows.requires_grad_()
    out = experts(rows, torch.tensor([4, 0, 5, 0]))
    assert out[9:].eq(0).all()
    out[:9].sum().backward()
    assert rows.grad is not None
    assert rows.grad[9:].eq(0).all()
    assert all(bool(weight.grad.isfinite().all()) for weight in experts.parameters() if weight.grad is not None)
    assert all(bool(weight.grad[[1, 3]].eq(0).all()) for weight in experts.parameters() if weight.grad is not None)


def test_no_tokens_and_one_token_are_processed() -> None:
    part = build(BASE)
    x, _ = tokens()
    assert part(x[:0])[0].shape == (0, LENGTH, DIM)
    torch.testing.assert_close(part(x[0, :1])[0], part(x)[0][0, :1])


@pytest.mark.parametrize("products", ["loop", "grouped"])
def test_a_frozen_expert_passes_the_gradient_of_its_input_alone(products: Any) -> None:
    part = build(BASE)
    part.experts.products = products
    x, counted = tokens()
    expected = run(part, partial(fast, part), x, counted)[2]
    part.experts.requires_grad_(False)
    found = run(part, partial(fast, part), x, counted)[2]
    assert found.keys() == {"x", "router.weight"}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_router_stays_in_float32_under_autocast_and_casts() -> None:
    part = build(replace(BASE, has_balance_bias=True)).to(torch.bfloat16)
    assert {n: p.dtype for n, p in part.named_parameters() if p.dtype != torch.bfloat16} == {
        "router.weight": torch.float32, "router.balance_bias": torch.float32,
    }  # fmt: skip
    x, counted = tokens()
    part(x.bfloat16(), counted)[0].float().sum().backward()
    assert part.router.weight.grad is not None
    assert part.router.weight.grad.dtype == torch.float32
    part = build(BASE)
    with torch.autocast("cpu", torch.bfloat16):
        routing = part.router(x)
        out, _ = part(x)
    assert torch.equal(routing.weights, part.router(x).weights)
    assert out.dtype == torch.bfloat16
    exact = part(x)[0]
    assert largest(out.float() - exact) < 0.02 * largest(exact)


def test_recomputed_blocks_route_as_before() -> None:
    part = build(replace(BASE, **OPTIONS["everything"]))
    x, counted = tokens()
    expected = run(part, partial(fast, part), x, counted)
    found = run(part, lambda x, c: checkpoint(partial(fast, part), x, c, use_reentrant=False), x, counted)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[2][name], expected[2][name]) for name in expected[2])


def test_micro_batches_add_up_to_the_statistics_of_the_batch() -> None:
    part = build(replace(BASE, balance_loss=0.3, z_loss=0.2))
    x, counted = tokens()
    whole = run(part, partial(fast, part), x, counted)
    rows = [run(part, partial(fast, part), x[row : row + 1], counted[row : row + 1]) for row in range(ROWS)]
    torch.testing.assert_close(sum(row[1] for row in rows), whole[1])
    for name in whole[2].keys() - {"x"}:
        torch.testing.assert_close(sum(row[2][name] for row in rows), whole[2][name], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's compiler has warnings of its own
def test_a_compiled_mixture_computes_the_same_without_a_break() -> None:
    part = build(replace(BASE, **OPTIONS["everything"]))
    x, counted = tokens()
    expected = run(part, partial(fast, part), x, counted)
    part.forward = torch.compile(part.forward, fullgraph=True)  # type: ignore[method-assign]
    found = run(part, partial(fast, part), x, counted)
    assert largest(found[0] - expected[0]) < 1e-5 * largest(expected[0])
    for name, gradient in found[2].items():
        assert largest(gradient - expected[2][name]) < 1e-5 * max(largest(expected[2][name]), 1.0), name


# ---- in a decoder


def decoder_config(**changes: Any) -> DecoderConfig:
    return DecoderConfig(**SHAPE, feed_forward=replace(BASE, **changes))


def test_first_layers_are_dense_and_mixtures_stand_in_every_nth_layer() -> None:
    def kinds(**changes: Any) -> list[str]:
        with torch.device("meta"):
            decoder = Decoder(DecoderConfig(**{**SHAPE, "num_layers": 6}, feed_forward=replace(BASE, **changes)))
        return ["mixture" if isinstance(block.feed_forward, Mixture) else "dense" for block in decoder.blocks]

    assert kinds() == ["mixture"] * 6
    assert kinds(num_dense_layers=2, dense_ffn_dim=32) == ["dense"] * 2 + ["mixture"] * 4
    assert kinds(mixture_every=2, dense_ffn_dim=32) == ["dense", "mixture"] * 3
    assert kinds(num_dense_layers=3, mixture_every=2, dense_ffn_dim=32) == ["dense"] * 3 + [
        "mixture",
        "dense",
        "mixture",
    ]


def test_a_checkpoint_s_recipe_describes_the_mixture() -> None:
    config = decoder_config(**OPTIONS["everything"], num_dense_layers=1, dense_ffn_dim=32)
    assert build_decoder_config(dump_decoder_config(config), "test") == config


def test_initial_values_follow_from_the_name_and_the_expert_alone() -> None:
    few, many = (Decoder(decoder_config(num_experts=count)) for count in (4, 8))
    few.init_weights(3)
    many.init_weights(3)
    for name, weight in few.blocks[1].feed_forward.experts.named_parameters():
        assert torch.equal(weight, many.blocks[1].feed_forward.experts.get_parameter(name)[:4]), name
        assert len({*weight[:, 0, 0].tolist()}) == 4
    assert float(few.blocks[0].feed_forward.experts.gate.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_a_token_costs_only_the_experts_that_it_sees() -> None:
    shape = {**SHAPE, "num_layers": 2}
    found = describe(DecoderConfig(**shape, feed_forward=replace(BASE, shared_ffn_dim=20, has_shared_gate=True)))
    expert, shared = 3 * DIM * 24, 3 * DIM * 20
    assert found.parameters["experts"] == 2 * 8 * expert
    assert found.parameters["router"] == 2 * 8 * DIM
    assert found.parameters["feed_forward"] == 2 * (shared + DIM)
    assert found.num_active_parameters == found.num_parameters - 2 * 6 * expert
    dense = describe(DecoderConfig(**shape, ffn_dim=2 * 24 + 20))
    assert found.flops_per_token == dense.flops_per_token + 6 * 2 * (8 * DIM + DIM)
    assert dense.num_active_parameters == dense.num_parameters
    config = DecoderConfig(**shape, feed_forward=BASE)
    assert (
        count_flops_per_token(config, 64)
        == describe(config).flops_per_token + describe(config).attention_flops_per_token
    )


def test_adapters_leave_router_and_gate_alone() -> None:
    with torch.device("meta"):
        decoder = Decoder(decoder_config(shared_ffn_dim=20, has_shared_gate=True))
    names = {name.split(".", 2)[2] for name in find_linears(decoder)}
    assert names == {f"attention.{n}" for n in ("query", "key", "value", "output")} | {
        f"feed_forward.shared.{n}" for n in ("gate", "up", "down")
    }


@pytest.mark.parametrize("option", ["softmax", "everything"])
def test_a_cache_generates_what_the_whole_text_gives(option: str) -> None:
    config = decoder_config(**OPTIONS[option])
    decoder = Decoder(config)
    decoder.init_weights(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(4.0)
        ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(2))
        cache = decoder.new_cache(2, 16)
        found = []
        for part in ids.split([4, 1, 1, 1, 1, 1], dim=1):
            found.append(decoder(part, cache=cache))
            cache.advance(part.shape[1])
        torch.testing.assert_close(torch.cat(found, 1), decoder(ids), rtol=1e-4, atol=1e-5)
        kept = torch.tensor([3, 8, 17])
        torch.testing.assert_close(
            decoder(ids, logits_to_keep=kept), decoder(ids).flatten(0, 1)[kept], rtol=1e-4, atol=1e-5
        )


# ---- optimizer


def test_muon_orthogonalises_each_expert_by_itself() -> None:
    decoder = Decoder(decoder_config(shared_ffn_dim=20, has_shared_gate=True, has_balance_bias=True))
    decoder.init_weights(0)
    optimizer = build_optimizer(decoder, Muon(weight_decay=0.0))
    groups = {group["name"]: (group["algorithm"], len(group["params"])) for group in optimizer.param_groups}
    assert groups["experts"] == ("muon", 9)
    assert groups["routers"] == ("adamw", 6)
    before = decoder.blocks[0].feed_forward.experts.gate.detach().clone()
    for parameter in decoder.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    gradient = decoder.blocks[0].feed_forward.experts.gate.grad
    assert gradient is not None
    gradient[1] *= 1000.0  # a matrix's own length does not matter, and another's does not, either
    own = gradient[1].clone()  # the update writes to gradients
    optimizer.step()
    updates = before - decoder.blocks[0].feed_forward.experts.gate.detach()
    alone = torch.nn.Parameter(before[1].clone())
    alone.grad = own
    group = {"name": "matrices", "params": [alone], "algorithm": "muon", "lr": 0.02, "momentum": 0.95}
    single = type(optimizer)([{**group, "weight_decay": 0.0, "adjust_lr_fn": "original"}], optimizer.algorithms)
    single.step()
    torch.testing.assert_close(updates[1], before[1] - alone.detach(), rtol=1e-3, atol=1e-5)
    lengths = torch.linalg.matrix_norm(updates)
    assert float(lengths.max() / lengths.min()) < 1.2


# ---- balance


def test_the_bias_moves_by_the_sign_of_the_missing_load() -> None:
    part = build(replace(BASE, num_experts=4, has_balance_bias=True, balance_bias_rate=0.5))
    bias = part.router.balance_bias
    assert bias is not None
    bias.data.zero_()
    holder = torch.nn.ModuleDict({"layer": part})
    update_balance_biases(holder, {"layer": torch.tensor([10.0, 2.0, 4.0, 4.0], dtype=torch.float64)})
    torch.testing.assert_close(bias.data, torch.tensor([-0.75, 0.25, 0.25, 0.25]))
    before = bias.detach().clone()
    update_balance_biases(holder, {"layer": torch.ones(4, dtype=torch.float64)})
    part.router.weight.requires_grad_(False)
    update_balance_biases(holder, {"layer": torch.arange(4, dtype=torch.float64)})
    assert torch.equal(bias.detach(), before)


def test_loads_are_found_among_the_figures_of_a_window() -> None:
    names = ["part.a.b.load_tokens.0", "part.a.b.load_tokens.1", "part.a.b.load_tokens.2", "part.c.load_tokens.0"]
    found = split_loads(["term.tokens", *names, "part.c.loss_sum"], torch.arange(6.0), prefix="part.")
    assert {name: load.tolist() for name, load in found.items()} == {"a.b": [1.0, 2.0, 3.0], "c": [4.0]}


@pytest.mark.parametrize(
    ("loads", "top_k", "is_collapsed"),
    [
        ([100] * 8, 2, False),
        ([400, 400, 0, 0, 0, 0, 0, 0], 2, True),
        ([400, 390, 10, 0, 0, 0, 0, 0], 2, True),
        ([300, 300, 100, 100, 0, 0, 0, 0], 2, False),
        ([4, 4, 0, 0, 0, 0, 0, 0], 2, False),  # too few tokens to judge
        ([400, 400], 2, False),  # every token sees all experts
        ([0] * 8, 2, False),
        ([100] * 9, 8, False),
    ],
)
def test_a_router_that_uses_hardly_more_than_top_k_experts_has_collapsed(
    loads: list[float], top_k: int, is_collapsed: bool
) -> None:
    assert LayerBalance(loads, 0.0, top_k).is_collapsed is is_collapsed


def test_imbalance_is_the_largest_load_over_the_mean() -> None:
    assert LayerBalance([30.0, 10.0, 10.0, 10.0], 0.0, 1).imbalance == 2.0


@pytest.mark.parametrize(
    ("is_frozen", "remedy"), [(False, "set has_balance_bias"), (True, "it is frozen, so that only")]
)
def test_a_collapse_names_the_layer_and_a_remedy_that_can_be_used(is_frozen: bool, remedy: str) -> None:
    text = str(LayerBalance([900.0, 0.0, 0.0, 0.0], 0.0, 1, is_frozen).describe_collapse("blocks.3.feed_forward", 7))
    assert text.startswith("the router of blocks.3.feed_forward has collapsed at step 7: of 4 experts only about 1.0")
    assert f"with top_k 1; {remedy}" in text


def test_rows_are_sorted_by_expert_and_then_by_token() -> None:
    order = sort_by_expert(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    assert order.choice_of_row.tolist() == [1, 2, 3, 5, 0, 4]
    assert order.counts.tolist() == [2, 2, 2, 0]
    assert order.row_of_choice.tolist() == [[4, 0], [1, 2], [5, 3]]


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0: it must be at least 1"),
        ({"top_k": 9}, "top_k is 9: it must be at most num_experts, 8"),
        ({"num_dense_layers": -1}, "num_dense_layers is -1: it must be at least 0"),
        ({"scores": "tanh"}, "scores is 'tanh': it must be 'softmax' or 'sigmoid'"),
        ({"has_shared_gate": True}, "has_shared_gate is true, but there is no shared expert: give shared_ffn_dim"),
        ({"num_groups": 3}, "num_experts 8 is not a multiple of num_groups 3"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups is 3: it must be at most num_groups, 2"),
        ({"num_groups": 4, "top_k": 3}, "top_k is 3: it must be at most the experts of top_groups 1, 2"),
        ({"z_loss": -1.0}, "z_loss is -1.0: it must be a finite number of at least 0"),
        ({"balance_loss": float("nan")}, "balance_loss is nan: it must be a finite number of at least 0"),
        ({"routed_scale": 0.0}, "routed_scale is 0.0: it must be a finite number above 0"),
        ({"balance_bias_rate": float("inf")}, "balance_bias_rate is inf: it must be a finite number above 0"),
        ({"num_dense_layers": 1}, "layer 0 is dense: give dense_ffn_dim"),
        ({"num_dense_layers": 3, "dense_ffn_dim": 8}, "none of 3 layers is a mixture: lower them"),
        ({"mixture_every": 2}, "layer 0 is dense: give dense_ffn_dim"),
    ],
)
def test_a_wrong_shape_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        decoder_config(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sums_of_rows_on_cpus_are_those_of_the_general_form() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(66, DIM, generator=generator), torch.rand(33, 2, generator=generator)
    index = torch.randperm(66, generator=generator).view(33, 2)
    for given in (weights, None):
        parts = [rows[index[:, k]] * (1.0 if given is None else given[:, k : k + 1]) for k in range(2)]
        assert largest(_sum_rows(rows, index, given) - (parts[0] + parts[1])) < 1e-6
        exact = _sum_rows(rows.double(), index, None if given is None else given.double())
        assert largest(_sum_rows(rows, index, given) - exact) < 1e-6
