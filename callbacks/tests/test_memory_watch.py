"""What is known of memory, transfers and disks, and what is left when memory runs out."""

import json
import os
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from clock_runs import LIGHTNING_WARNINGS, Module, loader, trainer
from torch import nn

from genesis_callbacks import MemoryWatch, memory_watch
from genesis_callbacks.checkpoint.device import DeviceMemory
from genesis_callbacks.memory_watch import (
    DiskBytes,
    DiskMeter,
    OutOfMemoryWarning,
    compute_slope,
    count_bytes,
    is_out_of_memory,
    read_disk_bytes,
)
from genesis_callbacks.testing import run_ranks

pytestmark = LIGHTNING_WARNINGS


class Rows(pl.Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self.rows.append({key: float(value) for key, value in trainer.callback_metrics.items()})


class Leak(Module):
    """Keeps 4 MB for each step."""

    def training_step(self, batch, batch_idx):
        self.kept = [*getattr(self, "kept", []), torch.ones(1 << 20)]
        return super().training_step(batch, batch_idx)


def fit_and_leak(directory: Path) -> dict[str, float]:
    rows = Rows()
    trainer(directory, [MemoryWatch(), rows]).fit(Leak(), loader([1] * 24))
    return rows.rows[-1]


def test_a_leak_shows_as_a_slope(tmp_path: Path) -> None:
    # In a process of its own: what other tests have freed would be used again, and no memory would grow.
    (last,) = run_ranks(fit_and_leak, 1, tmp_path)
    assert last["memory/resident_slope"] == pytest.approx(4 << 20, rel=0.3)
    assert last["memory/peak_bytes"] >= last["memory/resident_bytes"] - (1 << 20) > 1e8
    assert last["memory/major_page_faults"] >= 0
    assert not {"memory/allocated_bytes", "transfer/to_device_bytes"} & last.keys()


def test_figures_of_a_device_are_those_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_watch, "read_device_memory", lambda device: DeviceMemory(60, 100, 80, 25))
    figures = memory_watch.read_figures(torch.device("cuda"))
    assert figures["memory/fragmentation"] == 0.25
    assert [figures[f"memory/{name}_bytes"] for name in ("allocated", "reserved", "peak")] == [60.0, 100.0, 80.0]


def test_disk_throughput_counts_new_processes_and_survives_lost_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"self": DiskBytes(100, 0), "7": DiskBytes(0, 1000), "8": DiskBytes(5, 5)}
    now = [0.0]
    monkeypatch.setattr(memory_watch, "read_disk_bytes", counts.get)
    monkeypatch.setattr(memory_watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(DiskMeter, "_find_children", lambda self: ["7", "8", "9"])
    meter = DiskMeter()
    counts.update({"self": DiskBytes(300, 0), "7": DiskBytes(0, 10), "9": DiskBytes(0, 90)})  # 7 is another process now
    del counts["8"]
    now[0] = 2.0
    assert meter.take() == (100.0, 50.0)
    assert meter.take() is None


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="this kernel counts no bytes of disks")
def test_a_write_that_reaches_the_disk_is_counted(tmp_path: Path) -> None:
    before = read_disk_bytes("self")
    with (tmp_path / "data").open("wb") as file:
        file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    after = read_disk_bytes("self")
    assert before is not None
    assert after is not None
    assert after.write >= before.write
    assert read_disk_bytes("0") is None


@dataclass
class Window:
    ids: torch.Tensor
    more: tuple[torch.Tensor, ...]
    text: str = ""


def test_the_bytes_of_a_batch_are_those_of_its_tensors_at_any_depth() -> None:
    pair = namedtuple("pair", "a b")
    batch = {"x": torch.zeros(3), "w": Window(torch.zeros(2, dtype=torch.int64), (torch.zeros(1),)), "p": pair(1, "b")}
    assert count_bytes([batch, None, torch.zeros(5, dtype=torch.bool)]) == 12 + 16 + 4 + 5


def test_a_slope_needs_eight_points() -> None:
    assert compute_slope([]) is None
    assert compute_slope([(float(step), 1.0) for step in range(7)]) is None
    assert compute_slope([(1.0, 1.0)] * 9) is None


class Fails(Module):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.kept = nn.Parameter(torch.ones(513, 1021))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(batch, batch_idx)


def test_a_snapshot_lists_the_largest_tensors_when_memory_runs_out(tmp_path: Path) -> None:
    with (
        pytest.warns(OutOfMemoryWarning, match="memory ran out at step 1; .*rank-0.json lists"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        trainer(tmp_path, [MemoryWatch(tmp_path / "run")]).fit(Fails(), loader([1] * 3))
    found = json.loads((tmp_path / "run/memory/out-of-memory-rank-0.json").read_text())
    assert found["error"].startswith("CUDA out of memory")
    ours = {"device": "cpu", "dtype": "torch.float32", "shape": [513, 1021], "count": 1, "bytes": 4 * 513 * 1021}
    assert ours in found["tensors"]
    assert found["step"] == 1
    assert found["figures"]["memory/resident_bytes"] > 0


def test_a_snapshot_that_cannot_be_written_keeps_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a directory should be")
    with pytest.warns(OutOfMemoryWarning, match="its snapshot failed"), pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, [MemoryWatch(tmp_path / "run")]).fit(Fails(), loader([1] * 3))


def test_only_a_lack_of_memory_is_one() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
