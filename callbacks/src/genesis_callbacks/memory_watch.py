"""Logs memory of device and host, what moves between them and to disks, and keeps a snapshot when memory runs out.

    logged                            unit and meaning
    memory/allocated_bytes            tensors on the device at the end of the step; absent on the CPU
    memory/reserved_bytes             what the device's allocator holds
    memory/peak_bytes                 the most that tensors took since the start; on the CPU the most resident memory
    memory/fragmentation              unused pieces of used blocks over reserved_bytes, a fraction 0..1
    memory/resident_bytes             resident memory of the process
    memory/resident_slope             bytes by which it grows for each step, over the last 64 log lines
    memory/major_page_faults          pages that the process waited for a disk to read, since the last log line
    transfer/to_device_bytes          bytes of the batches that went to the device, mean of a step; time/transfer_ms is
                                      their time
    transfer/to_host_bytes            bytes that saves copied from the device, mean of a step
    disk/read_bytes_per_second        from disks, by the process and those that it started
    disk/write_bytes_per_second       to disks, likewise

Figures are those of rank 0. They are read at log lines only, from counters of the host, without a wait for the device.
Does it communicate? No.

When memory runs out, each rank that it happens to writes `RUN/memory/out-of-memory-rank-N.json` (the largest kinds of
tensors and the figures above) and on CUDA `...-N.pickle`, which https://docs.pytorch.org/memory_viz shows. The kernel's
out-of-memory killer leaves no time for a snapshot: then the last `memory/resident_bytes` is what is known.
"""

import gc
import json
import os
import resource
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from ._argument_types import checking
from ._compat import dump_memory_snapshot, local_tensor
from ._log_lines import is_log_step, log_exact
from .async_process_checkpoint import AsyncProcessCheckpoint
from .base.files import replace_file
from .base.run_directory import RunDirectory, read_run_dir
from .checkpoint.device import is_host, read_device_memory
from .phases import find_callbacks

__all__ = ["MemoryWatch", "OutOfMemoryWarning"]

_SLOPE_POINTS: Final = 64
_MIN_SLOPE_POINTS: Final = 8
_LISTED_KINDS: Final = 40

_PROC: Final = Path("/proc")
_MAXRSS_UNIT_BYTES: Final = 1 if sys.platform == "darwin" else 1024
_FIND_CHILDREN_SECONDS: Final = 10.0


class OutOfMemoryWarning(UserWarning):
    """Memory has run out; the text has the path of the snapshot, or the reason why there is none."""


class MemoryWatch(pl.Callback):
    """Logs memory every `log_every_n_steps`.

    A resumed run is another process with other memory, so there is no state to save.

    Args:
        run_dir: The run's directory, for snapshots; by default the Trainer's `default_root_dir`.
    """

    @checking
    def __init__(self, run_dir: str | Path | None = None) -> None:
        super().__init__()
        self._run_dir = None if run_dir is None else read_run_dir(run_dir)
        self._points: deque[tuple[float, float]] = deque(maxlen=_SLOPE_POINTS)
        self._disk: DiskMeter | None = None
        self._savers: list[AsyncProcessCheckpoint] = []
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._num_steps, self._sent_bytes, self._staged_bytes = 0, 0, 0
        self._faults = read_major_faults()
        self._last_step = step

    # ---- hooks

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to count."""
        self._savers = find_callbacks(trainer, AsyncProcessCheckpoint)
        self._last_saved = [each.last_saved for each in self._savers]
        self._points.clear()
        self._disk = DiskMeter()
        self._reset(trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the transfers of the step, and logs at the steps of the log."""
        device = trainer.strategy.root_device
        if not is_host(device):
            self._sent_bytes += count_bytes(batch)
            self._count_saves()
        if is_log_step(trainer):
            log_exact(pl_module, self._take(trainer.global_step, device))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Writes a snapshot if memory has run out."""
        if not is_out_of_memory(exception):
            return
        directory = RunDirectory(self._run_dir or Path(trainer.default_root_dir)).memory
        path = directory / f"out-of-memory-rank-{trainer.global_rank}.json"
        device = trainer.strategy.root_device
        try:
            directory.mkdir(parents=True, exist_ok=True)
            described = describe_memory(device, trainer.global_step, str(exception))
            replace_file(path, json.dumps(described, indent=1).encode("utf-8", "replace"))
            if not is_host(device):
                dump_memory_snapshot(torch.get_device_module(device), path.with_suffix(".pickle"))
            text = f"memory ran out at step {trainer.global_step}; {path} lists the largest tensors"
        except (OSError, MemoryError, RuntimeError) as error:  # the user's error matters more than its snapshot
            text = f"memory ran out at step {trainer.global_step}, and its snapshot failed: {error}"
        warnings.warn(text, OutOfMemoryWarning, stacklevel=2)

    # ---- parts of the hooks

    def _count_saves(self) -> None:
        for index, saver in enumerate(self._savers):
            if saver.last_saved != self._last_saved[index]:
                self._last_saved[index] = saver.last_saved
                self._staged_bytes += saver.statistics.last_staged_bytes

    def _take(self, step: int, device: torch.device) -> dict[str, float]:
        values = read_figures(device)
        num_steps = max(1, step - self._last_step)
        values["memory/major_page_faults"] = float(read_major_faults() - self._faults)
        if "memory/resident_bytes" in values:
            self._points.append((float(step), values["memory/resident_bytes"]))
        slope = compute_slope(self._points)
        if slope is not None:
            values["memory/resident_slope"] = slope
        if not is_host(device):
            values["transfer/to_device_bytes"] = self._sent_bytes / num_steps
            values["transfer/to_host_bytes"] = self._staged_bytes / num_steps
        rates = None if self._disk is None else self._disk.take()
        if rates is not None:
            values["disk/read_bytes_per_second"], values["disk/write_bytes_per_second"] = rates
        self._reset(step)
        return values


def read_figures(device: torch.device) -> dict[str, float]:
    """Returns the memory of this process at this time by metric key."""
    memory, resident = read_device_memory(device), read_resident_bytes()
    values: dict[str, float] = {}
    if memory is not None:
        values["memory/allocated_bytes"] = float(memory.allocated)
        values["memory/reserved_bytes"] = float(memory.reserved)
        values["memory/fragmentation"] = memory.split / memory.reserved if memory.reserved else 0.0
    values["memory/peak_bytes"] = float(read_peak_resident_bytes() if memory is None else memory.peak)
    if resident is not None:
        values["memory/resident_bytes"] = float(resident)
    return values


def compute_slope(points: Iterable[tuple[float, float]]) -> float | None:
    """Returns the slope of the line through (step, bytes) with the least squares; None for too few points.

    Example:
        >>> compute_slope([(float(step), 100.0 + 3.0 * step) for step in range(8)])
        3.0
    """
    steps, sizes = zip(*points, strict=True) if (points := list(points)) else ((), ())
    if len(steps) < _MIN_SLOPE_POINTS or len(set(steps)) < 2:
        return None
    return float(statistics.linear_regression(steps, sizes).slope)


def count_bytes(batch: Any) -> int:
    """Returns the bytes of the tensors in a batch: in containers, dataclasses and named tuples, at any depth."""
    if isinstance(batch, Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, Mapping):
        return sum(count_bytes(value) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(count_bytes(value) for value in batch)
    if is_dataclass(batch):
        return sum(count_bytes(getattr(batch, field.name)) for field in fields(batch) if field.compare)
    return 0


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that device or host has no memory left."""
    is_host_allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or is_host_allocator


def describe_memory(device: torch.device, step: int, error: str) -> dict[str, Any]:
    """Returns what is known of this process's memory: figures, and its tensors by shape, dtype and device."""
    kinds: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for found in gc.get_objects():
        if not issubclass(type(found), Tensor):  # not `isinstance`, which runs code of proxies
            continue
        tensor = local_tensor(found)
        kind = kinds.setdefault((str(tensor.device), str(tensor.dtype), tuple(tensor.shape)), [0, 0])
        kind[0] += 1
        kind[1] += tensor.numel() * tensor.element_size()
    largest = sorted(kinds.items(), key=lambda item: -item[1][1])[:_LISTED_KINDS]
    return {
        "step": step,
        "error": error,
        "figures": read_figures(device),
        "tensors": [
            {"device": where, "dtype": dtype, "shape": list(shape), "count": count, "bytes": num_bytes}
            for (where, dtype, shape), (count, num_bytes) in largest
        ],
    }


def read_resident_bytes() -> int | None:
    """Returns the resident memory of this process."""
    try:
        pages = int((_PROC / "self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize()


def read_peak_resident_bytes() -> int:
    """Returns the most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES


def read_major_faults() -> int:
    """Returns how many pages this process has waited for a disk to read."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class DiskBytes(NamedTuple):
    """Bytes that reached or left disks, since a process began."""

    read: int
    write: int


class DiskMeter:
    """Measures the disk throughput of this process and the processes that its main thread has started.

    Bytes that the page cache serves, and file systems that count nothing (many network file systems), are not seen.
    """

    def __init__(self) -> None:
        self._children: list[str] = []
        self._found_seconds = -_FIND_CHILDREN_SECONDS
        self._before: dict[str, DiskBytes] = {}
        self._before_seconds = time.monotonic()
        self._before = self._read()

    def take(self) -> tuple[float, float] | None:
        """Returns bytes read and written per second since the last call; None where the kernel does not count."""
        now, now_seconds = self._read(), time.monotonic()
        seconds = now_seconds - self._before_seconds
        before, self._before, self._before_seconds = self._before, now, now_seconds
        if not now or seconds <= 0:
            return None
        zero = DiskBytes(0, 0)
        deltas = [(after, before.get(process, zero)) for process, after in now.items()]
        # A process number may be used again: then the counts begin again, too.
        read = sum(after.read - first.read if after.read >= first.read else after.read for after, first in deltas)
        write = sum(after.write - first.write if after.write >= first.write else after.write for after, first in deltas)
        return read / seconds, write / seconds

    def _read(self) -> dict[str, DiskBytes]:
        counts = {process: read_disk_bytes(process) for process in ("self", *self._find_children())}
        return {process: count for process, count in counts.items() if count is not None}

    def _find_children(self) -> list[str]:
        if time.monotonic() - self._found_seconds >= _FIND_CHILDREN_SECONDS:
            self._found_seconds = time.monotonic()
            try:
                self._children = (_PROC / f"self/task/{os.getpid()}/children").read_text("ascii").split()
            except OSError:
                self._children = []
        return self._children


def read_disk_bytes(process: str) -> DiskBytes | None:
    """Returns the counts of a process; None if it is gone, belongs to another user, or is not counted."""
    try:
        lines = (_PROC / process / "io").read_text("ascii").splitlines()
        counts = dict(line.split(": ", 1) for line in lines)
        return DiskBytes(int(counts["read_bytes"]), int(counts["write_bytes"]))
    except (OSError, ValueError, KeyError):
        return None
