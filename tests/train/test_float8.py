"""Training with float8 products, as the CPU emulates them: losses, ranks, resumes, checkpoints, and what is refused."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, IterableDataset

from genesis.base.errors import UserError
from genesis.data.window import AccumulationWindow, MicroBatch
from genesis.model import float8
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.delta import GatedDeltaConfig
from genesis.model.float8 import Float8Options, choose_layers, convert_layers
from genesis.model.mixture import MixtureConfig
from genesis.objectives import DPO, GSPO
from genesis.optim import AdamW
from genesis.strategies import Sharded
from genesis.strategies.float8_gather import gather_in_float8
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.train.support import COMPILE_SECONDS, TINY, build_strategy, build_trainer, loader, run_in_turn, whole
from tests.train.test_golden import KeepLosses
from tests.train.test_ladder import DECODER, KillAll, check_resumed, climb

CPU = torch.device("cpu")
STEPS = 20
BAND_NATS = 0.02
"""How far each of the first losses may be from that of bfloat16; measured are 0.009."""
LEARNED_NATS = 3.0
"""How much the losses fall at least, so that the band says something about learning."""


class Counting(IterableDataset[AccumulationWindow]):
    """Rows that count on from a random token: easy to learn, and no two rows alike."""

    def __iter__(self) -> Iterator[AccumulationWindow]:
        for step in range(STEPS):
            starts = torch.randint(TINY.vocab_size, (16, 1), generator=torch.Generator().manual_seed(step))
            rows = (starts + torch.arange(TINY.max_seq_len + 1)) % TINY.vocab_size
            micro_batch = MicroBatch(rows[:, :-1].clone(), rows[:, 1:].clone(), torch.zeros(16, 16, dtype=torch.int32))
            yield AccumulationWindow((micro_batch,), micro_batch.labels.numel(), micro_batch.labels.numel(), 16 * step)


def learn(precision: str, options: Float8Options | None) -> list[float]:
    """Returns the losses of each step."""
    keep = KeepLosses()
    trainer = build_trainer("auto", 1, STEPS, [keep], precision=precision, gradient_clip_val=1.0)
    module = GenesisModule(TINY, AdamW(lr=1e-2), float8=options)
    trainer.fit(module, *[DataLoader(Counting(), batch_size=None)] * 2)
    return keep.losses


def find_distance(losses: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(losses, others, strict=True))


@pytest.fixture(scope="module")
def bfloat16_losses() -> list[float]:
    return learn("bf16-mixed", None)


@pytest.mark.xdist_group("float8_losses")
@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("32-true", marks=pytest.mark.slow)])
def test_the_losses_of_float8_stay_in_a_band_of_bfloat16(precision: str, bfloat16_losses: list[float]) -> None:
    losses = learn(precision, Float8Options())
    assert losses[0] - losses[-1] > LEARNED_NATS
    assert 0.0 < find_distance(losses, bfloat16_losses) < BAND_NATS


@pytest.mark.xdist_group("float8_losses")
def test_scales_that_do_not_follow_from_the_tensors_leave_the_band(
    bfloat16_losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    float8.load_torchao()
    scaling = import_module("torchao.float8.float8_scaling_utils")
    monkeypatch.setattr(scaling, "tensor_to_scale", lambda tensor, *_: torch.full((), 0.25))
    assert find_distance(learn("bf16-mixed", Float8Options()), bfloat16_losses) > 2 * BAND_NATS


# ---- ranks and saves


def train(strategy: str, precision: str, options: Float8Options | None, max_steps: int) -> dict[str, Any]:
    """Trains on the windows of `tests.train.support`, in micro-batches of one row on any number of ranks."""
    world_size, keep = int(os.environ["WORLD_SIZE"]), KeepLosses()
    trainer = build_trainer(build_strategy(strategy), world_size, max_steps, [keep], precision=precision)
    module = GenesisModule(TINY, AdamW(lr=1e-3), float8=options)
    trainer.fit(module, loader(max_steps, int(os.environ["RANK"]), world_size))
    return {
        "loss": float(trainer.callback_metrics["train/loss"]),
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "names": list(module.state_dict()),
        "types": {type(whole(parameter)) for parameter in module.parameters()},
    }


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", "replicated", "hybrid"])
def test_ranks_compute_the_loss_of_one_process(strategy: str) -> None:
    fits = [("32-true", Float8Options(), 1), ("32-true", Float8Options(), 6)]
    (one,) = run_ranks(run_in_turn, 1, train, [("single", *fit) for fit in fits])
    for rank in run_ranks(run_in_turn, 2, train, [(strategy, *fit) for fit in fits]):
        assert rank[0]["loss"] == pytest.approx(one[0]["loss"], abs=2e-6)
        # Sums of gradients in another order change bits, and a few of them a float8 value.
        assert rank[1]["loss"] == pytest.approx(one[1]["loss"], abs=2e-3)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """Returns what two steps of one rank come to."""
    kinds = {
        "float8": ("single", "32-true", Float8Options(), 2),
        "sharded float8": ("full", "32-true", Float8Options(), 2),
        "sharded": ("full", "32-true", None, 2),
    }
    (found,) = run_ranks(run_in_turn, 1, train, list(kinds.values()))
    return dict(zip(kinds, found, strict=True))


@pytest.mark.slow
@pytest.mark.xdist_group("float8_alone")
def test_one_rank_that_shards_trains_the_bits_of_one_that_does_not(alone: dict[str, dict[str, Any]]) -> None:
    weights = alone["float8"]["weights"]
    assert all(torch.equal(value, alone["sharded float8"]["weights"][name]) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.xdist_group("float8_alone")
def test_checkpoints_see_the_same_tensors_with_float8_and_without(alone: dict[str, dict[str, Any]]) -> None:
    one, other = alone["sharded float8"], alone["sharded"]
    assert one["names"] == other["names"]
    assert one["types"] == other["types"] == {Tensor}
    assert _list_forms(one) == _list_forms(other)
    assert any(not torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())


def _list_forms(found: dict[str, Any]) -> dict[str, Any]:
    return {name: (value.shape, value.dtype) for name, value in found["weights"].items()}


def resume(directory: Path, corpus: Path, max_steps: int) -> dict[str, Tensor]:
    """Trains to `max_steps`, from the newest checkpoint in `directory` if there is one; returns the weights."""
    checkpoint = AsyncProcessCheckpoint(run_dir=directory, every_n_steps=2, mode="sync")
    trainer = build_trainer("auto", 1, max_steps, [TokenCounters(), checkpoint])
    module = GenesisModule(DECODER, AdamW(lr=1e-2), float8=Float8Options())
    data = CorpusDataModule(str(corpus), seq_len=16, micro_batch_size=2, global_batch_size=8)
    trainer.fit(module, data, ckpt_path=checkpoint.latest())
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_two_and_two_steps_are_bit_equal_to_four(tmp_path: Path, tiny_corpus: Path) -> None:
    straight = resume(tmp_path / "straight", tiny_corpus, 4)
    before = resume(tmp_path / "resumed", tiny_corpus, 2)
    after = resume(tmp_path / "resumed", tiny_corpus, 4)
    assert all(torch.equal(value, after[name]) for name, value in straight.items())
    assert not any(torch.equal(value, after[name]) for name, value in before.items() if value.ndim > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("float8_shards", 2), ("float8_experts", 2), ("float8_alone", 1)],
)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, tiny_corpus: Path, strategy: str, world_size: int) -> None:
    corpus, run_dir = str(tiny_corpus), str(tmp_path / "run")
    straight = run_ranks(climb, world_size, str(tmp_path / "straight"), corpus, strategy, "sync")
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(climb, world_size, run_dir, corpus, strategy, "process", KillAll())
    check_resumed(straight, run_ranks(climb, world_size, run_dir, corpus, strategy, "process"))


@pytest.mark.slow
def test_compiled_blocks_compute_the_loss_of_eager_ones() -> None:
    (eager,) = run_ranks(train, 1, "replicated", "32-true", Float8Options(), 2)
    (compiled,) = run_ranks(train, 1, "compiled", "32-true", Float8Options(), 2, timeout_seconds=COMPILE_SECONDS)
    assert compiled["loss"] == pytest.approx(eager["loss"], abs=1e-4)


# ---- gathers


def gather(num_rows: int) -> list[dict[str, Any]]:
    """Returns what a layer of so many rows computes with, in two forwards, before and after a change of its weight."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (world_size,))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, num_rows, bias=False))
    torchao = float8.load_torchao()
    torchao.convert_to_float8_training(model, config=torchao.Float8LinearConfig(emulate=True))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.to_empty(device="cpu")
    gather_in_float8(model, mesh)
    weight = torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(0))
    own = torch.chunk(weight, world_size)[rank] if rank < len(torch.chunk(weight, world_size)) else weight[:0]
    seen: list[dict[str, Any]] = []
    model[0].register_forward_hook(lambda module, *_: seen.append(_describe(module.weight)))
    inputs = torch.ones(16, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        for factor in (1.0, 8.0):
            model[0].weight.to_local().copy_(factor * own)
            model(inputs)
            model.reshard()  # type: ignore[operator]  # FSDP2's
    return seen


def _describe(weight: Any) -> dict[str, Any]:
    return {"scale": float(weight._scale), "values": weight._data.float().tolist(), "dtype": str(weight._data.dtype)}


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])  # 16 rows are 6, 6 and 4
def test_shards_are_gathered_in_float8_with_the_scale_of_the_whole_weight(world_size: int) -> None:
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    most = torch.finfo(torch.float8_e4m3fn).max
    for seen in run_ranks(gather, world_size, 16):
        for factor, found in zip((1.0, 8.0), seen, strict=True):
            scale = most / float((factor * weight).abs().max())
            assert found["dtype"] == "torch.float8_e4m3fn"
            assert found["scale"] == pytest.approx(scale, rel=1e-6)
            expected = (factor * weight * found["scale"]).clamp(-most, most).to(torch.float8_e4m3fn)
            assert torch.equal(torch.tensor(found["values"]), expected.float())


# ---- a gradient that is not finite


class BreakWeight(pl.Callback):
    """Makes one weight infinite before a step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        assert isinstance(pl_module, GenesisModule)
        assert pl_module.decoder is not None
        with torch.no_grad():
            pl_module.decoder.blocks[0].attention.query.weight[0, 0] = math.inf


def test_a_value_that_is_not_finite_skips_the_window() -> None:
    trainer = build_trainer("auto", 1, 1, [BreakWeight()])
    module = GenesisModule(TINY, AdamW(), float8=Float8Options())
    trainer.fit(module, *[DataLoader(Counting(), batch_size=None)] * 2)
    assert module.skip_reason == "nonfinite_gradient"


# ---- layers


def build(decoder: DecoderConfig = TINY) -> Decoder:
    with torch.device("meta"):
        return Decoder(decoder)


def test_all_linear_layers_of_the_blocks_are_converted_and_nothing_else() -> None:
    decoder = build(replace(TINY, has_tied_embeddings=False))
    names = [name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)]
    choice = choose_layers(decoder, Float8Options())
    assert sorted(choice.layers) == sorted(name for name in names if name != "output")
    assert choice.describe() == "float8: 14 linear layers"
    before = dict(decoder.named_parameters())
    convert_layers(decoder, choice, CPU)
    assert list(float8.find_float8_layers(decoder)) == list(choice.layers)
    assert dict(decoder.named_parameters()) == before
    assert all(parameter is before[name] for name, parameter in decoder.named_parameters())


def test_patterns_narrow_the_layers() -> None:
    options = Float8Options(include=("*.feed_forward.*", "*.query"), exclude=("blocks.1.*", "*.up"))
    assert list(choose_layers(build(), options).layers) == [
        f"blocks.0.{name}" for name in ("attention.query", "feed_forward.gate", "feed_forward.down")
    ]


def test_what_is_left_out_is_counted_and_named() -> None:
    linear = GatedDeltaConfig(num_key_heads=4, num_value_heads=16, key_dim=8, value_dim=8)
    decoder = replace(TINY, ffn_dim=40, linear_attention=linear, num_layers=4)
    line = choose_layers(build(decoder), Float8Options()).describe()
    assert "float8: 13 linear layers" in line
    assert (
        "12 have a width that is no multiple of 16 and keep the precision of the run: blocks.0.feed_forward.gate"
        in line
    )
    assert (
        "6 need more digits than float8 has and keep the precision of the run: blocks.0.linear_attention.beta" in line
    )
    mixture = replace(
        TINY, ffn_dim=None, feed_forward=MixtureConfig(num_experts=4, top_k=2, ffn_dim=16, shared_ffn_dim=16)
    )
    choice = choose_layers(build(mixture), Float8Options())
    assert "are stacks of routed experts" in choice.describe()
    assert "blocks.0.feed_forward.shared.gate" in choice.layers
    assert not any("router" in name for name in choice.layers)


# ---- refusals


def refuse(match: str, **changes: Any) -> None:
    options = {"strategy": "auto", "module": {}, **changes}
    trainer = build_trainer(options["strategy"], 1, 1, [])
    arguments = {"decoder": TINY, "float8": Float8Options(), **options["module"]}
    with pytest.raises(UserError, match=match):
        trainer.fit(GenesisModule(**arguments), *[DataLoader(Counting(), batch_size=None)] * 2)


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        (r"model.float8 and model.adapter are both given", {"module": {"adapter": AdapterConfig()}}),
        (r"DPO compares probabilities of two forwards", {"module": {"objective": DPO()}}),
        (r"GSPO compares probabilities of two forwards", {"module": {"objective": GSPO()}}),
        (
            r"model.float8.include has '\*.experts', which matches no linear layer",
            {"module": {"float8": Float8Options(include=("*.experts",))}},
        ),
        (
            r"model.float8 converts no layer .*2 have a width",
            {
                "module": {
                    "decoder": replace(TINY, ffn_dim=40),
                    "float8": Float8Options(include=("*.down",)),
                }
            },
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(match: str, changes: dict[str, Any]) -> None:
    refuse(match, **changes)


def refuse_offload() -> None:
    refuse(r"trainer.strategy.cpu_offload is 0.5: .*set cpu_offload to 0", strategy=Sharded(cpu_offload=0.5))


def test_weights_in_the_hosts_memory_are_refused_by_name() -> None:
    run_ranks(refuse_offload, 1)


def test_float8_without_torchao_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "PACKAGE", "torchao-that-is-not-there")
    refuse(r"torchao is not installed: pip install 'genesis-lm\[float8\]'")


@pytest.mark.parametrize("value", [(), [1], "*"])
def test_patterns_that_are_no_list_of_texts_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"model.float8.include is"):
        Float8Options(include=value)
