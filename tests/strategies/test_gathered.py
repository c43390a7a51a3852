"""Parameters that stay gathered within a window: as many gathers as units, and the same bits as without."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from genesis.data.window import AccumulationWindow
from genesis.model.decoder import Decoder
from genesis.strategies import Sharded, gathered
from genesis.strategies.gathered import DeviceMemory, GatheringChoice, has_room
from genesis_callbacks import AsyncProcessCheckpoint, TokenCounters
from genesis_callbacks.checkpoint import read_tensors, verify
from genesis_callbacks.host_group import HostGroup, Pending
from genesis_callbacks.testing import run_ranks
from tests.train.support import TINY, build_module, build_trainer, loader, whole, window_of_rank

NUM_MICRO_BATCHES = 4
NUM_UNITS = TINY.num_layers + 1

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"shard": "grad_op"},
    "two_blocks": {"blocks_per_unit": 2, "max_gathers_in_flight": 1},
    "checkpointing": {"activation_checkpointing": "block"},
    "reduced_each": {"gradient_reduction": "micro_batch"},
    "offload": {"cpu_offload": True},
    "hybrid": {"shard": "hybrid", "ranks_per_shard_group": 2},
    "compiled": {"compile_blocks": True, "activation_checkpointing": "block"},
}


class CountGathers(pl.Callback):
    """Counts the gathers of each window, and the parameters that are gathered between windows."""

    def __init__(self) -> None:
        self.of_window: list[int] = []
        self.gathered_after: list[int] = []
        self.num_gathers = 0
        gather = _fsdp_param_group.foreach_all_gather

        def gather_counted(*arguments: Any, **options: Any) -> Any:
            self.num_gathers += 1
            return gather(*arguments, **options)

        _fsdp_param_group.foreach_all_gather = gather_counted

    def on_train_batch_start(self, *_: Any) -> None:
        self.num_gathers = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.of_window.append(self.num_gathers)
        self.gathered_after.append(sum(not isinstance(p, DTensor) for p in pl_module.parameters()))


def rank_and_world() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train(options: dict[str, Any], keep_gathered: Any, precision: str = "32-true", **more: Any) -> dict[str, Any]:
    rank, world_size = rank_and_world()
    gathers, module = CountGathers(), build_module(replace(TINY, dropout=0.2))
    trainer = build_trainer(
        Sharded(keep_gathered=keep_gathered, **options),
        world_size,
        3,
        [TokenCounters(), gathers],
        precision=precision,
        gradient_clip_val=0.5,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        **more,
    )
    trainer.fit(module, loader(3, rank, world_size), loader(1, rank, world_size))
    return {
        "tensors": {name: whole(parameter) for name, parameter in module.named_parameters()},
        "figures": {k: v for k, v in trainer.callback_metrics.items() if k.endswith(("loss", "grad_norm"))},
        "gathers": gathers.of_window,
        "gathered_after": gathers.gathered_after,
    }


@pytest.mark.parametrize(
    ("name", "precision", "world_size"),
    [
        ("full", "bf16-mixed", 2),
        *(pytest.param(name, "32-true", 2, marks=pytest.mark.slow) for name in OPTIONS if name != "hybrid"),
        pytest.param("full", "bf16-true", 2, marks=pytest.mark.slow),
        pytest.param("hybrid", "bf16-mixed", 4, marks=pytest.mark.slow),
    ],
)
def test_a_window_gathers_each_unit_once_and_gives_the_same_bits(name: str, precision: str, world_size: int) -> None:
    runs = (run_ranks(train, world_size, OPTIONS[name], is_kept, precision) for is_kept in (False, True))
    for freed, kept in zip(*runs, strict=True):
        assert kept["figures"] == freed["figures"]
        assert all(torch.equal(kept["tensors"][key], tensor) for key, tensor in freed["tensors"].items())
        assert kept["gathered_after"] == freed["gathered_after"] == [0, 0, 0]
        num_units = NUM_UNITS if name != "two_blocks" else 2
        assert set(kept["gathers"]) == {num_units}
        assert min(freed["gathers"]) >= 8 // world_size * num_units


class WindowsFrom(IterableDataset[AccumulationWindow]):
    """The windows of one rank from some step on, without end."""

    def __init__(self, first: int, rank: int, world_size: int) -> None:
        self.first, self.rank, self.world_size = first, rank, world_size

    def __iter__(self) -> Iterator[AccumulationWindow]:
        return (window_of_rank(step, self.rank, self.world_size) for step in count(self.first))


def train_and_save(run_dir: str, keep_gathered: Any, max_steps: int, has_failure: bool = False) -> dict[str, Any]:
    rank, world_size = rank_and_world()
    checkpoint = AsyncProcessCheckpoint(
        run_dir=run_dir, every_n_steps=2, keep_last=None, mode="thread", save_on_exception=True
    )
    callbacks = [TokenCounters(), checkpoint, *([FailWithinWindow()] if has_failure else [])]
    module = build_module(replace(TINY, dropout=0.2))
    trainer = build_trainer(Sharded(keep_gathered=keep_gathered), world_size, max_steps, callbacks)
    latest = checkpoint.latest()
    windows = WindowsFrom(2 if latest else 0, rank, world_size)
    trainer.fit(module, DataLoader(windows, batch_size=None), ckpt_path=latest)
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


class FailWithinWindow(pl.Callback):
    """Raises in the window of the last step, while the parameters are gathered."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.num_left = 6
            pl_module.decoder.norm.register_forward_hook(lambda *_: self._fail(pl_module))

    def _fail(self, pl_module: Any) -> None:
        self.num_left -= 1
        if self.num_left == 3:
            assert not any(isinstance(p, DTensor) for p in pl_module.decoder.blocks.parameters())
            raise ZeroDivisionError("within a window")


def save_in_a_failing_run(run_dir: str) -> None:
    with pytest.raises(ZeroDivisionError):
        train_and_save(run_dir, True, 5, True)


@pytest.mark.slow
def test_saves_and_resumes_are_the_same_bits_whether_parameters_stay_gathered(tmp_path: Path) -> None:
    """One run frees throughout; the other fails within a window, and goes on from its save without keeping."""
    freed = run_ranks(train_and_save, 2, str(tmp_path / "freed"), False, 5)
    run_ranks(save_in_a_failing_run, 2, str(tmp_path / "kept"))
    # Within a window parameters are not what they were at its end, so that the exception saves nothing.
    assert [path.name for path in (tmp_path / "kept" / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert verify(tmp_path / "kept" / "checkpoints" / "step-00000002", "deep")
    saved, expected = (read_tensors(tmp_path / run / "checkpoints" / "step-00000002") for run in ("kept", "freed"))
    assert [name for name in saved if name.startswith("model.")] == [n for n in expected if n.startswith("model.")]
    assert [n for n, tensor in expected.items() if n.startswith("model.") and not torch.equal(saved[n], tensor)] == []
    for resumed, tensors in zip(run_ranks(train_and_save, 2, str(tmp_path / "kept"), False, 5), freed, strict=True):
        assert [name for name, tensor in tensors.items() if not torch.equal(resumed[name], tensor)] == []


GIB = 1 << 30
BEFORE = DeviceMemory(free=20 * GIB, reserved=4 * GIB, allocated=3 * GIB, peak_allocated=3 * GIB)
AFTER = DeviceMemory(free=8 * GIB, reserved=16 * GIB, allocated=9 * GIB, peak_allocated=14 * GIB)


def test_there_is_room_if_free_memory_exceeds_the_gathered_bytes_by_a_fifth() -> None:
    """24 GiB for this process, 14 at the peak of a window before the optimizer had its 6: 4 are free."""
    assert has_room(BEFORE, AFTER, int(4 * GIB / 1.21))
    assert not has_room(BEFORE, AFTER, int(4 * GIB / 1.19))


def choose(monkeypatch: pytest.MonkeyPatch, keep: Any, device: str, num_without: int) -> bool:
    memory = iter([BEFORE, AFTER])
    monkeypatch.setattr(gathered, "read_device_memory", lambda device: next(memory, None))
    decoder = Decoder(TINY)
    choice = GatheringChoice(keep, torch.device(device))

    class Ranks(HostGroup):
        def sum(self, values: Any) -> Any:
            return Pending(torch.tensor([values[0] + num_without]), None)

    monkeypatch.setattr(gathered, "HostGroup", Ranks)
    was_kept = choice.is_kept
    for _ in range(2):
        choice.begin_window()
        choice.end_window(decoder, torch.bfloat16)
    assert was_kept == (keep is True)
    return choice.is_kept


def test_auto_keeps_parameters_if_every_rank_has_room_and_never_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, "auto", "cuda", 0)
    assert not choose(monkeypatch, "auto", "cuda", 1)
    assert not choose(monkeypatch, "auto", "cpu", 0)
    assert choose(monkeypatch, True, "cpu", 0)
    assert not choose(monkeypatch, False, "cuda", 0)
