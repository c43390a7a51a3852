"""Pipeline parallelism: every gradient, loss, count and figure beside those of one process on the whole batch."""

import os
import warnings
from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations, pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from genesis.base.errors import UserError
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.model import stages
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.stages import check_micro_batches, divide_layers, ideal_bubble_share
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.run_options import RunOptions
from genesis.strategies import Sharded, pipeline
from genesis.strategies.pipeline import StageClock
from genesis.strategies.recompute import apply_recomputation
from genesis.strategies.wrap import list_units
from genesis.train import module as module_file
from genesis.train.module import GenesisModule
from genesis_callbacks import GradientHealth, SkipAwareLR, StepTimer, TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.algorithms import algorithm_of
from tests.mixtures import mix
from tests.outside.kto import KTO
from tests.train.support import (
    COMPILE_SECONDS,
    TINY,
    build_module,
    build_trainer,
    counters_of,
    loader,
    run_in_turn,
    whole,
    window_of_rank,
)

DEEP = replace(TINY, num_layers=4)
MODELS: dict[str, DecoderConfig] = {
    "tied": DEEP,
    "untied": replace(DEEP, has_tied_embeddings=False),
    "five layers": replace(DEEP, num_layers=5),
    "mixture": mix(DEEP, "softmax"),
    "biased mixture": mix(DEEP, "shared"),
    "linear": mix(DEEP, "linear"),
    "adapters": DEEP,
    "even": replace(DEEP, vocab_size=64),
    "even mixture": mix(replace(DEEP, vocab_size=64), "softmax"),
}
LORA = AdapterConfig(rank=2)
STEPS, EMPTY = 3, (1,)


# ---- whole fits


SHARED = ("train/", "counters/", "gradient/", "parts/")
"""The beginnings of the names of values that are the same in one process."""
TIMES = ("parallel/", "time/")


class Watch(pl.Callback):
    """Keeps the gradients of the first step, and what every step logs."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.rows: list[dict[str, float]] = []
        self.skips: list[str | None] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if not self.skips:
            named = pl_module.named_parameters()
            self.gradients = {name: whole(p.grad) for name, p in named if p.grad is not None}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:  # what the step before has logged, after this callback saw its end
            self.keep_row(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.skips.append(pl_module.skip_reason)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.keep_row(trainer)

    def keep_row(self, trainer: pl.Trainer) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def select(row: dict[str, float], beginnings: tuple[str, ...]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith(beginnings) and name != "train/scale_factor"}


def validation_windows(rank: int, world_size: int) -> list[AccumulationWindow]:
    """Windows of fewer, of more and of other micro-batches than those of training."""
    narrow = [
        MicroBatch(*(tensor[:, :6] for tensor in (one.input_ids, one.labels, one.document_ids)))
        for one in window_of_rank(2, rank, world_size, 4 // world_size).micro_batches
    ]
    num_valid = sum(int((one.labels != IGNORE_INDEX).sum()) for one in narrow)
    return [
        window_of_rank(0, rank, world_size, micro_batch_size=8 // world_size),
        window_of_rank(1, rank, world_size),
        AccumulationWindow(tuple(narrow), num_valid, 3 * num_valid, 8),
    ]


def fit(model: str, options: dict[str, Any] | None, fault: str = "") -> dict[str, Any]:
    """Trains some steps with a validation in between, and returns all that ranks must agree on."""
    plant(fault)
    watch, timer = Watch(), StepTimer()
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    num_stages, num_sharing = ((options or {}).get(f"{axis}_parallel", 1) for axis in ("pipeline", "tensor"))
    of_stage = world_size // num_stages
    share = (rank % of_stage // num_sharing, of_stage // num_sharing)
    strategy: Any = "auto" if options is None else Sharded(**options)
    callbacks = [TokenCounters(), SkipAwareLR(total_updates=STEPS), GradientHealth(), timer, watch]
    trainer = build_trainer(
        strategy,
        world_size,
        STEPS,
        callbacks,
        gradient_clip_val=1.0,
        val_check_interval=2,
        check_val_every_n_epoch=None,
    )
    adapter = LORA if model == "adapters" else None
    module = GenesisModule(MODELS[model], algorithm_of(name="adamw", lr=3e-3), adapter=adapter)
    trainer.fit(module, loader(STEPS, *share, EMPTY), DataLoader(validation_windows(*share), batch_size=None))
    return {
        "gradients": watch.gradients,
        "rows": [select(row, SHARED) for row in watch.rows],
        "skips": watch.skips,
        "counters": counters_of(trainer).checkpoint_counters(),
        "validation": float(trainer.callback_metrics["validation/loss"]),
        "weights": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "parallel": select(watch.rows[-1], TIMES),
    }


def fit_each(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return run_in_turn(fit, cases)


@cache
def expected(model: str) -> dict[str, Any]:
    """What one process computes."""
    return run_ranks(fit_each, 1, [(model, None)])[0][0]


def distance(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Returns the largest difference relative to the largest element, of all tensors."""
    return max(
        float((tensor - reference[name]).abs().max() / reference[name].abs().max().clamp(min=1e-9))
        for name, tensor in found.items()
    )


def compare_fits(
    of_ranks: list[dict[str, Any]], reference: dict[str, Any], tolerance: float, of_weights: float
) -> None:
    """Checks that all ranks have trained, counted, skipped and validated as one process has."""
    names = {name for found in of_ranks for name in found["gradients"]}
    assert names == reference["gradients"].keys()
    for found in of_ranks:
        assert distance(found["gradients"], reference["gradients"]) <= tolerance
        # AdamW's first updates are nearly as large for the smallest gradients, whose rounding therefore shows.
        assert distance(found["weights"], reference["weights"]) <= of_weights
        assert found["skips"] == reference["skips"] == [None, "no_valid_tokens", None]
        assert found["counters"] == reference["counters"]
        assert found["validation"] == pytest.approx(reference["validation"], rel=1e-5)
        assert "train/loss" in found["rows"][0]
        for row, expected_row in zip(found["rows"], reference["rows"], strict=True):
            assert row == pytest.approx(expected_row, rel=1e-5, abs=1e-9)
    assert {name for found in of_ranks for name in found["weights"]} == reference["weights"].keys()


def check_fit(model: str, of_ranks: list[dict[str, Any]], tolerance: float) -> None:
    compare_fits(of_ranks, expected(model), tolerance, of_weights=1e-3)


def plant(fault: str) -> None:
    """Brings back a mistake that changes results in silence, in this process; `proved` is the proof of GPUs instead."""
    module_file.is_proof_needed = lambda _: fault == "proved"
    if fault == "a copy is counted":
        pipeline.Decoder.copies = property(lambda _: frozenset(), lambda *_: None)  # type: ignore[assignment]
    if fault == "copies are not added":
        pipeline.Pipeline._add_gradients_of_copies = lambda _: None  # type: ignore[method-assign]
    if fault == "gradients are scaled":
        right = pipeline.Schedule1F1B
        pipeline.Schedule1F1B = lambda *given, **options: right(*given, **options | {"scale_grads": True})  # type: ignore[assignment, misc]
    if fault == "auxiliary losses are lost":
        pipeline.list_auxiliary_losses = lambda _: []  # type: ignore[assignment]
    if fault == "figures are not shared":
        pipeline.Pipeline.share_figures = lambda self, window: (window.sums, window.part_sums)  # type: ignore[method-assign]


TWO: dict[str, Any] = {"pipeline_parallel": 2}
TWICE: dict[str, Any] = {"pipeline_parallel": 2, "stages_per_rank": 2}


@pytest.mark.process
def test_each_gradient_loss_count_and_figure_is_that_of_one_process() -> None:
    of_ranks = [found for (found,) in run_ranks(fit_each, 2, [("mixture", TWICE)])]
    check_fit("mixture", of_ranks, 2e-6)
    for found in of_ranks:
        parallel = found["parallel"]
        assert 0.0 < parallel["parallel/bubble_share"] < 1.0
        assert parallel["parallel/bubble_share"] == of_ranks[0]["parallel"]["parallel/bubble_share"]
        assert parallel["parallel/bubble_share_ideal"] == 1 / 17
        # What is neither forward nor backward of a stage is a wait for other stages.
        assert min(parallel[f"time/{part}_ms"] for part in ("forward", "backward", "communication")) > 0.0


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (
            2,
            [
                ("untied", TWO),
                ("tied", TWO, "proved"),
                ("tied", TWICE),
                ("five layers", TWO | {"layers_per_stage": [2, 3]}),
                ("biased mixture", TWICE),
                ("linear", TWO),
                ("adapters", TWICE),
                ("tied", TWICE | {"activation_checkpointing": 2}),
                ("mixture", TWO | {"activation_checkpointing": "block", "blocks_per_recomputation": 2}),
                ("tied", TWO | {"activation_checkpointing": "block", "activation_offload": True}),
                ("tied", TWICE | {"cpu_offload": 0.5, "shard": "grad_op"}),
                ("tied", TWO | {"optimizer_offload": 0.6, "blocks_per_unit": 2, "max_gathers_in_flight": 1}),
            ],
        ),
        (2, [("tied", TWO | {"compile_blocks": True, "timeout_seconds": COMPILE_SECONDS})]),
        (
            4,
            [
                ("tied", TWO),
                ("tied", TWICE | {"activation_checkpointing": "block"}),
                ("mixture", TWICE | {"expert_parallel": 2}),
                ("tied", TWO | {"shard": "hybrid", "ranks_per_shard_group": 1}),
                ("tied", {"pipeline_parallel": 4}),
                ("untied", {"pipeline_parallel": 4}),
                ("even", TWICE | {"tensor_parallel": 2}),
                ("even mixture", TWO | {"tensor_parallel": 2, "activation_checkpointing": "block"}),
            ],
        ),
    ],
)
def test_every_form_of_a_pipeline_trains_as_one_process(world_size: int, cases: list[tuple[Any, ...]]) -> None:
    found = run_ranks(fit_each, world_size, cases, timeout_seconds=600.0)
    for (model, options, *_), *of_ranks in zip(cases, *found, strict=True):
        is_exact = model == "untied" and world_size == options["pipeline_parallel"]
        check_fit(model, of_ranks, 0.0 if is_exact else 1e-5 if model == "linear" else 2e-6)


FAULTS = {
    "a copy is counted": "norm",
    "copies are not added": "decoder.embedding.weight",
    "gradients are scaled": "decoder.norm.weight",
    "auxiliary losses are lost": "decoder.blocks.1.feed_forward.router.weight",
}


@pytest.mark.slow
@pytest.mark.repeat  # it proves the tests above
@pytest.mark.process
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_in_what_stages_add_is_seen(fault: str) -> None:
    model = "mixture" if "auxiliary" in fault else "tied"
    reference = expected(model)
    of_ranks = [found for (found,) in run_ranks(fit_each, 2, [(model, TWO, fault)])]
    norm, right_norm = (one["rows"][0]["train/grad_norm"] for one in (of_ranks[0], reference))
    wrong = [
        name
        for found in of_ranks
        for name, gradient in found["gradients"].items()
        if distance({name: gradient}, reference["gradients"]) > 1e-3
    ]
    assert abs(norm / right_norm - 1.0) > 1e-3
    assert FAULTS[fault] in wrong if FAULTS[fault] != "norm" else not wrong


@pytest.mark.slow
@pytest.mark.process
def test_a_stage_that_does_not_give_the_figures_of_others_ends_the_run() -> None:
    with pytest.raises(AssertionError, match=r"StopIteration|size mismatch|sum"):
        run_ranks(fit_each, 2, [("mixture", TWO, "figures are not shared")])


# ---- a value that is not finite


class SpoilBlock(pl.Callback):
    """Makes the output of the last block infinite in one step, on the rank that has it."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        block = pl_module.decoder.numbered_blocks.get(3)
        if block is not None and batch_idx == 1:
            self.handle = block.feed_forward.register_forward_hook(lambda _, __, out: (out[0] * torch.inf, out[1]))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and hasattr(self, "handle"):
            self.handle.remove()


def spoil(options: dict[str, Any]) -> dict[str, Any]:
    strategy, counters, watch = Sharded(**options), TokenCounters(), Watch()
    trainer = build_trainer(strategy, 2, STEPS, [counters, GradientHealth(), SpoilBlock(), watch])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(build_module(DEEP), loader(STEPS, 0, 1))
    lines = [str(one.message) for one in caught if "is not finite" in str(one.message)]
    return {"lines": lines, "skips": watch.skips, "counters": counters.checkpoint_counters()}


@pytest.mark.slow
@pytest.mark.process
def test_every_stage_skips_a_window_that_one_of_them_spoils_and_its_module_is_named() -> None:
    for options in (TWO, TWICE):
        first, second = run_ranks(spoil, 2, options)
        assert first["skips"] == second["skips"] == [None, "nonfinite_gradient", None]
        assert first["counters"] == second["counters"]
        (line,) = first["lines"]
        assert "the forward of decoder.blocks.3.feed_forward on rank 1" in line


# ---- which layers a stage has


@pytest.mark.parametrize(
    ("num_ranks", "stages_per_rank", "num_micro_batches", "efficiency"),
    [(8, 1, 4, 4 / 11), (2, 1, 8, 8 / 9), (4, 2, 8, 16 / 19), (1, 1, 3, 1.0)],
)
def test_the_ideal_bubble_is_that_of_the_formula(
    num_ranks: int, stages_per_rank: int, num_micro_batches: int, efficiency: float
) -> None:
    assert 1.0 - ideal_bubble_share(num_ranks, stages_per_rank, num_micro_batches) == pytest.approx(efficiency)


def test_the_clock_counts_work_and_the_time_to_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 2.0, 4.0, 7.0, *(20.0, 21.0, 23.0)])
    monkeypatch.setattr(pipeline.time, "perf_counter", lambda: next(moments))
    clock = StageClock()
    for num_parts in (2, 1):
        clock.begin_window(torch.device("cpu"), 0.5)
        for _ in range(num_parts):
            with clock.computing():
                pass
    assert clock.take() == (1.0 + 3.0 + 2.0, 7.0 + 3.0, 2)
    assert clock.take() == (0.0, 0.0, 0)


def test_a_head_that_costs_as_much_as_layers_gets_fewer_of_them() -> None:
    assert divide_layers(replace(DEEP, vocab_size=8), 2) == [range(2), range(2, 4)]
    assert divide_layers(replace(DEEP, vocab_size=1024), 2) == [range(3), range(3, 4)]
    assert divide_layers(DEEP, 4) == [range(number, number + 1) for number in range(4)]
    assert divide_layers(DEEP, 2, [1, 3]) == [range(1), range(1, 4)]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 9), st.integers(0, 9), st.data())
def test_no_other_division_has_a_smaller_largest_stage(
    of_layers: list[int], first: int, last: int, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(of_layers)))
    numbers = tuple(range(len(of_layers) + 1))
    main = stages._Costs(tuple(accumulate(of_layers, initial=0)), 0, last)
    other = stages._Costs(numbers, first, last)

    def rate(division: list[range]) -> tuple[int, int]:
        return max(map(main.of, division)), max(map(other.of, division))

    inner = combinations(range(1, len(of_layers)), num_stages - 1)
    every = [[range(*pair) for pair in pairwise((0, *ends, len(of_layers)))] for ends in inner]
    assert rate(list(stages._divide(main, other, num_stages))) == min(map(rate, every))


def cut_two_stages() -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(replace(DEEP, num_layers=10))
    pipeline.cut_stages(decoder, divide_layers(decoder.config, 4, [3, 2, 3, 2]), [0, 2])
    return decoder


def test_units_and_groups_of_blocks_end_with_their_stage_and_keep_their_numbers() -> None:
    decoder = cut_two_stages()
    numbers = {id(block): number for number, block in decoder.numbered_blocks.items()}
    units = [[[numbers[id(block)] for block in unit] for unit in of_stage] for of_stage in list_units(decoder, 2)]
    assert units == [[[0, 1], [2]], [[5, 6], [7]]]
    apply_recomputation(decoder, "block", blocks_per_group=2)
    assert decoder.groups == [range(2), range(2, 3), range(5, 7), range(7, 8)]
    decoder = cut_two_stages()
    apply_recomputation(decoder, 2)
    recomputed = [number for number, block in decoder.numbered_blocks.items() if "forward" in vars(block)]
    assert recomputed == [0, 2, 6]


def test_a_rank_of_a_pipeline_cannot_run_the_model_alone() -> None:
    decoder = cut_two_stages()
    assert {name.partition(".")[0] for name, _ in decoder.named_parameters()} == {"embedding", "blocks"}
    with pytest.raises(UserError, match="none of them can run it alone"):
        decoder(torch.zeros(1, 4, dtype=torch.int64))


# ---- refusals


def build_strategy(**options: Any) -> Any:
    return build_trainer(Sharded(**{"pipeline_parallel": 2} | options), 2, 1, []).strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages_per_rank": 3}, "the pipeline has 6 stages, and the model 4 layers: lower pipeline_parallel or"),
        ({"layers_per_stage": [1, 2]}, r"layers_per_stage is \[1, 2\]: give 2 numbers .* add up to the 4 layers"),
        ({"layers_per_stage": [4, 0]}, r"layers_per_stage is \[4, 0\]: give 2 numbers of at least 1"),
        ({"gradient_reduction": "micro_batch"}, "gradient_reduction is micro_batch, .* set it to window"),
        ({"keep_gathered": True}, "keep_gathered is true, .* set it to auto, or pipeline_parallel to 1"),
    ],
)
def test_options_that_a_pipeline_cannot_have_are_refused_before_ranks_start(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build_strategy(**options).check_options(RunOptions(DEEP, CrossEntropy))


def test_lightnings_whole_saves_are_refused() -> None:
    strategy = build_strategy()
    strategy._save_distributed_checkpoint = False
    with pytest.raises(UserError, match="saves the layers of one stage alone: save by AsyncProcessCheckpoint"):
        strategy.check_options(RunOptions(DEEP, CrossEntropy))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stages_per_rank": 2},
            "stages_per_rank is given, and pipeline_parallel is 1: set it to 2 or more, or remove",
        ),
        ({"layers_per_stage": [4]}, "layers_per_stage is given, and pipeline_parallel is 1"),
        ({"pipeline_parallel": 2, "stages_per_rank": 0}, "stages_per_rank is 0; it is a number of stages, at least 1"),
    ],
)
def test_options_of_stages_without_a_pipeline_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sharded(**options)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            RunOptions(DEEP, CrossEntropy, batch_sizes=(4, 4)),
            "the micro-batches of a window are 1, and pipeline_parallel is 2",
        ),
        (RunOptions(DEEP, KTO), "pipeline_parallel is 2, and KTO does not train under pipeline parallelism"),
        (RunOptions(DEEP, CrossEntropy, has_float8=True), "model.float8 is given, whose scales a pipeline"),
    ],
)
def test_a_run_that_a_pipeline_cannot_train_is_refused_before_ranks_start(run: RunOptions, message: str) -> None:
    strategy = build_strategy()
    strategy.check_options(RunOptions(DEEP, CrossEntropy, batch_sizes=(8, 4)))
    with pytest.raises(UserError, match=message):
        strategy.check_options(run)


def test_a_number_of_micro_batches_that_cannot_be_interleaved_is_refused_with_one_that_can() -> None:
    check_micro_batches(10, 4, 2)
    check_micro_batches(11, 4, 1)
    with pytest.raises(UserError, match=r"are 11, which cannot be interleaved over 4 ranks .* 8 micro-batches"):
        check_micro_batches(11, 4, 2)
