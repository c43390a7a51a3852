"""The learning rate follows what happened; schedules are bounded, continuous and fall as their names say."""

import math
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from clock_runs import LIGHTNING_WARNINGS, OVERFLOW, VETO, Module, half_precision, loader, trainer
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from genesis_callbacks.schedule import Schedule, lr_factor
from genesis_callbacks.skip_aware_lr import SkipAwareLR
from genesis_callbacks.testing import run_ranks
from genesis_callbacks.token_counters import TokenCounters

with warnings.catch_warnings():
    # Torch 2.13's own use of torch.jit.script, which it deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = LIGHTNING_WARNINGS

TOKENS = [5, 7, 11, 13, 17, 19]
PEAK = 0.1


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    shape = draw(st.sampled_from(["cosine", "wsd", "linear", "constant"]))
    total = draw(st.integers(1, 10_000))
    warmup = draw(st.integers(0, total))
    decay = draw(st.integers(0, total - warmup)) if shape == "wsd" else 0
    return Schedule(shape, total, warmup, decay, draw(st.floats(0, 1)))


# ---- the function


@given(schedules(), st.integers(0, 20_000))
def test_a_factor_is_above_zero_in_the_warm_up_and_never_below_the_floor_after_it(
    schedule: Schedule, clock: int
) -> None:
    factor = lr_factor(clock, schedule)
    assert 0.0 <= factor <= 1.0
    assert factor > 0.0 if clock < schedule.warmup else factor >= schedule.floor - 1e-12


@given(schedules(), st.integers(0, 20_000))
def test_a_schedule_rises_through_its_warm_up_and_never_after_it(schedule: Schedule, clock: int) -> None:
    now, then = lr_factor(clock, schedule), lr_factor(clock + 1, schedule)
    assert then > now if clock + 1 < schedule.warmup else then <= now + 1e-12


@given(schedules(), st.integers(0, 20_000))
def test_a_schedule_has_no_jump(schedule: Schedule, clock: int) -> None:
    fall = schedule.decay if schedule.shape == "wsd" else schedule.total - schedule.warmup
    steepest = max(1 / max(schedule.warmup, 1), math.pi / 2 / max(fall, 1))
    assert abs(lr_factor(clock + 1, schedule) - lr_factor(clock, schedule)) <= steepest + 1e-12


@given(schedules(), st.integers(0, 10**12))
def test_beyond_the_planned_end_the_floor_holds(schedule: Schedule, beyond: int) -> None:
    expected = 1.0 if schedule.shape == "constant" else schedule.floor
    assert lr_factor(schedule.total + beyond, schedule) == expected


@given(schedules())
def test_the_peak_is_reached_by_the_last_update_of_the_warm_up(schedule: Schedule) -> None:
    if schedule.warmup:
        assert lr_factor(schedule.warmup - 1, schedule) == 1.0


def test_wsd_is_flat_between_warm_up_and_decay() -> None:
    schedule = Schedule("wsd", total=100, warmup=10, decay=20, floor=0.1)
    assert {lr_factor(clock, schedule) for clock in range(9, 81)} == {1.0}
    assert lr_factor(90, schedule) == pytest.approx(0.55)


def test_a_cosine_is_half_way_in_the_middle() -> None:
    assert lr_factor(55, Schedule("cosine", total=100, warmup=10, floor=0.2)) == pytest.approx(0.6)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="warm-up of 8 and a decay of 3 do not fit into a run of 10"):
        Schedule("wsd", total=10, warmup=8, decay=3)
    with pytest.raises(ValueError, match=r"floor is 1\.5"):
        Schedule("cosine", total=10, floor=1.5)
    with pytest.raises(ValueError, match="total is 0"):
        Schedule("cosine", total=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_updates": 3, "warmup_share": 0.1}, "warmup_updates and warmup_share are given"),
        ({"by": "tokens_seen", "warmup_updates": 3}, "the clock counts tokens: give warmup_tokens"),
        ({"total_tokens": 3}, "the clock counts updates: give total_updates"),
        ({"warmup_share": 1.5}, "warmup_share is 1.5"),
        ({"decay_share": 0.5}, "only wsd has a decay length"),
        ({"total_updates": 5, "warmup_updates": 6}, "do not fit into a run of 5"),
        ({"max_replays": -1}, "max_replays is -1"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SkipAwareLR(**options)


# ---- the callback


def _lrs(tmp_path: Path, module: Module, options: dict[str, Any], **trainer_options: Any) -> list[float]:
    trainer(tmp_path, [SkipAwareLR(**options), TokenCounters()], **trainer_options).fit(module, loader(TOKENS))
    return [round(lr / PEAK, 6) for lr in module.lrs]


def test_by_updates_the_rate_stands_still_on_a_skip(tmp_path: Path) -> None:
    options = {"shape": "linear", "total_updates": 4, "floor_share": 0.5}
    assert _lrs(tmp_path, Module({1: VETO, 2: VETO}), options) == [1.0, 0.875, 0.875, 0.875, 0.75, 0.625]


def test_by_tokens_updated_it_stands_still_and_by_tokens_seen_it_goes_on(tmp_path: Path) -> None:
    options = {"shape": "linear", "total_tokens": 100, "floor_share": 0.0}
    skips = {1: VETO}
    assert _lrs(tmp_path, Module(skips), options | {"by": "tokens_updated"}) == [1.0, 0.95, 0.95, 0.84, 0.71, 0.54]
    assert _lrs(tmp_path, Module(skips), options | {"by": "tokens_seen"}) == [1.0, 0.95, 0.88, 0.77, 0.64, 0.47]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_warm_up_in_tokens_counts_the_tokens_of_the_update_itself(tmp_path: Path, is_first: bool) -> None:
    """The first window trains at its share of the warm-up, whichever callback runs first, and the last at the peak."""
    schedule = SkipAwareLR(shape="constant", by="tokens_seen", total_tokens=100, warmup_tokens=40)
    counters, module = TokenCounters(), Module()
    callbacks = [schedule, counters] if is_first else [counters, schedule]
    trainer(tmp_path, callbacks).fit(module, loader(TOKENS))  # 5, 12, 23, 36, 53 tokens after each window
    assert [round(lr / PEAK, 6) for lr in module.lrs] == [0.125, 0.3, 0.575, 0.9, 1.0, 1.0]
    assert counters.tokens_seen == sum(TOKENS)


def test_the_end_comes_from_max_steps_and_shares_are_shares_of_it(tmp_path: Path) -> None:
    options = {"shape": "wsd", "warmup_share": 0.5, "decay_share": 0.5, "floor_share": 0.5}
    assert _lrs(tmp_path, Module(), options, max_steps=4) == [0.5, 1.0, 1.0, 0.75]


def test_a_constant_needs_no_end(tmp_path: Path) -> None:
    assert _lrs(tmp_path, Module(), {"shape": "constant", "warmup_updates": 2}) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_every_group_keeps_its_own_peak_and_is_logged_by_name(tmp_path: Path) -> None:
    class Groups(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            weight, bias = self.parameters()
            return torch.optim.AdamW(
                [{"params": [weight], "lr": 0.2, "name": "weights"}, {"params": [bias], "lr": 0.02, "name": "biases"}]
            )

    run = trainer(tmp_path, [TokenCounters(), SkipAwareLR(shape="linear", total_updates=10, floor_share=0.0)])
    run.fit(Groups(), loader(TOKENS))
    logged = {key: float(value) for key, value in run.logged_metrics.items() if key.startswith("optim/")}
    assert logged == pytest.approx({"optim/lr": 0.1, "optim/lr_biases": 0.01, "optim/lr_factor": 0.5})


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
def test_a_resumed_run_goes_on_with_its_clock_and_the_peak_that_it_was_given(tmp_path: Path) -> None:
    options = {"shape": "linear", "total_updates": 10, "floor_share": 0.0}
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run = trainer(tmp_path, [saver, SkipAwareLR(**options), TokenCounters()], enable_checkpointing=True)
    run.fit(Module({1: VETO}), loader(TOKENS))
    for lr in (PEAK, 10 * PEAK):
        module = Module(lr=lr)
        trainer(tmp_path, [TokenCounters(), SkipAwareLR(**options)]).fit(
            module, loader(TOKENS), ckpt_path=tmp_path / "step=3.ckpt", weights_only=True
        )
        assert module.lrs == pytest.approx([lr * 0.8, lr * 0.7, lr * 0.6])


def test_it_survives_fit_twice_with_the_same_optimizer(tmp_path: Path) -> None:
    class Keeping(Module):
        kept: torch.optim.Optimizer | None = None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.kept = self.kept or super().configure_optimizers()
            return self.kept

    module, schedule = Keeping(), SkipAwareLR(shape="linear", total_updates=12, floor_share=0.0)
    run = trainer(tmp_path, [TokenCounters(), schedule])
    run.fit(module, loader(TOKENS))
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(TOKENS))
    assert module.lrs == pytest.approx([PEAK * (12 - updates) / 12 for updates in range(12)])
    assert module.kept is not None
    assert module.kept.param_groups[0]["lr"] == PEAK


def test_its_state_comes_back(tmp_path: Path) -> None:
    schedule = SkipAwareLR(total_updates=5)
    trainer(tmp_path, [TokenCounters(), schedule]).fit(Module(), loader(TOKENS))
    state = schedule.state_dict()
    assert state == {"version": 1, "peaks": {"0": PEAK}, "replays": 0}
    again = SkipAwareLR(total_updates=5)
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="version 99"):
        again.load_state_dict({"version": 99})


@pytest.mark.parametrize(
    ("module", "callbacks", "options", "words"),
    [
        (Module(), [SkipAwareLR()], {"max_steps": 3}, r"add TokenCounters\(\)"),
        (Module(), [SkipAwareLR(), TokenCounters()], {}, "total_updates, or max_steps"),
        (Module(), [SkipAwareLR(by="tokens_seen"), TokenCounters()], {"max_steps": 3}, "give total_tokens$"),
        (
            Module(has_scheduler=True),
            [SkipAwareLR(), TokenCounters()],
            {"max_steps": 3},
            "1 LR schedulers, but shape 'cosine'",
        ),
        (Module(), [SkipAwareLR(shape="own"), TokenCounters()], {}, "returns no LR scheduler"),
        (
            Module(),
            [SkipAwareLR(max_replays=1), TokenCounters()],
            {"max_steps": 3},
            "precision 32-true has no gradient",
        ),
        (
            Module(),
            [SkipAwareLR(max_replays=1), TokenCounters()],
            {"max_steps": 3, "plugins": [half_precision()], "accumulate_grad_batches": 2},
            "only the last batch",
        ),
    ],
)
def test_what_a_project_lacks_is_said_before_training(
    tmp_path: Path, module: Module, callbacks: list[pl.Callback], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, callbacks, **options).fit(module, loader(TOKENS))
    assert module.indices == []


# ---- the project's own schedulers


def test_own_schedulers_are_called_after_updates_only(tmp_path: Path) -> None:
    module = Module({1: OVERFLOW, 2: OVERFLOW, 4: VETO}, has_scheduler=True)
    lrs = _lrs(tmp_path, module, {"shape": "own"}, plugins=[half_precision()])
    assert lrs == [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert "lr_scheduler_step" not in vars(module)


def test_own_schedulers_of_epochs_are_left_alone(tmp_path: Path) -> None:
    class Epochs(Module):
        def configure_optimizers(self) -> Any:
            configured = super().configure_optimizers()
            configured["lr_scheduler"]["interval"] = "epoch"
            return configured

    module = Epochs(dict.fromkeys(range(6), VETO), has_scheduler=True)
    trainer(tmp_path, [TokenCounters(), SkipAwareLR(shape="own")], max_epochs=2).fit(module, loader(TOKENS))
    assert [lr / PEAK for lr in module.lrs] == [1.0] * 6 + [0.5] * 6


# ---- replays


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_overflowed_window_is_run_again_and_counted_once(tmp_path: Path, is_fused: bool) -> None:
    # 2**10 x the loss overflows, half of it does not.
    class Borderline(Module):
        def loss(self, batch: dict[str, Any]) -> torch.Tensor:
            loss = super().loss(batch)
            return (
                loss * 1e37
                if self.index == 2 and float(self.trainer.precision_plugin.scaler.get_scale()) > 512
                else loss
            )

    module = Borderline(fused=is_fused)
    counters, schedule = TokenCounters(), SkipAwareLR(shape="linear", total_updates=10, floor_share=0.0, max_replays=2)
    run = trainer(tmp_path, [counters, schedule], plugins=[half_precision()])
    run.fit(module, loader(TOKENS))
    assert module.indices == [0, 1, 2, 2, 3, 4, 5]
    assert run.global_step == 6
    assert counters.checkpoint_counters() == {"step": 6, "tokens_seen": 72, "updates": 6, "tokens_updated": 72}
    assert schedule.state_dict()["replays"] == 1
    assert float(run.logged_metrics["optim/replays"]) == 1
    assert "optimizer_step" not in vars(module)


def test_a_window_that_overflows_again_and_again_is_skipped(tmp_path: Path) -> None:
    module = Module({2: OVERFLOW})
    counters, schedule = TokenCounters(), SkipAwareLR(total_updates=10, max_replays=2)
    trainer(tmp_path, [counters, schedule], plugins=[half_precision()]).fit(module, loader(TOKENS))
    assert module.indices == [0, 1, 2, 2, 2, 3, 4, 5]
    assert counters.skips == {"scaler_overflow": 1}


def test_an_exception_gives_the_hooks_and_the_peak_back(tmp_path: Path) -> None:
    class Broken(Module):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise ZeroDivisionError
            return self.loss(batch)

    module = Broken()
    run = trainer(tmp_path, [TokenCounters(), SkipAwareLR(total_updates=3, max_replays=1)], plugins=[half_precision()])
    with pytest.raises(ZeroDivisionError):
        run.fit(module, loader(TOKENS))
    assert "optimizer_step" not in vars(module)
    assert run.optimizers[0].param_groups[0]["lr"] == PEAK


# ---- several ranks


def _fit_zero_on_rank(directory: str) -> tuple[list[float], list[float]]:
    class Zero(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=1.0)

        def loss(self, batch: dict[str, Any]) -> torch.Tensor:
            self.index = int(batch["index"])
            return sum(parameter.sum() for parameter in self.parameters())  # a gradient of 1 everywhere

    module, weights = Zero(), []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            weights.append(float(module.linear.weight[0, 0].detach()))

    weights.append(float(module.linear.weight[0, 0].detach()))
    schedule = SkipAwareLR(shape="linear", by="tokens_updated", total_tokens=1500, floor_share=0.0)
    trainer(directory, [TokenCounters(), schedule, Look()], devices=2, strategy="ddp").fit(
        module, loader(TOKENS, dist.get_rank())
    )
    return [before - after for before, after in pairwise(weights)], module.lrs


def test_an_optimizer_around_another_really_steps_with_the_rate_of_the_schedule(tmp_path: Path) -> None:
    tokens_before = [0, 11, 26, 49, 76, 111]
    for steps, lrs in run_ranks(_fit_zero_on_rank, 2, str(tmp_path)):
        assert steps == pytest.approx([1 - tokens / 1500 for tokens in tokens_before], abs=1e-5)
        assert lrs == pytest.approx(steps, abs=1e-5)
