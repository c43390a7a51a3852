"""Tensor parallelism: every gradient is that of one process, no collective is hidden, and what fails is refused."""

import csv
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from genesis.base.errors import UserError
from genesis.model.adapter import AdapterConfig
from genesis.model.attention import AttentionConfig, RopeScaling
from genesis.model.decoder import Decoder, DecoderConfig, Scales
from genesis.model.delta import GatedDeltaConfig
from genesis.model.feed_forward import Dense, DenseConfig
from genesis.model.initial import fill_normal
from genesis.model.latent import LatentAttentionConfig as LatentsConfig
from genesis.model.loss import IGNORE_INDEX, token_losses
from genesis.model.mixture import MixtureConfig
from genesis.model.norm import NormConfig
from genesis.model.part import Statistics
from genesis.model.shares import share_matrices
from genesis.objectives import CrossEntropy
from genesis.objectives.run_options import RunOptions, check_tensor_share
from genesis.strategies import Sharded, tensor_parallel
from genesis.strategies.cut_vocabulary import CutVocabulary
from genesis.strategies.degrees import Degrees
from genesis.strategies.layout import ParallelLayout
from genesis.strategies.mesh import WorldMesh
from genesis.strategies.tensor_parallel import MatrixCutter, RowShare
from genesis.train.module import GenesisModule
from genesis.train.training_log import WindowFigures
from genesis_callbacks.host_group import HostGroup
from genesis_callbacks.testing import run_ranks
from tests.algorithms import algorithm_of
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import run_genesis
from tests.model.latent_attention import LatentAttentionConfig
from tests.outside.kto import KTO
from tests.train.support import COMPILE_SECONDS, TINY, KeepGradients, build_trainer, loader, run_in_turn

DENSE = replace(TINY, vocab_size=64)
LORA = AdapterConfig(rank=4, alpha=8.0)
DORA = AdapterConfig(rank=4, alpha=8.0, dora=True)


def with_attention(num_kv_heads: int = 2, **options: Any) -> DecoderConfig:
    attention = AttentionConfig(4, num_kv_heads, 1e4, **options)
    return replace(DENSE, num_heads=None, num_kv_heads=None, attention=attention)


def with_experts(**options: Any) -> DecoderConfig:
    mixture = MixtureConfig(4, 2, 24, shared_ffn_dim=16, z_loss=1e-3, **options)
    return replace(DENSE, ffn_dim=None, feed_forward=mixture)


SCALED = replace(
    with_attention(
        **{"qk_norm": "head", "has_interleaved_rope": True, "softmax_scale": 0.3, "query_growth": 0.2},
        **{"sliding_window": 3, "window_layers": (1,), "window_rope_theta": 77.0},
        rope_scaling=RopeScaling(2.0, original_seq_len=4, kind="dynamic"),
    ),
    norm=NormConfig(1e-5, "both", has_offset=True),
    ffn_dim=None,
    feed_forward=DenseConfig(48, "gelu_tanh"),
    scales=Scales(3.0, 0.5, 0.5),
)
DELTA = replace(with_attention(), linear_attention=GatedDeltaConfig(2, 4, 8, 8, attention_every=2))
LATENTS = replace(
    with_experts(), num_heads=None, num_kv_heads=None, mixers=(LatentsConfig(4, 16, 8, 4, 10, query_latent_dim=12),)
)

Case = tuple[DecoderConfig, AdapterConfig | None, dict[str, Any]]
CASES: dict[str, Case] = {
    "tied": (DENSE, None, {}),
    "untied": (replace(DENSE, has_tied_embeddings=False), None, {"activation_checkpointing": "block"}),
    "biases, norms of heads and a window": (
        with_attention(has_qkv_bias=True, qk_norm="head", sliding_window=3),
        None,
        {"shard": "grad_op"},
    ),
    "norms of projections, and norms after": (
        replace(with_attention(4, qk_norm="projection"), norm=NormConfig(1e-5, "after")),
        None,
        {"gradient_reduction": "micro_batch"},
    ),
    "gates and offsets": (
        replace(with_attention(has_output_gate=True, qk_norm="head"), norm=NormConfig(1e-5, has_offset=True)),
        None,
        {"keep_gathered": True, "blocks_per_unit": 2},
    ),
    "scales, and positions by layer": (SCALED, None, {}),
    "one key head": (with_attention(1, has_qkv_bias=True), None, {"cpu_offload": 0.5}),
    "sinks, and a bias of the output": (
        with_attention(1, has_qkv_bias=True, has_output_bias=True, has_sinks=True, sliding_window=3),
        None,
        {},
    ),
    "experts with biases": (with_experts(has_biases=True, gate_limit=0.3), None, {"expert_parallel": 2}),
    "delta layers": (DELTA, None, {}),
    "latents": (LATENTS, None, {}),
    "adapters of latents": (LATENTS, LORA, {"activation_checkpointing": "block"}),
    "experts": (with_experts(balance_loss=0.01), None, {}),
    "shared experts": (with_experts(balance_loss=0.01), None, {"expert_parallel": 2}),
    "adapters": (with_attention(1, has_qkv_bias=True), LORA, {}),
    "adapters of delta layers": (DELTA, LORA, {}),
    "scaled adapters": (with_attention(1, has_qkv_bias=True), DORA, {}),
    "scaled adapters of delta layers": (DELTA, DORA, {"activation_checkpointing": "block"}),
    "offload and groups": (
        DENSE,
        None,
        {
            "activation_checkpointing": "block",
            "blocks_per_recomputation": 2,
            "activation_offload": True,
            "optimizer_offload": 0.6,
        },
    ),
}
COMPILED: Case = (
    replace(DENSE, has_tied_embeddings=False),
    None,
    {"compile_blocks": True, "activation_checkpointing": "block"},
)
Found = tuple[dict[str, Tensor], dict[str, float]]


class FillAdapters(pl.Callback):
    """Gives adapters values with which every tensor of theirs has a gradient."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with torch.no_grad():
            for name, parameter in pl_module.named_parameters():
                if name.endswith("lora_B"):
                    fill_normal(parameter, 0.02, name)


def first_gradients(case: Case, tensor_ranks: int, build: Callable[..., Any] = Sharded) -> Found:
    decoder, adapter, options = case
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keep = KeepGradients()
    strategy: Any = build(tensor_parallel=tensor_ranks, **options) if world_size > 1 else "auto"
    trainer = build_trainer(strategy, world_size, 1, [keep, FillAdapters()], gradient_clip_val=0.0)
    module = GenesisModule(decoder, algorithm_of(name="adamw", lr=1e-2), adapter=adapter)
    trainer.fit(module, loader(1, rank // tensor_ranks, world_size // tensor_ranks))
    names = ("loss", "grad_norm", "valid_tokens")
    return keep.gradients, {name: float(trainer.callback_metrics[f"train/{name}"]) for name in names}


def find_worst(found: Found, wanted: Found) -> tuple[float, str]:
    """Returns the largest difference relative to the largest element of a gradient, and the gradient's name."""
    assert found[0].keys() == wanted[0].keys()
    of_each = {name: (found[0][name] - one).abs().max() / one.abs().max() for name, one in wanted[0].items()}
    return max((float(value), name) for name, value in of_each.items())


@pytest.fixture(scope="module")
def wanted() -> dict[str, Found]:
    """What one process computes on the whole batch."""
    (found,) = run_ranks(run_in_turn, 1, first_gradients, [(case, 1) for case in CASES.values()])
    return dict(zip(CASES, found, strict=True))


def list_cases(tensor_ranks: int) -> list[str]:
    return [name for name, case in CASES.items() if tensor_ranks == 2 or case[0].linear_attention is None]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "tensor_ranks"), [(2, 2), (4, 2), (4, 4)])
def test_every_gradient_is_that_of_one_process(wanted: dict[str, Found], world_size: int, tensor_ranks: int) -> None:
    names = list_cases(tensor_ranks)
    arguments = [(CASES[name], tensor_ranks) for name in names]
    wrong = []
    for of_rank in run_ranks(run_in_turn, world_size, first_gradients, arguments, timeout_seconds=COMPILE_SECONDS):
        for name, found in zip(names, of_rank, strict=True):
            worst, where = find_worst(found, wanted[name])
            assert found[1] == pytest.approx(wanted[name][1], rel=2e-6), name
            if worst > (1e-5 if CASES[name][0].linear_attention else 2e-6):
                wrong.append(f"{name}: {where} is off by {worst:.1e}")
    assert not wrong


@dataclass(frozen=True)
class MeasuredConfig(DenseConfig):
    def build(self, dim: int, layer: int) -> Dense:
        return Measured(dim, self.ffn_dim)


class Measured(Dense):
    """A part that is cut, and measures its hidden units: each rank has some of them, for the tokens of whole rows."""

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Statistics | None]:
        hidden = torch.nn.functional.silu(self.gate(x)) * self.up(x)
        if counted is None:
            return self.down(hidden), None
        of_tokens = hidden.float().square().sum(-1) * counted
        positive = ((hidden > 0).sum(-1) * counted).sum()
        return self.down(hidden), Statistics({"positive_units": positive}, 0.1 * of_tokens.sum())


MEASURED: Case = (replace(DENSE, ffn_dim=None, feed_forward=MeasuredConfig(48)), None, {})


def measure(tensor_ranks: int) -> tuple[Found, dict[str, float]]:
    """Returns the first gradients, and what the parts have counted in the first window."""
    windows: list[dict[str, float]] = []

    def keep(names: list[str], sums: list[float], **others: Any) -> WindowFigures:
        windows.append({name: value for name, value in zip(names, sums, strict=True) if "positive_units" in name})
        return build(names, sums, **others)

    build = WindowFigures.of
    with mock.patch.object(WindowFigures, "of", keep):
        found = first_gradients(MEASURED, tensor_ranks)
    return found, windows[0]


@pytest.mark.slow
def test_a_part_that_is_cut_has_the_statistics_and_the_loss_of_one_process() -> None:
    ((expected, counts),) = run_ranks(measure, 1, 1)
    assert len(counts) == DENSE.num_layers
    for found, own in run_ranks(measure, 2, 2):
        assert find_worst(found, expected)[0] <= 2e-6
        assert own == counts


HYBRID: Case = (DENSE, None, {"shard": "hybrid", "ranks_per_shard_group": 2})


@pytest.mark.slow
def test_gradients_of_copies_that_each_share_their_matrices_are_those_of_one_process(
    wanted: dict[str, Found],
) -> None:
    for found in run_ranks(first_gradients, 4, HYBRID, 2):
        assert find_worst(found, wanted["tied"])[0] <= 2e-6


@contextmanager
def by_aot_eager() -> Iterator[None]:
    """Compiles without the code of inductor, which takes most of the time."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        yield


def compiled_gradients(waits: bool) -> Found:
    with ExitStack() as stack:
        stack.enter_context(by_aot_eager())
        if waits:
            return first_gradients(COMPILED, 2)
        stack.enter_context(mock.patch.object(tensor_parallel, "_wait", lambda pending: pending))
        # Without recomputation, in which a wait within a graph may keep Python's lock for ever.
        return first_gradients((COMPILED[0], None, {"compile_blocks": True}), 2)


@pytest.mark.slow
def test_compiled_blocks_have_the_gradients_of_one_process_because_collectives_are_waited_for(
    wanted: dict[str, Found],
) -> None:
    arguments = [(True,), (False,)]
    for waiting, without in run_ranks(run_in_turn, 2, compiled_gradients, arguments, timeout_seconds=COMPILE_SECONDS):
        assert find_worst(waiting, wanted["untied"])[0] <= 2e-6
        assert find_worst(without, wanted["untied"]) == (pytest.approx(1.0), "decoder.embedding.weight")


# ---- what the step must not do, planted


class CountingTwice(Sharded):
    """Sums the counts of rows over ranks that read the same ones."""

    def _lay_out(self, degrees: Degrees, mesh: WorldMesh) -> ParallelLayout:
        return replace(super()._lay_out(degrees, mesh), token_group=HostGroup())


def planted_gradients(case: Case, fault: str) -> Found:
    if fault == "counts":
        return first_gradients(case, 2, CountingTwice)
    if fault == "average":  # of FSDP2, over the ranks that shard what is not cut
        with mock.patch.object(FSDPModule, "set_gradient_divide_factor"):
            return first_gradients(case, 2)
    with mock.patch.object(RowShare, "sum_over_row", lambda _, counts: counts):
        return first_gradients(case, 2)


@pytest.mark.slow
@pytest.mark.repeat  # it proves the tests above
def test_the_faults_that_would_be_silent_change_gradients(wanted: dict[str, Found]) -> None:
    arguments = [(CASES["tied"], "counts"), (CASES["experts"], "rows of routers"), (CASES["tied"], "average")]
    for counted, routed, averaged in run_ranks(run_in_turn, 2, planted_gradients, arguments):
        for name, gradient in wanted["tied"][0].items():
            torch.testing.assert_close(counted[0][name], gradient / 2, rtol=1e-4, atol=1e-7)
        worst, where = find_worst(routed, wanted["experts"])
        assert worst > 0.02
        assert where.endswith("router.weight")
        norm, cut = "decoder.norm.weight", "decoder.embedding.weight"
        torch.testing.assert_close(averaged[0][norm], wanted["tied"][0][norm] / 2, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(averaged[0][cut], wanted["tied"][0][cut], rtol=1e-4, atol=1e-7)


class KeepMask(pl.Callback):
    """Keeps which elements the first dropout leaves out."""

    mask: Tensor

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        dropout = next(iter(pl_module.decoder.numbered_blocks.values())).dropout
        dropout.register_forward_hook(lambda module, given, out: setattr(self, "mask", out == 0.0))


def draw_mask(by_data_rank: bool) -> Tensor:
    with ExitStack() as stack:
        if by_data_rank:
            stack.enter_context(mock.patch.object(Degrees, "seed_place", lambda self, rank: (self.data_rank(rank),)))
        keep = KeepMask()
        trainer = build_trainer(Sharded(tensor_parallel=2), 2, 1, [keep])
        trainer.fit(GenesisModule(replace(DENSE, dropout=0.5), algorithm_of(name="adamw", lr=1e-2)), loader(1, 0, 1))
    return keep.mask


@pytest.mark.slow
def test_ranks_with_other_tokens_of_the_same_rows_draw_other_masks_of_dropout() -> None:
    (own, alike), (other, other_alike) = run_ranks(run_in_turn, 2, draw_mask, [(False,), (True,)])
    assert 0.4 < own.float().mean() < 0.6
    assert 0.4 < (own == other).float().mean() < 0.6
    assert torch.equal(alike, other_alike), "the seed of the data rank alone, planted"


# ---- whole runs


ALLOWED = ("--checkpoint.allow_changed", '["trainer.max_steps"]')


def train(corpus: Path, run: Path, max_steps: int, ranks: int) -> dict[tuple[str, int], float]:
    """Trains by the command line on one process, or on pairs of ranks that share matrices; returns the log."""
    changes: dict[str, Any] = {"trainer.max_steps": max_steps, "model.decoder.num_layers": 2}
    if ranks > 1:
        options = {"tensor_parallel": 2, "activation_checkpointing": "block"}
        changes |= {
            "trainer.devices": ranks,
            "trainer.strategy": {"class_path": "genesis.strategies.Sharded", "init_args": options},
        }
    recipe = write_recipe(run.with_suffix(".yaml"), build_recipe(corpus, run), changes)
    done = run_genesis("fit", "--config", recipe, "--ckpt_path", "latest", *ALLOWED, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    keys = ("train/loss", "train/grad_norm", "train/valid_tokens", "counters/tokens_seen", "validation/loss")
    with (run / "metrics.csv").open() as file:
        return {(key, int(row["step"])): float(row[key]) for row in csv.DictReader(file) for key in keys if row[key]}


@pytest.mark.slow
@pytest.mark.process
def test_a_run_on_pairs_of_ranks_logs_what_one_process_does_and_goes_on_there(
    tmp_path: Path, tiny_corpus: Path
) -> None:
    alone = train(tiny_corpus, tmp_path / "alone", 6, 1)
    shared = train(tiny_corpus, tmp_path / "shared", 4, 4)
    assert shared == pytest.approx({key: value for key, value in alone.items() if key[1] <= 4}, rel=2e-4)
    # The checkpoint of the pairs, read by one process.
    assert train(tiny_corpus, tmp_path / "shared", 6, 1) == pytest.approx(alone, rel=2e-4)


# ---- collectives and memory of a forward and a backward


class Recorder(TorchDispatchMode):
    """Counts collectives, and keeps the largest number of elements of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not isinstance(out, DTensor):  # whose parts are counted alone
            self.largest = max(self.largest, out.numel())
            name = func.name()
            if name.startswith("_c10d_functional::") and not name.endswith(("wait_tensor", "_autograd")):
                self.collectives.append((name.partition("::")[2], out.numel()))
        return out


WIDE = replace(DENSE, vocab_size=512, num_layers=3)


def count_collectives() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole, cut = Decoder(WIDE), Decoder(WIDE)
    share = RowShare(mesh.get_group())
    share_matrices(cut, share, MatrixCutter(mesh))
    for decoder in (whole, cut):
        decoder.init_weights(0)
    ids = torch.randint(512, (1, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(1).masked_fill(torch.arange(16) % 5 == 0, IGNORE_INDEX)
    factors = torch.rand(16, generator=torch.Generator().manual_seed(1))
    vocabulary = CutVocabulary(share)
    recorders = [Recorder(), Recorder(), Recorder()]
    with recorders[0]:
        hidden = cut(ids, head=lambda hidden, weight: hidden)
    with recorders[1]:
        losses = vocabulary.token_losses(hidden, cut.output_weight, labels)
    with recorders[2]:
        (losses * factors).sum().backward()
    with Recorder() as alone:
        wanted = whole(ids, head=partial(token_losses, labels=labels))
    (wanted * factors).sum().backward()
    gradient = torch.cat([part.grad.to_local() for part in (cut.embedding.weight,)])  # type: ignore[union-attr]
    rows = whole.embedding.weight.grad
    assert rows is not None
    torch.testing.assert_close(losses, wanted)
    # Under FSDP2 the parts of ranks are added; the embedding is cut, so that each rank has its rows' own gradient.
    torch.testing.assert_close(gradient, rows.chunk(2)[dist.get_rank()], rtol=1e-5, atol=1e-6)
    return {
        "collectives": [recorder.collectives for recorder in recorders],
        "largest": [recorder.largest for recorder in recorders],
        "alone": alone.collectives,
    }


def test_a_layer_has_four_collectives_in_each_pass_and_no_logits_are_gathered() -> None:
    stream, num_layers = 16 * WIDE.dim, WIDE.num_layers
    for found in run_ranks(count_collectives, 2):
        forward, head, backward = found["collectives"]
        assert forward == [
            ("reduce_scatter_tensor", stream // 2),
            *[("all_gather_into_tensor", stream), ("reduce_scatter_tensor", stream // 2)] * 2 * num_layers,
        ]
        assert head == [("all_gather_into_tensor", stream)]
        assert len(backward) == 4 * num_layers + 2
        assert max(size for _, size in backward) == stream  # of the stream, and never of a weight
        largest_part = WIDE.vocab_size // 2 * WIDE.dim  # the weight's rows; the logits are half as many
        assert max(found["largest"][1:]) == largest_part
        assert found["alone"] == []


# ---- refusals

LATENT = replace(DENSE, num_heads=None, num_kv_heads=None, mixers=(LatentAttentionConfig(4, 16, 8, 4, 10),))


@pytest.mark.parametrize(
    ("run", "ranks", "message"),
    [
        (RunOptions(DENSE, CrossEntropy), 8, "so many ranks cannot share num_heads 4: set it to 4"),
        (RunOptions(with_attention(2), CrossEntropy), 3, "cannot share num_kv_heads 2: set it to 2"),
        (RunOptions(replace(DENSE, ffn_dim=50), CrossEntropy), 4, "cannot share ffn_dim 50: set it to 2"),
        (RunOptions(TINY, CrossEntropy), 2, "cannot share vocab_size 61: set it to 1"),
        (RunOptions(DELTA, CrossEntropy), 4, "cannot share num_key_heads 2: set it to 2"),
        (
            RunOptions(with_attention(1, qk_norm="projection"), CrossEntropy),
            2,
            "cannot share num_kv_heads 1 with qk_norm 'projection': set it to 1",
        ),
        (
            RunOptions(DENSE, CrossEntropy, seq_len=18),
            4,
            "cannot share data.seq_len 18: set it to 2",
        ),
        (RunOptions(LATENTS, CrossEntropy), 3, "cannot share num_heads 4: set it to 2"),
        (RunOptions(LATENT, CrossEntropy), 2, "cannot share a LatentAttentionConfig, which has no `find_uncut`"),
        (RunOptions(DENSE, KTO), 2, "KTO does not train under tensor parallelism: set it to 1"),
        (RunOptions(DENSE, CrossEntropy, has_float8=True), 2, "model.float8 needs whole layers"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_nearest_number_that_works(
    run: RunOptions, ranks: int, message: str
) -> None:
    with pytest.raises(UserError, match=f"^tensor_parallel is {ranks}, and .*{message}"):
        check_tensor_share(run, ranks, 24)


@pytest.mark.parametrize(
    ("num_available", "context_ranks", "remedy"),
    [
        (24, 1, "set it to 4"),
        (24, 2, "set it to 2"),  # which then share the four heads
        (2, 1, "set it to 2"),  # a pipeline, or replicas, have the other ranks
        (24, 3, "set it to 1, and context_parallel 3 to 1"),
    ],
)
def test_the_nearest_number_leaves_the_other_axes_what_they_have(
    num_available: int, context_ranks: int, remedy: str
) -> None:
    run = RunOptions(DENSE, CrossEntropy)
    with pytest.raises(UserError, match=rf"so many ranks cannot share num_heads 4: {remedy}$"):
        check_tensor_share(run, 8, num_available, context_ranks)


def test_rows_that_ranks_cannot_share_are_refused_where_they_are_cut() -> None:
    (words,) = run_ranks(refuse_a_row, 1)
    assert words == "rows have 15 tokens, which 2 ranks cannot share: make data.seq_len a multiple of 2"


def refuse_a_row() -> str:
    share = tensor_parallel.RowShare(mock.Mock(size=lambda: 2, rank=lambda: 0))
    with pytest.raises(UserError) as error:
        share.cut(torch.zeros(1, 15))
    return str(error.value)
