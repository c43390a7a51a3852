"""Which steps count in the rate of a run, and what MFU is computed from."""

import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from clock_runs import LIGHTNING_WARNINGS, Module, loader, trainer

from genesis_callbacks import Throughput, throughput
from genesis_callbacks.base.errors import UserError
from genesis_callbacks.step_parts import timing

pytestmark = LIGHTNING_WARNINGS

TOKENS = [5, 7, 11, 13, 17, 19]


class Clock:
    """A clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(throughput.time, "perf_counter", lambda: self.seconds)


class Timed(Module):
    """Each step takes a second of a clock; `first` more in the first step."""

    def __init__(self, clock: Clock, first: float = 0.0) -> None:
        super().__init__()
        self.clock, self.first = clock, first

    def training_step(self, batch, batch_idx):
        self.clock.seconds += 1.0 + (self.first if batch_idx == 0 else 0.0)
        return super().training_step(batch, batch_idx)


class Rates(pl.Callback):
    """Remembers what each step has logged."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        logged = {key: value for key, value in trainer.callback_metrics.items() if key.startswith("train/")}
        self.rows[trainer.global_step] = {key: float(value) for key, value in logged.items()}
        trainer.callback_metrics.clear()


def fit(tmp_path: Path, module: pl.LightningModule, own: Throughput, *others: pl.Callback, **options):
    rates = Rates()
    trainer(tmp_path, [own, *others, rates], enable_checkpointing=bool(others), **options).fit(module, loader(TOKENS))
    return rates.rows


def test_the_first_step_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fit(tmp_path, Timed(Clock(monkeypatch), first=60.0), Throughput(), log_every_n_steps=3)
    assert rows[3] == {"train/tokens_per_second": (7 + 11) / 2}
    assert rows[6] == {"train/tokens_per_second": (13 + 17 + 19) / 3}


def test_the_step_after_a_save_and_the_time_of_a_generation_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)

    class Save(pl.callbacks.Checkpoint):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                clock.seconds += 500.0

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            with timing(trainer, "generation"), timing(trainer, "generation"):
                clock.seconds += 30.0

    rows = fit(tmp_path, Timed(clock), Throughput(), Save(), log_every_n_steps=3)
    assert rows[3] == {"train/tokens_per_second": (7 + 11) / 2}
    assert rows[6] == {"train/tokens_per_second": (17 + 19) / 2}
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["genesis_callbacks.Throughput"]
    assert state == {"version": 1, "tokens": 0, "flops": 0.0, "seconds": 0.0}


def test_the_state_continues_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Throughput()
    own.load_state_dict({"version": 1, "tokens": 100, "flops": 0.0, "seconds": 10.0})
    own.on_train_start = lambda trainer, module: (  # as in a run that resumes at a later step
        vars(own).update(_last_seconds=time.perf_counter(), _has_run=True)
    )
    rows = fit(tmp_path, Timed(Clock(monkeypatch)), own, log_every_n_steps=3)
    assert rows[3] == {"train/tokens_per_second": (100 + 7 + 11) / 12}
    with pytest.raises(UserError, match="version 9"):
        own.load_state_dict({"version": 9})


def test_a_log_line_without_a_believed_step_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fit(tmp_path, Timed(Clock(monkeypatch)), Throughput(), log_every_n_steps=1)
    assert rows[1] == {}
    assert rows[2] == {"train/tokens_per_second": 7.0}


def test_mfu_is_the_batches_arithmetic_over_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Throughput(flops_per_token=10.0, peak_flops=400.0)
    rows = fit(tmp_path, Timed(Clock(monkeypatch)), own, log_every_n_steps=3)
    assert rows[3]["train/mfu"] == pytest.approx(10.0 * 9 / 400)
    rows = fit(tmp_path, Timed(Clock(monkeypatch)), Throughput(flops_fn=lambda batch: 44.0, peak_flops=400.0))
    assert rows[4]["train/mfu"] == pytest.approx(0.11)


def test_a_module_that_does_not_know_its_arithmetic_has_no_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Timed(Clock(monkeypatch))
    module.count_batch_flops = lambda batch: None
    rows = fit(tmp_path, module, Throughput(peak_flops=1.0))
    assert all("train/mfu" not in row for row in rows.values())


def test_an_unknown_device_has_no_mfu_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(throughput, "rank_zero_info", lines.append)
    monkeypatch.setattr(throughput, "name_device", lambda device: "NVIDIA Z1")

    class Trainer:
        class strategy:  # noqa: N801 - as an attribute
            root_device = torch.device("cuda")

        precision = "bf16-mixed"

    assert Throughput(flops_per_token=1.0)._find_peak(Trainer()) is None
    assert lines == ["the peak of 'NVIDIA Z1' for products of bfloat16 is not known: train/mfu is not logged"]
    monkeypatch.setattr(throughput, "name_device", lambda device: "NVIDIA A100-SXM4-80GB")
    assert Throughput(flops_per_token=1.0)._find_peak(Trainer()) == 312e12


@pytest.mark.parametrize("options", [{"peak_flops": 0.0}, {"flops_per_token": -1.0}])
def test_a_wrong_option_is_refused_with_its_value(options: dict) -> None:
    with pytest.raises(UserError, match=str(next(iter(options.values())))):
        Throughput(**options)
