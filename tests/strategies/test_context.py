"""Context parallelism: every gradient, loss, count and figure beside those of one process on whole rows."""

import os
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from genesis.base.errors import UserError
from genesis.model import shares
from genesis.model.attention import AttentionConfig, RopeScaling
from genesis.model.decoder import Decoder, DecoderConfig, Scales
from genesis.model.latent import LatentAttentionConfig as LatentsConfig
from genesis.model.loss import token_losses
from genesis.model.norm import NormConfig
from genesis.model.shares import share_context
from genesis.model.statistics import list_auxiliary_losses
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.objective import Objective
from genesis.objectives.run_options import RunOptions
from genesis.objectives.vocabulary import WHOLE
from genesis.strategies import Sharded, context_parallel, wrap
from genesis.strategies.context_parallel import ContextExchange, ContextVocabulary
from genesis.strategies.degrees import AXIS_NAMES, Degrees, groups_along
from genesis.train.module import GenesisModule
from genesis_callbacks import SkipAwareLR, TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.algorithms import algorithm_of
from tests.mixtures import mix
from tests.model.latent_attention import LatentAttentionConfig
from tests.outside.kto import KTO
from tests.strategies.test_pipeline import Watch, compare_fits, distance
from tests.train.support import (
    TINY,
    build_trainer,
    counters_of,
    loader,
    rows_of_step,
    run_in_turn,
    whole,
    window_of_rank,
)

BASE = replace(TINY, vocab_size=64)


def attend(**options: Any) -> DecoderConfig:
    attention = AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2} | options)
    return replace(BASE, attention=attention, num_heads=None, num_kv_heads=None)


MODELS: dict[str, DecoderConfig] = {
    "tied": BASE,
    "untied": replace(BASE, has_tied_embeddings=False),
    "deep": replace(BASE, has_tied_embeddings=False, num_layers=4),
    "one kv head": attend(num_kv_heads=1),
    "gate": attend(has_output_gate=True, qk_norm="head", rotary_dim=4, no_rope_every=2),
    "window": attend(sliding_window=5, window_layers=(1,), qk_norm="projection", has_qkv_bias=True),
    "sinks": attend(has_sinks=True, has_output_bias=True, sliding_window=5, window_layers=(0,)),
    "scales": replace(
        attend(
            **{"qk_norm": "head", "has_interleaved_rope": True, "softmax_scale": 0.3, "query_growth": 0.2},
            **{"sliding_window": 5, "window_layers": (1,), "window_rope_theta": 77.0},
            rope_scaling=RopeScaling(2.0, original_seq_len=4, kind="dynamic"),
        ),
        norm=NormConfig(1e-5, "both", has_offset=True),
        scales=Scales(3.0, 0.5, 0.5),
    ),
    "mixture": mix(BASE, "softmax"),
    "biased mixture": mix(BASE, "shared"),
    "latents": replace(
        BASE, num_heads=None, num_kv_heads=None, mixers=(LatentsConfig(4, 16, 8, 4, 10, query_latent_dim=12),)
    ),
    "linear": mix(BASE, "linear without experts"),
    "linear mixture": mix(BASE, "linear"),
}
STEPS, EMPTY = 3, (1,)
CP2: dict[str, Any] = {"context_parallel": 2}
CP4: dict[str, Any] = {"context_parallel": 4}


def fit(model: str, options: dict[str, Any] | None, fault: str = "") -> dict[str, Any]:
    """Trains some steps with a validation in between, and returns all that ranks must agree on."""
    plant(fault)
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    given = options or {}
    axes = {name: given.get(f"{kind}_parallel", 1) for name, kind in AXIS_NAMES.items()}
    degrees = Degrees(**axes).resolve(world_size)
    share = (degrees.data_rank(rank), degrees.data_world_size)
    watch = Watch()
    trainer = build_trainer(
        "auto" if options is None else Sharded(**options),
        world_size,
        STEPS,
        [TokenCounters(), SkipAwareLR(total_updates=STEPS), watch],
        gradient_clip_val=1.0,
        val_check_interval=2,
        check_val_every_n_epoch=None,
    )
    module = GenesisModule(MODELS[model], algorithm_of(name="adamw", lr=3e-3))
    validation = [window_of_rank(step, *share) for step in range(2)]
    trainer.fit(module, loader(STEPS, *share, EMPTY), DataLoader(validation, batch_size=None))  # type: ignore[arg-type]
    rows = [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("time/", "parallel/", "offload/", "communication/"))
        }
        for row in watch.rows
    ]
    return {
        "gradients": watch.gradients,
        "rows": rows,
        "skips": watch.skips,
        "counters": counters_of(trainer).checkpoint_counters(),
        "validation": float(trainer.callback_metrics["validation/loss"]),
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
    }


def fit_each(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return run_in_turn(fit, cases)


@cache
def expected(model: str) -> dict[str, Any]:
    """What one process computes."""
    return run_ranks(fit_each, 1, [(model, None)])[0][0]


def check_fit(model: str, of_ranks: list[dict[str, Any]], tolerance: float) -> None:
    compare_fits(of_ranks, expected(model), tolerance, of_weights=2e-3)


def plant(fault: str) -> None:
    """Brings back a mistake that changes results in silence, in this process; or compiles without a compiler."""
    if fault == "rows are counted by each rank":
        Degrees.token_groups = lambda self: groups_along(self.data_axes(), ("dp", "cp"))  # type: ignore[method-assign]
    if fault == "rows are not summed":
        shares.find_routers = lambda _: {}
    if fault == "tables are not cut":
        context_parallel.ContextExchange.cut = cut_integers  # type: ignore[method-assign]
    if fault == "aot_eager":
        wrap.compile_each_shape = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]


def cut_integers(self: Any, rows: Tensor) -> Tensor:
    """Gives each rank the rotary tables of the first tokens."""
    pieces = rows.chunk(dist.get_world_size(), dim=1)
    return pieces[0 if rows.is_floating_point() else dist.get_rank()]


def test_each_gradient_loss_count_and_figure_is_that_of_one_process() -> None:
    check_fit("tied", [found for (found,) in run_ranks(fit_each, 2, [("tied", CP2)])], 2e-6)


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (
            2,
            [
                ("untied", CP2),
                ("one kv head", CP2),
                ("gate", CP2),
                ("window", CP2),
                ("sinks", CP2),
                ("scales", CP2),
                ("biased mixture", CP2 | {"expert_parallel": 2}),
                ("latents", CP2),
                ("linear mixture", CP2),
                ("mixture", CP2 | {"activation_checkpointing": "block", "blocks_per_recomputation": 2}),
                ("tied", CP2 | {"activation_checkpointing": "block", "activation_offload": True}),
                ("tied", CP2 | {"gradient_reduction": "micro_batch", "keep_gathered": False, "cpu_offload": 0.5}),
                ("gate", CP2 | {"compile_blocks": True, "activation_checkpointing": "block"}, "aot_eager"),
            ],
        ),
        (
            4,
            [
                ("tied", CP2),
                ("tied", CP4),
                ("one kv head", CP4),
                ("linear", CP4),
                ("mixture", CP2 | {"expert_parallel": 4}),
                ("tied", CP2 | {"shard": "hybrid", "ranks_per_shard_group": 2}),
                ("mixture", CP2 | {"pipeline_parallel": 2}),
                ("gate", CP2 | {"tensor_parallel": 2}),
                ("mixture", CP2 | {"tensor_parallel": 2}),
                ("linear", CP2 | {"tensor_parallel": 2}),
                ("latents", CP2 | {"tensor_parallel": 2}),
                ("latents", CP2 | {"pipeline_parallel": 2}),
            ],
        ),
    ],
)
def test_every_form_of_shared_rows_trains_as_one_process(world_size: int, cases: list[tuple[Any, ...]]) -> None:
    found = run_ranks(fit_each, world_size, cases, timeout_seconds=600.0)
    for (model, *_), *of_ranks in zip(cases, *found, strict=True):
        check_fit(model, of_ranks, 1e-5 if "linear" in model else 2e-6)


@pytest.mark.slow
@pytest.mark.repeat  # it proves the tests above
@pytest.mark.parametrize(
    ("fault", "model", "wrong"),
    [
        ("rows are counted by each rank", "tied", "decoder.embedding.weight"),
        ("rows are not summed", "mixture", "decoder.blocks.0.feed_forward.router.weight"),
        ("tables are not cut", "tied", "decoder.blocks.0.attention.query.weight"),
    ],
)
def test_a_mistake_in_what_ranks_share_is_seen(fault: str, model: str, wrong: str) -> None:
    right = expected(model)["gradients"]
    for (found,) in run_ranks(fit_each, 2, [(model, CP2, fault)]):
        assert distance({wrong: found["gradients"][wrong]}, right) > 1e-3
        if fault == "rows are counted by each rank":
            halves = {name: 2.0 * gradient for name, gradient in found["gradients"].items()}
            assert distance(halves, right) <= 2e-6


# ---- what is communicated


class Collectives(TorchDispatchMode):
    """Counts the collectives within it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(names: list[str]) -> list[dict[str, int]]:
    counted = []
    for name in names:
        decoder = Decoder(MODELS[name])
        decoder.init_weights(0)
        assert dist.group.WORLD is not None
        exchange = ContextExchange(dist.group.WORLD)
        share_context(decoder, exchange)
        vocabulary = ContextVocabulary(exchange, WHOLE)
        rows = rows_of_step(0)
        head = partial(vocabulary.sum_cross_entropy, labels=rows.labels)
        with Collectives() as forward:
            loss, statistics = decoder(rows.input_ids, document_ids=rows.document_ids, head=head, has_statistics=True)
            loss = sum(list_auxiliary_losses(statistics), loss)
        with Collectives() as backward:
            loss.backward()
        counted += [dict(forward.counts), dict(backward.counts)]
    return counted


def test_a_layer_and_pass_has_two_exchanges_and_a_mixture_one_small_sum() -> None:
    swaps = {"all_to_all_single": 2 * BASE.num_layers}
    loss, loads = {"all_reduce": 1}, {"all_reduce": 1 + BASE.num_layers}
    for counted in run_ranks(count_collectives, 2, ["tied", "mixture", "linear"]):
        assert counted == [swaps | loss, swaps, swaps | loads, swaps, swaps | loss, swaps]


# ---- what is refused


def check(
    decoder: DecoderConfig = BASE, objective: type[Objective] = CrossEntropy, seq_len: int = 60, **options: Any
) -> None:
    strategy: Any = Sharded(**options)
    strategy.parallel_devices = [torch.device("cpu")] * 12
    strategy.check_options(RunOptions(decoder, objective, seq_len=seq_len))


LATENT = replace(BASE, mixers=(LatentAttentionConfig(4, 8, 8, 4, 8),), num_heads=None, num_kv_heads=None)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            {"context_parallel": 6},
            "context_parallel 6 does not divide the 4 heads of AttentionConfig; set context_parallel to 2",
        ),
        (
            {"decoder": MODELS["linear"], "context_parallel": 3},
            "context_parallel 3 does not divide the 4 heads of GatedDeltaConfig; set context_parallel to 1",
        ),
        (
            {"context_parallel": 4, "seq_len": 90},
            "context_parallel 4 does not divide data.seq_len 90; set context_parallel to 2",
        ),
        (  # 3 would divide the row, and not the heads
            {"context_parallel": 6, "seq_len": 57},
            "context_parallel 6 does not divide data.seq_len 57; set context_parallel to 1",
        ),
        (
            {"decoder": LATENT, "context_parallel": 2},
            "context_parallel is 2, and LatentAttentionConfig does not know how ranks could share its heads",
        ),
        (
            {"objective": KTO, "context_parallel": 2},
            "context_parallel is 2, and KTO does not train under context parallelism, where a rank has a part of each",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name_with_what_they_can(run: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(**run)


def test_ranks_that_fit_are_not_refused() -> None:
    check(MODELS["linear"], context_parallel=4)
    check(MODELS["one kv head"], context_parallel=4)
    check(context_parallel=2, tensor_parallel=2)


def test_losses_of_tokens_refuse_labels_of_other_tokens() -> None:
    with pytest.raises(AssertionError, match="8 hidden states and 16 labels"):
        token_losses(torch.zeros(2, 4, 8), torch.zeros(16, 8), torch.full((2, 8), -100))
