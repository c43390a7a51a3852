"""Moments of 8 bits: the formula, whole blocks on every rank, what stays in float32, bytes, refusals, losses."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from genesis.base.errors import UserError
from genesis.model.adapter import AdapterConfig, attach_adapters
from genesis.model.compilation import compile_each_shape
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.nf4 import build_dynamic_code
from genesis.model.part import MATRICES
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.run_options import RunOptions, check_tensor_share
from genesis.optim import AdamW, AdamW8bit, Algorithm, GroupedOptimizer, Muon, build_optimizer
from genesis.optim import adamw8bit as module
from genesis.optim.build import count_moment_bytes
from genesis.strategies import Replicated, Sharded
from genesis.train.module import GenesisModule

CONFIG = DecoderConfig(
    vocab_size=64, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=72, max_seq_len=64,
    has_tied_embeddings=False,
)  # fmt: skip


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(weight: Tensor, algorithm: Algorithm) -> tuple[nn.Parameter, GroupedOptimizer]:
    parameter = nn.Parameter(weight.clone())
    options = algorithm.group_options(MATRICES, has_adapters=False)
    group = {"name": "matrices", "params": [parameter], "algorithm": algorithm.name, **options}
    return parameter, GroupedOptimizer([group], {algorithm.name: algorithm})


def decode(codes: Tensor, scales: Tensor, block: int, *, is_signed: bool) -> Tensor:
    """Returns values row by row, as the format's description has them."""
    values = torch.tensor(build_dynamic_code(is_signed=is_signed))
    rows = [
        [values[code] * scales[row, column // block] for column, code in enumerate(codes[row].tolist())]
        for row in range(len(codes))
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize("width", [32, 40, 7])
def test_an_update_is_adamws_from_the_decoded_moments_and_stores_the_nearest_codes(width: int) -> None:
    """The reference decodes element by element, and updates by the formula of the paper in float64."""
    algorithm = AdamW8bit(lr=1e-2, block=16)
    parameter, optimizer = build(draw(3, width), algorithm)
    for step in range(1, 4):
        state = copy.deepcopy(optimizer.state[parameter])
        gradient = draw(3, width, seed=step) * torch.logspace(-6, 0, width)
        before = parameter.detach().double()
        parameter.grad = gradient.clone()
        optimizer.step()
        average, root = torch.zeros(3, width), torch.zeros(3, width)
        if state:
            average = decode(state["average"], state["average_scale"], 16, is_signed=True)
            root = decode(state["root"], state["root_scale"], 16, is_signed=False)
        average = 0.9 * average.double() + 0.1 * gradient.double()
        root = (0.95 * root.double().square() + 0.05 * gradient.double().square()).sqrt()
        direction = average / (1 - 0.9**step) / (root / (1 - 0.95**step) ** 0.5 + 1e-8)
        torch.testing.assert_close(
            parameter.detach().double(), before * (1 - 1e-2 * 0.1) - 1e-2 * direction, rtol=1e-5, atol=1e-7
        )
        now = optimizer.state[parameter]
        assert now["step"] == step
        for name, exact, is_signed in (("average", average, True), ("root", root, False)):
            assert now[f"{name}_scale"].shape == (3, -(-width // 16))
            values = torch.tensor(build_dynamic_code(is_signed=is_signed))
            widest = torch.diff(values).max() / 2 * now[f"{name}_scale"].max()
            stored = decode(now[name], now[f"{name}_scale"], 16, is_signed=is_signed)
            assert (stored - exact).abs().max() <= 1.01 * widest
        assert bool((now["root"] > 0).all()), "a root that is lost would divide by 0"


def test_a_gradient_of_zeros_leaves_codes_of_zero_and_only_decays_the_weight() -> None:
    parameter, optimizer = build(torch.ones(2, 20), AdamW8bit(lr=0.5, block=16))
    parameter.grad = torch.zeros(2, 20)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((2, 20), 0.95))
    values = torch.tensor(build_dynamic_code())
    assert not values[optimizer.state[parameter]["average"].int()].any()
    assert not optimizer.state[parameter]["root"].any()


@pytest.mark.parametrize("cut", [(slice(0, 3), slice(3, 8)), (slice(0, 7), slice(7, 8))])
@pytest.mark.parametrize("width", [32, 40])
def test_rows_get_the_same_bits_wherever_a_matrix_is_cut(cut: tuple[slice, ...], width: int) -> None:
    weight, algorithm = draw(8, width), AdamW8bit(block=16)
    whole, *parts = [build(weight[rows], algorithm) for rows in (slice(None), *cut)]
    for step in range(3):
        gradient = draw(8, width, seed=step)
        for (parameter, optimizer), rows in zip((whole, *parts), (slice(None), *cut), strict=True):
            parameter.grad = gradient[rows].clone()
            optimizer.step()
    for key in ("average", "average_scale", "root", "root_scale"):
        joined = torch.cat([optimizer.state[parameter][key] for parameter, optimizer in parts])
        assert torch.equal(joined, whole[1].state[whole[0]][key])
    assert torch.equal(torch.cat([parameter for parameter, _ in parts]), whole[0])


def test_slices_of_rows_that_bound_the_memory_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (1 << 20, 64):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        parameter, optimizer = build(draw(4, 8, 40), AdamW8bit(block=16))
        parameter.grad = draw(4, 8, 40, seed=1)
        optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("algorithm", [AdamW8bit(block=16), Muon(others=AdamW8bit(block=16))], ids=["all", "others"])
def test_norms_embeddings_and_adapters_keep_float32(algorithm: Algorithm) -> None:
    decoder = Decoder(CONFIG)
    named = {group["name"]: group["algorithm"] for group in build_optimizer(decoder, algorithm).param_groups}
    of_matrices = "adamw8bit" if isinstance(algorithm, AdamW8bit) else "muon"
    assert named == {"matrices": of_matrices, "head": "adamw8bit", "embeddings": "adamw", "vectors": "adamw"}
    attach_adapters(decoder, AdapterConfig(rank=2))
    adapters = {group["algorithm"] for group in build_optimizer(decoder, algorithm).param_groups}
    assert adapters == {"adamw" if isinstance(algorithm, AdamW8bit) else "muon"}


def test_described_bytes_are_those_of_the_states() -> None:
    decoder, algorithm = Decoder(CONFIG), AdamW8bit(block=16)
    optimizer = build_optimizer(decoder, algorithm)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(tensor.nbytes for state in optimizer.state.values() for key, tensor in state.items() if key != "step")
    assert held == count_moment_bytes(decoder, algorithm)
    assert held < 0.45 * count_moment_bytes(decoder, AdamW())


# ---- refusals


def test_columns_that_ranks_cannot_cut_into_whole_blocks_are_refused_with_the_degree_that_can() -> None:
    run = RunOptions(CONFIG, CrossEntropy, row_block=16)
    with pytest.raises(UserError, match=r"share the 72 columns of a matrix of Linear in blocks of 16 .*: set it to 1$"):
        check_tensor_share(run, 2, 4)
    check_tensor_share(RunOptions(CONFIG, CrossEntropy, row_block=18), 1, 4)
    check_tensor_share(RunOptions(CONFIG, CrossEntropy), 2, 4)


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"optimizer_offload": 0.5}])
def test_beside_adapters_whose_moments_are_float32_nothing_is_refused(options: dict[str, Any]) -> None:
    decoder = replace(CONFIG, vocab_size=64)
    strategy: Any = Sharded(**options)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    GenesisModule(decoder, AdamW8bit(block=16), adapter=AdapterConfig(rank=2)).check_strategy(
        None, strategy, is_training=True
    )
    for adapter in (None, AdapterConfig(rank=2, also_train=("head",))):  # the output weight has such moments
        with pytest.raises(UserError, match=r"in blocks of 16|moments of 8 bits"):
            GenesisModule(decoder, AdamW8bit(block=16), adapter=adapter).check_strategy(
                None, strategy, is_training=True
            )


@pytest.mark.parametrize("strategy", [Replicated(optimizer_offload=0.5), Sharded(optimizer_offload=0.5)])
def test_an_offload_of_the_states_is_refused(strategy: Any) -> None:
    with pytest.raises(UserError, match=r"optimizer_offload is 0\.5, and model\.optimizer has moments of 8 bits"):
        strategy.check_options(RunOptions(CONFIG, CrossEntropy, row_block=128))


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (AdamW(), "the algorithm adamw, and this run has the algorithm adamw8bit:"),
        (AdamW8bit(block=32), "the block 32, and this run has the block 16:"),
    ],
)
def test_states_of_another_optimizer_are_refused_by_name_before_the_first_update(saved: Algorithm, words: str) -> None:
    parameter, optimizer = build(draw(2, 40), AdamW8bit(block=16))
    _, other = build(draw(2, 40), saved)
    # As a restore does: the saved options replace those of the group.
    for group, before in zip(optimizer.param_groups, other.param_groups, strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})
    parameter.grad = torch.ones(2, 40)
    with pytest.raises(UserError, match=f"the states of matrices were saved with {words}"):
        optimizer.step()


def test_a_block_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer\.block is 8: it must be at least 16, such as 128"):
        AdamW8bit(block=8)


# ---- long ones


def read_source(num_tokens: int) -> Tensor:
    """Returns a text whose next token depends on the last one."""
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(64, 64, generator=generator).pow(8)
    ends = (table / table.sum(-1, keepdim=True)).cumsum(-1)
    found = [0]
    for point in torch.rand(num_tokens - 1, generator=generator):
        found.append(min(63, int(torch.searchsorted(ends[found[-1]], point))))
    return torch.tensor(found)


def train(algorithm: Algorithm, text: Tensor, num_steps: int) -> Tensor:
    """Returns the loss of each step, after a warm-up of 20."""
    decoder = Decoder(CONFIG)
    decoder.init_weights(0)
    optimizer, generator, losses = build_optimizer(decoder, algorithm), torch.Generator().manual_seed(5), []
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = algorithm.lr * min(1.0, (step + 1) / 20)
        rows = torch.stack([text[at : at + 17] for at in torch.randint(len(text) - 17, (8,), generator=generator)])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(decoder(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses)


@pytest.mark.slow
@pytest.mark.parametrize("second", [0.95, 0.999])
def test_losses_stay_within_half_a_percent_of_those_of_float32(second: float) -> None:
    text = read_source(4_000)
    exact, ours = (
        train(kind(lr=3e-3, betas=(0.9, second)), text, 60).unfold(0, 20, 20).mean(1) for kind in (AdamW, AdamW8bit)
    )
    assert exact[-1] < 0.9 * exact[0], "it learns"
    assert float((ours / exact - 1).abs().max()) < 0.005
    assert not torch.equal(ours, exact)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 256), (6, 300), (2, 4, 300)])
def test_the_compiled_update_is_one_graph_with_the_eager_ones_results(shape: tuple[int, ...]) -> None:
    compiled = compile_each_shape(module.update_rows, fullgraph=True)
    algorithm = AdamW8bit()
    options = algorithm.update_options()
    fixed = (options["betas"], options["eps"], 0.1, options["block"])
    found = []
    for update in (module.update_rows, compiled):
        parameter, optimizer = build(draw(*shape), algorithm)
        parameter.grad = torch.zeros(shape)
        optimizer.step()  # makes the states
        state = optimizer.state[parameter]
        for step in range(3):
            state["step"] += 1
            moments = (state[name] for name in algorithm.moments)
            rate, codes = torch.tensor(1e-3 * (step + 1)), module._list_codes(torch.device("cpu"))
            update(parameter.data, draw(*shape, seed=step), *moments, state["step"], rate, *codes, *fixed)
        found.append({"weight": parameter.detach(), **state})
    for name, tensor in found[0].items():
        # The compiler divides by a product; a value between two codes may then get the other one.
        torch.testing.assert_close(
            found[1][name].float(), tensor.float(), rtol=1e-5, atol=1.0 * (tensor.dtype == torch.uint8) or 1e-6
        )
