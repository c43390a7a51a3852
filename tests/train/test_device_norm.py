"""The gradient's norm on the device: the same numbers as on the host, and refused where they could not be."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genesis.errors import UserError
from genesis.optim import OptimizerOptions
from genesis.train.module import GenesisModule
from genesis_callbacks import AsyncProcessCheckpoint, SkipAwareLR, TokenCounters
from genesis_callbacks.checkpoint import list_committed, read_tensors
from genesis_callbacks.testing import run_ranks
from tests.train.support import TINY, build_strategy, build_trainer, counters_of, loader, whole
from tests.train.test_step import PoisonOneRank

STEPS = 6
EMPTY, POISONED = 2, 3  # steps that are skipped, one after the other
MAX_NORM = 0.4  # so low that most windows are clipped


class Rates(pl.Callback):
    """Keeps the learning rate with which each step was made, and the log lines."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.lines: list[dict[str, float]] = []
        self.late: list[bool] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(
            lambda optimizer, *_: self.rates.append(optimizer.param_groups[0]["lr"])
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.late.append(not counters_of(trainer).is_settled)
        if trainer.global_step % 2 == 0:
            timed = ("per_second", "memory", "mfu")
            values = {k: float(v) for k, v in trainer.callback_metrics.items() if not any(t in k for t in timed)}
            self.lines.append(values)


def train(run_dir: str, gradient_norm: Any, strategy: str, precision: str, max_steps: int = STEPS) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = GenesisModule(TINY, OptimizerOptions(lr=1e-2), gradient_norm=gradient_norm)
    rates = Rates()
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, every_n_steps=4, keep_last=None, mode="sync")
    trainer = build_trainer(
        build_strategy(strategy),
        world_size,
        max_steps,
        [
            TokenCounters(),
            SkipAwareLR(total_updates=10, warmup_updates=5),
            PoisonOneRank(POISONED, world_size - 1),
            checkpoint,
            rates,
        ],
        gradient_clip_val=MAX_NORM,
        precision=precision,
        log_every_n_steps=2,
    )
    latest = checkpoint.latest()
    trainer.fit(module, loader(max_steps, rank, world_size, (EMPTY,)), ckpt_path=latest)
    tensors = {name: whole(parameter) for name, parameter in module.named_parameters()}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for parameter, state in trainer.optimizers[0].state.items():
        tensors |= {f"{names[parameter]}.{key}": whole(value) for key, value in state.items()}
    counters = counters_of(trainer)
    return {
        "tensors": tensors,
        "clocks": (counters.checkpoint_counters(), counters.skips),
        "rates": rates.rates,
        "lines": rates.lines,
        "late": rates.late,
        "log": module._training_log.state_dict(),
    }


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("replicated", "32-true"),
        pytest.param("full", "32-true", marks=pytest.mark.slow),
        pytest.param("full", "bf16-mixed", marks=pytest.mark.slow),
    ],
)
def test_clips_skips_clocks_rates_and_log_lines_are_those_of_the_host(
    tmp_path: Path, strategy: str, precision: str
) -> None:
    on_host, on_device = (
        run_ranks(train, 2, str(tmp_path / where), where, strategy, precision) for where in ("host", "device")
    )
    for host, device in zip(on_host, on_device, strict=True):
        assert host["clocks"][1] == {"no_valid_tokens": 1, "nonfinite_gradient": 1}
        assert device["clocks"] == host["clocks"]
        assert device["rates"] == host["rates"]
        assert device["log"] == host["log"]
        assert [set(line) for line in device["lines"]] == [set(line) for line in host["lines"]]
        for ours, expected in zip(device["lines"], host["lines"], strict=True):
            assert ours == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
        assert device["tensors"].keys() == host["tensors"].keys()
        assert all(torch.equal(device["tensors"][name], tensor) for name, tensor in host["tensors"].items())
        assert not any(host["late"])
        # A log line, a save, and a window that the host itself skips need no device; all others are read late.
        assert [step for step, is_late in enumerate(device["late"], start=1) if is_late] == [1, 5]
    saved, expected = (read_tensors(tmp_path / where / "checkpoints" / "step-00000004") for where in ("device", "host"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items() if not name.startswith("state."))


@pytest.mark.slow
def test_a_resume_may_change_the_option(tmp_path: Path) -> None:
    """The save at step 4 was made by the other option; the data begin again after it, in both runs alike."""
    ends = []
    for first, then in (("host", "host"), ("device", "host"), ("host", "device")):
        run_dir = str(tmp_path / f"{first}-{then}")
        run_ranks(train, 2, run_dir, first, "full", "32-true", 4)
        ends.append(run_ranks(train, 2, run_dir, then, "full", "32-true", STEPS)[0])
    for end in ends[1:]:
        assert end["clocks"] == ends[0]["clocks"]
        assert end["log"] == ends[0]["log"]
        assert all(torch.equal(end["tensors"][name], tensor) for name, tensor in ends[0]["tensors"].items())


def save_each_step(run_dir: str) -> dict[str, int]:
    checkpoint = AsyncProcessCheckpoint(run_dir=run_dir, every_n_steps=1, keep_last=None, mode="sync")
    callbacks = [TokenCounters(), PoisonOneRank(POISONED, 0), checkpoint]
    trainer = build_trainer(build_strategy("replicated"), 1, STEPS, callbacks)
    trainer.fit(GenesisModule(TINY, OptimizerOptions(lr=1e-2), gradient_norm="device"), loader(STEPS, 0, 1, (EMPTY,)))
    return counters_of(trainer).skips


def test_saves_after_skipped_windows_are_not_taken_for_stale_snapshots(tmp_path: Path) -> None:
    assert run_ranks(save_each_step, 1, str(tmp_path)) == [{"no_valid_tokens": 1, "nonfinite_gradient": 1}]
    assert len(list_committed(tmp_path / "checkpoints")) == STEPS


def refuse(strategy: str, optimizer: str, precision: str) -> str:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = GenesisModule(TINY, OptimizerOptions(name=optimizer), gradient_norm="device")  # type: ignore[arg-type]
    trainer = build_trainer(build_strategy(strategy), world_size, 1, [], precision=precision)
    with pytest.raises(UserError) as error:
        trainer.fit(module, loader(1, rank, world_size))
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "precision", "reason"),
    [
        (
            "replicated",
            "muon",
            "32-true",
            "optimizer.name is 'muon', which cannot skip a window on the device: use adamw; or set",
        ),
        pytest.param("zero1", "adamw", "32-true", "optimizer_states is 'sharded'", marks=pytest.mark.slow),
        pytest.param("offload", "adamw", "32-true", "cpu_offload is 1", marks=pytest.mark.slow),
        pytest.param("full", "adamw", "bf16-true", "precision is 'bf16-true'", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_skip_on_the_device_is_refused_by_name(
    strategy: str, optimizer: str, precision: str, reason: str
) -> None:
    for message in run_ranks(refuse, 2, strategy, optimizer, precision):
        assert reason in message
        assert message.startswith("model.gradient_norm is 'device' and ")
