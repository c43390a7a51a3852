"""Where the time of a step goes, on the host and on devices that are late, without a wait."""

import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from clock_runs import LIGHTNING_WARNINGS, Module, loader, trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from genesis_callbacks import StepTimer
from genesis_callbacks._step_timeline import StepTimeline
from genesis_callbacks.base.errors import UserError
from genesis_callbacks.step_parts import timing
from genesis_callbacks.step_timer import StepTimeWarning
from genesis_callbacks.testing import run_ranks

pytestmark = LIGHTNING_WARNINGS

SECONDS = 0.02


class Clock:
    """The time of the timer, which passes only while something sleeps: no part takes longer on a busy machine."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def perf_counter(self) -> float:
        return self.seconds


CLOCK = Clock()


@pytest.fixture
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genesis_callbacks._step_timeline.time", CLOCK)


class Slow(Module):
    def training_step(self, batch, batch_idx):
        CLOCK.sleep(2 * SECONDS)
        with timing(self.trainer, "communication"):
            CLOCK.sleep(SECONDS)
        return self.loss(batch)

    def backward(self, loss) -> None:
        CLOCK.sleep(3 * SECONDS)
        loss.backward()

    def on_before_optimizer_step(self, optimizer) -> None:
        CLOCK.sleep(SECONDS)


class Validated(Slow):
    def validation_step(self, batch, batch_idx) -> None:
        CLOCK.sleep(0.3)


class Data(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index):
        CLOCK.sleep(2 * SECONDS)
        return {"index": index, "x": torch.ones(4, 3), "num_valid_tokens": 1}


class Saver(Checkpoint):
    def on_train_batch_end(self, *_) -> None:
        CLOCK.sleep(SECONDS)


class Rows(pl.Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        row = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("time/")}
        self.rows += [row] if row else []


@pytest.mark.usefixtures("simulated_time")
def test_each_part_has_its_time_and_they_add_up_to_the_step(tmp_path: Path) -> None:
    timer, rows = StepTimer(), Rows()
    run = trainer(
        tmp_path, [timer, rows, Saver()], enable_checkpointing=True, log_every_n_steps=4, val_check_interval=2
    )
    run.fit(Validated(), DataLoader(Data(), batch_size=None), loader([1]))
    (row,) = rows.rows
    wanted = {"data_wait": 2, "forward": 2, "communication": 1, "backward": 3, "optimizer": 1, "save_stall": 1}
    for part, times in wanted.items():
        assert row[f"time/{part}_ms"] == pytest.approx(1e3 * SECONDS * times), part
    assert row["time/step_ms"] == pytest.approx(1e3 * SECONDS * 10)  # the 300 ms of a validation are in no part
    assert sum(value for key, value in row.items() if key != "time/step_ms") == pytest.approx(row["time/step_ms"])
    assert "start" not in vars(run.profiler)
    assert "backward" not in vars(run.strategy)


SLOW_SECONDS = 0.5
"""More than a busy machine keeps one of two ranks waiting, on average."""


class SlowOnRankOne(Module):
    """Each backward takes long on rank 1."""

    def on_train_start(self) -> None:
        if self.trainer.global_rank == 1:
            self.linear.weight.register_hook(lambda gradient: time.sleep(SLOW_SECONDS))


def fit_with_a_slow_rank(directory: Path) -> dict[str, float]:
    timer, rows = StepTimer(), Rows()
    run = trainer(
        directory, [timer, rows], strategy=DDPStrategy(process_group_backend="gloo"), devices=2, log_every_n_steps=3
    )
    module = SlowOnRankOne()
    run.fit(module, loader([1, 1, 1]))
    assert not any(each._post_accumulate_grad_hooks for each in module.parameters())
    return rows.rows[-1]


def test_under_ddp_the_wait_for_a_slow_rank_is_communication_and_no_backward(tmp_path: Path) -> None:
    fast, slow = run_ranks(fit_with_a_slow_rank, 2, tmp_path)
    assert fast["time/communication_ms"] > 800 * SLOW_SECONDS
    assert slow["time/backward_ms"] > 800 * SLOW_SECONDS
    assert slow["time/backward_ms"] > slow["time/communication_ms"]
    assert fast["time/communication_ms"] > fast["time/backward_ms"]


class Manual(Slow):
    automatic_optimization = False

    def training_step(self, batch, batch_idx) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


@pytest.mark.usefixtures("simulated_time")
def test_manual_optimization_and_accumulation_have_their_steps(tmp_path: Path) -> None:
    # In units of SECONDS; the first step is no interval yet.
    manual = {"backward": 3 * 5, "optimizer": 1 * 5}
    accumulated = {"forward": 2 * 4, "communication": 1 * 4, "backward": 3 * 4, "optimizer": 1 * 2}
    for module, options, num_steps, sums in (
        (Manual(), {}, 5, manual),
        (Slow(), {"accumulate_grad_batches": 2}, 2, accumulated),
    ):
        module.on_before_optimizer_step = lambda optimizer: CLOCK.sleep(SECONDS)
        timer, rows = StepTimer(), Rows()
        trainer(tmp_path, [timer, rows], log_every_n_steps=100, **options).fit(module, loader([1] * 6))
        state = timer.state_dict()
        assert state["num_steps"] == num_steps
        found = {part: value / (1e3 * SECONDS) for part, value in state["sums_ms"].items() if value}
        assert found == pytest.approx(sums)


def test_the_state_continues_an_interval() -> None:
    timer = StepTimer()
    assert timer.state_dict() == {}
    state = {"version": 1, "num_steps": 3, "sums_ms": {"forward": 30.0, "unknown": 1.0}}
    timer.load_state_dict(state)
    assert timer.state_dict() == {"version": 1, "num_steps": 3, "sums_ms": {"forward": 30.0}}
    assert timer._take() == {"time/step_ms": 10.0, "time/forward_ms": 10.0}
    with pytest.raises(UserError, match="version 2"):
        timer.load_state_dict({"version": 2})


def test_steps_that_become_slower_are_reported_once_for_each_cause() -> None:
    timer = StepTimer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for data_wait, backward in [(1.0, 9.0)] * 100 + [(6.0, 9.5)] * 300 + [(1.0, 30.0)] * 200:
            timer._judge({"data_wait": data_wait, "backward": backward})
    assert [warning.category for warning in caught] == [StepTimeWarning] * 2
    assert str(caught[0].message) == (
        "steps take 15.5 ms, 1.55 times as long as before (10 ms); data_wait rose most, by 5 ms: more loader workers, "
        "or a prepared corpus"
    )
    assert "backward rose most" in str(caught[1].message)


class LateMarks:
    """A device that passes its marks only when the test says so, and fails if it is asked for times before."""

    def __init__(self) -> None:
        self.made, self.passed, self.free = 0, -1, []

    def mark(self) -> int:
        self.made += 1
        return self.made

    def has_passed(self, mark: int) -> bool:
        return mark <= self.passed

    def measure_ms(self, begin: int, end: int) -> float:
        assert end <= self.passed
        return float(end - begin)

    def give_back(self, marks) -> None:
        self.free += marks


def test_a_device_is_read_late_and_marks_are_given_back_once() -> None:
    timeline = StepTimeline(torch.device("cpu"))
    timeline._marks = marks = LateMarks()
    timeline.start()
    for _ in range(3):
        timeline.begin("forward")
        timeline.begin("backward")
        timeline.end()
        timeline.end()
        timeline.end_step()
    assert timeline.read() == []
    marks.passed = marks.made - 1
    first, second = timeline.read()
    assert first == second == {"other": 2.0, "forward": 2.0, "backward": 1.0}
    marks.passed = marks.made
    assert timeline.read() == [first]
    assert sorted(marks.free) == list(range(1, marks.made))


def test_a_device_that_never_passes_keeps_few_steps() -> None:
    timeline = StepTimeline(torch.device("cpu"))
    timeline._marks = LateMarks()
    timeline.start()
    for _ in range(1000):
        timeline.end_step()
    assert len(timeline._open) == 64


def test_a_wrong_limit_is_refused() -> None:
    with pytest.raises(UserError, match=r"warn_above is 0\.5"):
        StepTimer(warn_above=0.5)
