"""The arithmetic of one window, on one rank and on several, replicated and sharded."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from genesis.data.loader import SequenceFormat, build_skipped_window
from genesis.data.window import IGNORE_INDEX, AccumulationWindow
from genesis_callbacks import TokenCounters
from genesis_callbacks.testing import run_ranks
from tests.train.support import (
    COMPILE_SECONDS,
    SEQ_LEN,
    TINY,
    KeepGradients,
    build_module,
    build_strategy,
    build_trainer,
    counters_of,
    loader,
    reference_gradients,
    rows_of_step,
    run_in_turn,
    whole,
)


def rank_and_world() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def one_step(strategy: str) -> tuple[dict[str, Tensor], float, int]:
    rank, world_size = rank_and_world()
    keep, counters, module = KeepGradients(), TokenCounters(), build_module()
    trainer = build_trainer(build_strategy(strategy), world_size, 1, [keep, counters], gradient_clip_val=0.0)
    trainer.fit(module, loader(1, rank, world_size))
    return keep.gradients, float(trainer.callback_metrics["train/grad_norm"]), counters.tokens_seen


CASES = [
    (1, "single replicated full"),
    pytest.param(4, "hybrid replicated full", marks=[pytest.mark.slow, pytest.mark.each]),
    (2, "replicated zero1 full grad_op two_blocks offload half_offload checkpointing"),
    pytest.param(1, "compiled", marks=pytest.mark.slow),
    pytest.param(2, "compiled_shards reduced_each", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "strategies"), CASES)
def test_uneven_micro_batches_give_the_gradient_of_one_big_batch(world_size: int, strategies: str) -> None:
    expected, norm = reference_gradients(TINY, 0)
    num_valid = int((rows_of_step(0).labels != IGNORE_INDEX).sum())
    names = strategies.split()
    fits = [(name,) for name in names]
    for found in run_ranks(run_in_turn, world_size, one_step, fits, timeout_seconds=COMPILE_SECONDS):
        for strategy, (gradients, rank_norm, tokens) in zip(names, found, strict=True):
            assert gradients.keys() == expected.keys(), strategy
            for name, gradient in gradients.items():
                assert (gradient.double() - expected[name]).abs().max() < 1e-6, (strategy, name)
            assert rank_norm == pytest.approx(norm, abs=1e-6), strategy
            assert tokens == num_valid, strategy


def test_all_ranks_report_the_same_norm() -> None:
    first, second = run_ranks(run_in_turn, 2, one_step, [("replicated",), ("full",)])
    assert [norm for _, norm, _ in first] == [norm for _, norm, _ in second]


class PoisonOneRank(pl.Callback):
    """Makes the loss of one rank NaN in one step."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.handle = None
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            self.handle = pl_module.decoder.norm.register_forward_hook(lambda module, args, output: output * torch.nan)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.handle is not None:
            self.handle.remove()


class KeepState(pl.Callback):
    """Keeps weights, optimizer state, counters and LR after each step."""

    def __init__(self) -> None:
        self.after: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        tensors = {name: whole(p) for name, p in pl_module.named_parameters()}
        names = {p: name for name, p in pl_module.named_parameters()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"{names[parameter]}.{key}"] = whole(value)
        counters = counters_of(trainer)
        self.after.append(
            {
                "tensors": tensors,
                "seen": counters.tokens_seen,
                "updated": counters.tokens_updated,
                "updates": counters.updates,
                "step": counters.step,
                "reason": pl_module.skip_reason,
            }
        )


def three_steps(strategy: str, fault: str) -> list[dict[str, Any]]:
    rank, world_size = rank_and_world()
    keep = KeepState()
    poison = [PoisonOneRank(1, world_size - 1)] if fault == "nan" else []
    trainer = build_trainer(
        build_strategy(strategy), world_size, 3, [TokenCounters(), *poison, keep], gradient_clip_val=1.0
    )
    windows = loader(3, rank, world_size, (1,) if fault == "empty" else ())
    trainer.fit(build_module(), WithSkippedWindow(windows) if fault == "skipped" else windows)
    return keep.after


class WithSkippedWindow:
    """The windows of a loader, the second of which is skipped: its micro-batches have other shapes than the others."""

    def __init__(self, windows: Iterable[AccumulationWindow]) -> None:
        self.windows = windows

    def __iter__(self) -> Iterator[AccumulationWindow]:
        for number, window in enumerate(self.windows):
            yield self.skip(window) if number == 1 else window

    def skip(self, window: AccumulationWindow) -> AccumulationWindow:
        layout = SequenceFormat(SEQ_LEN, 0, np.ones(TINY.vocab_size, np.int64), np.dtype("<u2"))
        skipped = build_skipped_window(layout, len(window.micro_batches), window.data_position)
        assert {len(micro_batch.input_ids) for micro_batch in skipped.micro_batches} == {1}
        return skipped


REASONS = {"nan": "nonfinite_gradient", "empty": "no_valid_tokens", "skipped": "skipped_data"}


@pytest.mark.parametrize("strategy", ["replicated", pytest.param("full", marks=pytest.mark.slow)])
def test_a_bad_window_is_skipped_by_all_ranks(strategy: str) -> None:
    for found in run_ranks(run_in_turn, 2, three_steps, [(strategy, fault) for fault in REASONS]):
        for fault, states in zip(REASONS, found, strict=True):
            check_skip(fault, *states)


def check_skip(fault: str, first: dict[str, Any], second: dict[str, Any], third: dict[str, Any]) -> None:
    """Checks that the second of three windows changed nothing and was counted for what it is."""
    num_valid = int((rows_of_step(0).labels != IGNORE_INDEX).sum())
    assert second["reason"] == REASONS[fault]
    assert first["tensors"].keys() == second["tensors"].keys()
    assert all(torch.equal(first["tensors"][name], second["tensors"][name]) for name in first["tensors"])
    assert any(not torch.equal(second["tensors"][name], third["tensors"][name]) for name in first["tensors"])
    seen_in_window = num_valid if fault == "nan" else 0
    assert second["seen"] == first["seen"] + seen_in_window
    assert second["updated"] == first["updated"]
    assert [state["updates"] for state in (first, second, third)] == [1, 1, 2]
    assert [state["step"] for state in (first, second, third)] == [1, 2, 3]


def overflow_run() -> tuple[list[dict[str, Any]], float]:
    keep = KeepState()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = build_trainer("auto", 1, 3, [TokenCounters(), keep], gradient_clip_val=1.0, plugins=[plugin])
    trainer.fit(build_module(), loader(3, 0, 1))
    return keep.after, scaler.get_scale()


def test_a_scaler_overflow_is_a_skipped_step_and_the_scale_falls() -> None:
    ((states, scale),) = run_ranks(overflow_run, 1)
    assert states[0]["reason"] == "scaler_overflow"
    assert states[0]["updates"] == 0
    assert states[0]["updated"] == 0
    assert states[0]["seen"] > 0
    assert scale < 2.0**127


class CountCollectives(TorchDispatchMode):
    """Counts the operators of torch.distributed by name.

    The gradients of a CPU are computed in the thread that calls `backward`, so the mode sees their collectives, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def count_collectives(strategy: str) -> Counter[str]:
    rank, world_size = rank_and_world()
    collectives = CountCollectives()

    class Count(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            # The first window builds DDP's buckets; the second is like all others.
            if trainer.global_step == 1:
                collectives.__enter__()

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                collectives.__exit__(None, None, None)

    module = build_module()
    trainer = build_trainer(build_strategy(strategy), world_size, 2, [Count()], gradient_clip_val=0.0)
    trainer.fit(module, loader(2, rank, world_size))
    return collectives.counts


@pytest.mark.slow
def test_gradients_meet_once_per_window_or_in_every_micro_batch_if_asked_to() -> None:
    num_units = TINY.num_layers + 1
    of_each = [("full",), ("reduced_each",), ("replicated",)]
    for full, reduced_each, replicated in run_ranks(run_in_turn, 2, count_collectives, of_each):
        # Four micro-batches a window: one reduction per sharded unit, not one per unit and micro-batch.
        assert sum(n for name, n in full.items() if "reduce_scatter" in name) == num_units
        assert sum(n for name, n in reduced_each.items() if "reduce_scatter" in name) == 4 * num_units
        # One bucket, DDP's map of used parameters, the count of valid tokens, and the sum of the losses; TokenCounters
        # is absent here.
        assert sum(n for name, n in replicated.items() if "allreduce" in name) == 4


def gradients_with_dropout(strategy_options: dict[str, Any]) -> dict[str, Tensor]:
    rank, world_size = rank_and_world()
    from_replicated = build_strategy("replicated")
    from_replicated.activation_checkpointing = strategy_options["activation_checkpointing"]
    keep = KeepGradients()
    module = build_module(replace(TINY, dropout=0.3))
    trainer = build_trainer(from_replicated, world_size, 1, [keep], gradient_clip_val=0.0)
    trainer.fit(module, loader(1, rank, world_size))
    return keep.gradients


@pytest.mark.parametrize("which", ["block", pytest.param(2, marks=pytest.mark.slow)])
def test_activation_checkpointing_changes_no_gradient_even_with_dropout(which: Any) -> None:
    (plain,) = run_ranks(gradients_with_dropout, 1, {"activation_checkpointing": "none"})
    (recomputed,) = run_ranks(gradients_with_dropout, 1, {"activation_checkpointing": which})
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
