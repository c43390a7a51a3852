"""The clocks: exact, the same on every rank, right about what was an update."""

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from clock_runs import EMPTY, LIGHTNING_WARNINGS, OVERFLOW, VETO, Module, half_precision, loader, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from genesis_callbacks import Heartbeat, Throughput
from genesis_callbacks.base.errors import UserError
from genesis_callbacks.heartbeats import read_heartbeats
from genesis_callbacks.testing import run_ranks
from genesis_callbacks.token_counters import (
    RankDisagreementError,
    SkippedWindowsWarning,
    TokenCounters,
    TooManySkipsError,
    count_tokens,
)

pytestmark = LIGHTNING_WARNINGS

TOKENS = [5, 7, 11, 13, 17, 19]


def _clocks(counters: TokenCounters) -> tuple[int, int, int, int]:
    return counters.step, counters.tokens_seen, counters.updates, counters.tokens_updated


def test_a_veto_is_a_skip_that_was_seen_and_changed_nothing(tmp_path: Path) -> None:
    counters = TokenCounters()
    trainer(tmp_path, [counters]).fit(Module({1: VETO, 4: VETO}), loader(TOKENS))
    assert _clocks(counters) == (6, sum(TOKENS), 4, sum(TOKENS) - 7 - 17)
    assert counters.skips == {"no_gradient": 2}
    assert counters.checkpoint_counters() == {"step": 6, "tokens_seen": 72, "updates": 4, "tokens_updated": 48}


def test_the_module_may_name_the_reason(tmp_path: Path) -> None:
    class Outspoken(Module):
        skip_reason: str | None = None

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            super().on_before_optimizer_step(optimizer)
            self.skip_reason = "nonfinite_gradient" if self.index in self.skips else None

    counters = TokenCounters()
    run = trainer(tmp_path, [counters])
    run.fit(Outspoken({2: VETO}), loader(TOKENS))
    assert counters.skips == {"nonfinite_gradient": 1}
    assert run.logged_metrics["counters/skips_nonfinite_gradient"] == 1


class SkippedData(Module):
    """Gives the reason of skipped data for some of its vetoes."""

    def __init__(self, skips: dict[int, str], skipped: set[int]) -> None:
        super().__init__(skips)
        self.skipped = skipped

    @property
    def skip_reason(self) -> str | None:
        return "skipped_data" if self.index in self.skipped else None


def test_skipped_data_neither_count_as_skips_in_a_row_nor_end_a_row(tmp_path: Path) -> None:
    counters = TokenCounters(max_consecutive_skips=2)
    veto_all = dict.fromkeys(range(1, 5), VETO)
    trainer(tmp_path, [counters]).fit(SkippedData(veto_all, {1, 2, 4}), loader(TOKENS))
    assert counters.skips == {"skipped_data": 3, "no_gradient": 1}
    with pytest.raises(TooManySkipsError, match=r"2 windows in a row .* step 5 for"):
        trainer(tmp_path, [counters]).fit(SkippedData(veto_all, {2, 3}), loader(TOKENS))


def test_the_last_update_is_known_through_skipped_data_and_a_restore(tmp_path: Path) -> None:
    counters = TokenCounters()
    trainer(tmp_path, [counters]).fit(SkippedData({3: VETO, 4: VETO, 5: VETO}, {4}), loader(TOKENS))
    state = counters.state_dict()
    assert (counters.step, counters.last_update_step, state["consecutive_skips"]) == (6, 3, 2)
    other = TokenCounters()
    other.load_state_dict(state)
    assert other.last_update_step == 3
    # A checkpoint of an earlier release.
    other.load_state_dict({name: value for name, value in state.items() if name != "last_update_step"})
    assert other.last_update_step == 4


def test_a_training_step_that_returns_none_is_a_skip(tmp_path: Path) -> None:
    counters = TokenCounters()
    with pytest.warns(UserWarning, match="returned `None`"):
        trainer(tmp_path, [counters]).fit(Module({3: EMPTY}), loader(TOKENS))
    assert _clocks(counters) == (6, 72, 5, 59)
    assert counters.skips == {"no_gradient": 1}


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_scaler_overflow_is_a_skip_for_fused_optimizers_too(tmp_path: Path, is_fused: bool) -> None:
    counters = TokenCounters()
    module = Module({1: OVERFLOW, 2: OVERFLOW} | ({} if is_fused else {4: VETO}), fused=is_fused)
    weights: list[Tensor] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            weights.append(module.linear.weight.detach().clone())

    trainer(tmp_path, [counters, Look()], plugins=[half_precision()]).fit(module, loader(TOKENS))
    assert counters.tokens_updated == 72 - 7 - 11 - (0 if is_fused else 17)
    assert counters.skips == {"scaler_overflow": 2} | ({} if is_fused else {"no_gradient": 1})
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[2], weights[3])


@pytest.mark.parametrize("is_fused", [False, True])
def test_manual_optimization_counts_alike(tmp_path: Path, is_fused: bool) -> None:
    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            optimizer = self.optimizers()
            assert not isinstance(optimizer, list)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    counters = TokenCounters()
    module = Manual({1: OVERFLOW, 4: OVERFLOW}, fused=is_fused)
    trainer(tmp_path, [counters], plugins=[half_precision()]).fit(module, loader(TOKENS))
    assert _clocks(counters) == (6, 72, 4, 72 - 7 - 17)
    assert counters.skips == {"scaler_overflow": 2}


def test_a_window_of_several_batches_is_one_step(tmp_path: Path) -> None:
    counters = TokenCounters()
    # Windows of batches (0 1) (2 3) (4 5) (6): Lightning steps at an epoch's end; 3 vetoes the second window.
    trainer(tmp_path, [counters], accumulate_grad_batches=2).fit(Module({3: VETO}), loader([1, 2, 4, 8, 16, 32, 64]))
    assert _clocks(counters) == (4, 127, 3, 127 - 12)


def test_several_optimizers_stepped_in_one_batch_are_one_step(tmp_path: Path) -> None:
    class Adversaries(Module):
        automatic_optimization = False

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            optimizers = self.optimizers()
            assert isinstance(optimizers, list)
            for optimizer in optimizers:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]

    counters = TokenCounters()
    run = trainer(tmp_path, [counters])
    run.fit(Adversaries(), loader(TOKENS))
    assert run.global_step == 12
    assert _clocks(counters) == (6, 72, 6, 72)


def test_too_many_skips_in_a_row_end_the_run_with_the_reason(tmp_path: Path) -> None:
    counters = TokenCounters(max_consecutive_skips=2)
    with pytest.raises(TooManySkipsError, match=r"2 windows in a row .* step 4 for 'no_gradient'.* update 1\."):
        trainer(tmp_path, [counters]).fit(Module({0: VETO, 2: VETO, 3: VETO}), loader(TOKENS))
    assert _clocks(counters) == (4, 36, 1, 7)


def test_by_default_a_hundred_skips_in_a_row_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(TooManySkipsError, match=r"100 windows in a row .* step 101 for"):
        trainer(tmp_path, [TokenCounters()]).fit(Module(dict.fromkeys(range(1, 120), VETO)), loader([1] * 120))


def test_a_run_with_skips_warns_at_its_end_how_many_there_were_and_why(tmp_path: Path) -> None:
    counters = TokenCounters()
    message = "5 of 6 windows were skipped and changed no parameter: 5 for no_gradient"
    with pytest.warns(SkippedWindowsWarning, match=message):
        trainer(tmp_path, [counters]).fit(Module(dict.fromkeys(range(1, 6), VETO)), loader(TOKENS))
    assert counters.updates == 1


def test_a_run_without_skips_warns_of_none(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    trainer(tmp_path, [TokenCounters()]).fit(Module({}), loader(TOKENS))
    assert not [warning for warning in recwarn if warning.category is SkippedWindowsWarning]


def test_logged_counts_are_exact_beyond_what_float32_holds(tmp_path: Path) -> None:
    counters = TokenCounters(count_fn=lambda batch: 2**40 + 1)
    run = trainer(tmp_path, [counters])
    run.fit(Module(), loader(TOKENS))
    assert int(run.logged_metrics["counters/tokens_seen"]) == 6 * (2**40 + 1)
    assert {key: int(value) for key, value in run.logged_metrics.items() if "tokens" not in key} == {
        "counters/step": 6,
        "counters/updates": 6,
        "counters/skips": 0,
    }


def test_a_wrong_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"count_fn is 'os\.getpid': give a function"):
        TokenCounters(count_fn="os.getpid")
    with pytest.raises(ValueError, match="max_consecutive_skips is 0"):
        TokenCounters(max_consecutive_skips=0)


def test_the_default_count_takes_the_batch_at_its_word_then_its_shape() -> None:
    ids = torch.tensor([[1, -100, 2]])
    assert count_tokens({"num_valid_tokens": 9, "labels": ids}) == 9
    assert count_tokens({"num_valid_tokens": torch.tensor(9)}) == 9
    assert count_tokens({"labels": ids}) == 3
    with pytest.raises(ValueError, match="batch of type list cannot be counted: give count_fn"):
        count_tokens([1, 2])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
def test_a_checkpoint_at_any_step_resumes_the_same_clocks(tmp_path: Path) -> None:
    skips = {1: VETO, 3: VETO, 4: VETO}
    whole = TokenCounters()
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer(tmp_path, [saver, whole], enable_checkpointing=True).fit(Module(skips), loader(TOKENS))
    for step in range(1, 6):
        state = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["callbacks"][whole.state_key]
        assert state["step"] == step
        assert state["tokens_seen"] == sum(TOKENS[:step])
        resumed = TokenCounters()
        checkpoint = tmp_path / f"step={step}.ckpt"
        trainer(tmp_path, [resumed]).fit(Module(skips), loader(TOKENS), ckpt_path=checkpoint, weights_only=True)
        # A loader without state begins again with its first batches.
        assert resumed.step == 6
        assert resumed.tokens_seen == sum(TOKENS[:step]) + sum(TOKENS[: 6 - step])
    assert _clocks(whole) == (6, 72, 3, 72 - 7 - 13 - 17)


def test_a_state_in_the_middle_of_a_window_keeps_its_tokens() -> None:
    counters = TokenCounters()
    counters._tokens_seen = counters._window_tokens = 5
    again = TokenCounters()
    again.load_state_dict(pickle.loads(pickle.dumps(counters.state_dict())))
    assert again.state_dict() == counters.state_dict()
    assert again.state_dict()["window_tokens"] == 5
    with pytest.raises(ValueError, match="version 99"):
        again.load_state_dict({"version": 99})


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
def test_a_checkpoint_without_counters_is_said_to_be_one(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(tmp_path, [saver], enable_checkpointing=True).fit(Module(), loader(TOKENS))
    counters = TokenCounters()
    with pytest.warns(UserWarning, match="at step 4 from a checkpoint without counters"):
        trainer(tmp_path, [counters]).fit(
            Module(), loader(TOKENS), ckpt_path=tmp_path / "step=4.ckpt", weights_only=True
        )
    assert counters.step == 6
    assert counters.updates == 2


def test_it_survives_fit_twice_and_leaves_no_hook(tmp_path: Path) -> None:
    counters, module = TokenCounters(), Module()
    run = trainer(tmp_path, [counters])
    run.fit(module, loader(TOKENS))
    assert run.optimizers[0]._optimizer_step_post_hooks == {}
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(TOKENS))
    assert _clocks(counters) == (12, 144, 12, 144)
    trainer(tmp_path, [counters]).fit(Module(), loader(TOKENS))
    assert _clocks(counters) == (6, 72, 6, 72)


def test_an_exception_leaves_no_hook_and_the_clocks_at_the_last_batch_that_ended(tmp_path: Path) -> None:
    class Broken(Module):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise ZeroDivisionError
            return self.loss(batch)

    counters = TokenCounters()
    run = trainer(tmp_path, [counters])
    with pytest.raises(ZeroDivisionError):
        run.fit(Broken(), loader(TOKENS))
    assert run.optimizers[0]._optimizer_step_post_hooks == {}
    assert _clocks(counters) == (2, 12, 2, 12)
    pickle.dumps(counters.state_dict())


# ---- several ranks


class Sharded(Module):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.linear, mesh=self.device_mesh["data_parallel"])


def _fit_on_rank(strategy: str, directory: str, skips: dict[int, str]) -> Any:
    counters = TokenCounters(max_consecutive_skips=2)
    is_sharded = strategy != "ddp"
    tensor_parallel = 2 if strategy == "tensor_parallel" else 1
    run = trainer(
        directory,
        [counters],
        devices=2,
        strategy=ModelParallelStrategy(2 // tensor_parallel, tensor_parallel) if is_sharded else "ddp",
    )
    rank = 0 if strategy == "tensor_parallel" else dist.get_rank()
    try:
        run.fit(Sharded(skips) if is_sharded else Module(skips), loader(TOKENS, rank))
    except TooManySkipsError as error:
        return str(error)
    return counters.state_dict()


@pytest.mark.parametrize("strategy", ["sharded", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ranks_with_uneven_tokens_hold_the_same_global_clocks(tmp_path: Path, strategy: str) -> None:
    first, second = run_ranks(_fit_on_rank, 2, strategy, str(tmp_path), {1: VETO})
    assert first == second
    assert first["tokens_seen"] == 2 * 72 + 6
    assert first["tokens_updated"] == first["tokens_seen"] - 15
    assert (first["step"], first["updates"]) == (6, 5)


def test_ranks_that_read_the_same_batch_count_it_once(tmp_path: Path) -> None:
    first, second = run_ranks(_fit_on_rank, 2, "tensor_parallel", str(tmp_path), {})
    assert first == second
    assert first["tokens_seen"] == 72


def test_all_ranks_end_the_run_alike(tmp_path: Path) -> None:
    first, second = run_ranks(_fit_on_rank, 2, "ddp", str(tmp_path), {2: VETO, 3: VETO})
    assert first == second
    assert "at step 4 for 'no_gradient'" in first


def _part_on_rank(directory: str, index: int) -> str:
    counters = TokenCounters()
    skips = {index: VETO} if dist.get_rank() == 1 else {}
    with pytest.raises(RankDisagreementError) as caught:
        trainer(directory, [counters], devices=2, strategy="ddp").fit(Module(skips), loader(TOKENS))
    return str(caught.value)


@pytest.mark.parametrize("index", [2, 5])
def test_ranks_that_part_are_told_so_even_in_the_last_window(tmp_path: Path, index: int) -> None:
    for message in run_ranks(_part_on_rank, 2, str(tmp_path), index):
        assert f"after step {index + 1} this rank counted" in message
        assert f"all 2 ranks {2 * index + 1}" in message


def test_a_unit_of_the_users_stands_wherever_something_is_counted_logged_saved_or_printed(tmp_path: Path) -> None:
    counters, rate = TokenCounters(count_fn=lambda batch: 1, unit="images"), Throughput()
    run = trainer(tmp_path, [counters, rate, Heartbeat(tmp_path, every_seconds=0.0)], log_every_n_steps=1)
    run.fit(Module(), loader(TOKENS))
    assert counters.checkpoint_counters() == {"step": 6, "images_seen": 6, "updates": 6, "images_updated": 6}
    assert {"counters/images_seen", "counters/images_updated", "train/images_per_second"} <= run.logged_metrics.keys()
    assert not any("token" in key for key in run.logged_metrics)
    (record,) = read_heartbeats(tmp_path).values()
    assert (record.unit, record.clocks["images_seen"]) == ("images", 6)
    assert "token" not in next((tmp_path / "heartbeats").glob("rank-*.json")).read_text()
    with pytest.raises(UserError, match="count images, and this run tokens: give unit='images'"):
        TokenCounters().load_state_dict(counters.state_dict())
    with pytest.raises(UserError, match="the images of a batch of type list cannot be counted: give count_fn"):
        TokenCounters(unit="images").count([1, 2])
    with pytest.raises(UserError, match="unit is 'my images': give a plural noun without spaces"):
        TokenCounters(unit="my images")
