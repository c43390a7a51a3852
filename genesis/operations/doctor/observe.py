"""What the doctor observes in a fit: windows, memory, the first checkpoint; callbacks that change nothing."""

import gc
import hashlib
import resource
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import lightning.pytorch as pl
import torch
from torch.autograd.profiler import profile as autograd_profile

from genesis.base.device import is_host
from genesis.data.pair_windows import PAIRS
from genesis.data.window import AccumulationWindow

_STATM: Final = Path("/proc/self/statm")


def hash_window(window: AccumulationWindow) -> str:
    """Returns a hash of a window's tokens, labels and documents, and of its position."""
    found = hashlib.sha256(str(window.data_position).encode())
    for micro in window.micro_batches:
        for tensor in (micro.input_ids, micro.labels, micro.document_ids):
            found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def read_resident_bytes() -> int:
    """Returns the memory that this process has in RAM, without what it shares (staging of saves)."""
    if _STATM.exists():
        _, resident, shared, *_ = map(int, _STATM.read_text(encoding="ascii").split())
        return (resident - shared) * resource.getpagesize()
    scale = 1 if sys.platform == "darwin" else 1024  # the peak, where there is nothing better
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


class LiveTensors(NamedTuple):
    """All tensors that Python knows at one moment; each storage counts once."""

    num_tensors: int
    num_bytes: int


def count_tensors(ignored: Iterable[torch.Tensor] = ()) -> LiveTensors:
    """Returns how many tensors Python knows, without single numbers in float64.

    These are values of the log (`genesis.train.logged_values`). How many there are differs from step to step, by what
    was measured since the step before; a kept loss is a number in the dtype of the training.

    Args:
        ignored: Tensors whose storages do not count.
    """
    gc.collect()
    storages: dict[int, int] = {}
    # `type`, because `isinstance` asks lazy modules for their class, which imports them.
    every = (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor) and not found.is_meta)
    known = [found for found in every if found.ndim or found.dtype != torch.float64]
    count = len(known)
    for found in known:
        try:
            storage = found.untyped_storage()
            if storage.device.type != "meta":  # where the fakes of torch.compile have theirs
                storages[storage.data_ptr()] = storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a tensor without storage of its own, such as a sharded one
            continue
    for found in ignored:
        storages.pop(found.untyped_storage().data_ptr(), None)
    return LiveTensors(count, sum(storages.values()))


def record_allocations() -> autograd_profile:
    """Returns a context that records what is allocated on the host, for `read_allocated_peak`.

    torch.profiler.profile would make an object of every event at the end, which takes longer than most steps.
    """
    return autograd_profile(use_kineto=True, profile_memory=True)


def read_allocated_peak(profiled: autograd_profile) -> int | None:
    """Returns the most bytes on the host that were allocated at once since a profile of memory began.

    A profile that recorded no allocation gives None: torch's profiler has been seen to drop all that it recorded.
    """
    results: Any = profiled.kineto_results
    events = [each for each in results.events() if each.name() == "[memory]"]
    changes = [int(each.nbytes()) for each in sorted(events, key=lambda each: each.start_ns())]
    return max(accumulate(changes, initial=0)) if changes else None


class StepPeak:
    """Measures the memory of one step at its highest point, from its construction to `stop`.

    On a device it is the allocator's own figure. On the host it is what was there before, and what torch's profiler
    records of allocations.

    Args:
        module: The module that trains.
        device: The device that trains.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device) -> None:
        self._device = device
        self._recording = ExitStack()
        self._profile: autograd_profile | None = None
        if not is_host(device.type):
            torch.get_device_module(device).reset_peak_memory_stats(device)
            return
        # A step begins by removing the gradients of the one before, and the profiler does not see that.
        gradients = [each.grad for each in module.parameters() if each.grad is not None]
        self._held_bytes = count_tensors(gradients).num_bytes
        self._profile = self._recording.enter_context(record_allocations())

    def stop(self) -> int | None:
        """Returns the bytes; None if they could not be measured."""
        if self._profile is None:
            return int(torch.get_device_module(self._device).max_memory_allocated(self._device))
        self._recording.close()
        peak = read_allocated_peak(self._profile)
        return None if peak is None else self._held_bytes + peak

    @staticmethod
    def can_measure(device: torch.device) -> bool:
        """Returns whether a device counts its memory."""
        return is_host(device.type) or hasattr(torch.get_device_module(device), "max_memory_allocated")


class Feed(NamedTuple):
    """How the data kept up with a step.

    Args:
        headroom: The possible speed of the data over that of training.
        wait_ms: How long training waited for its window.
    """

    headroom: float
    wait_ms: float


class Watch(pl.Callback):
    """Keeps the windows and the memory of each step.

    Args:
        at_start: Called once, in front of the first step, with the trainer, the module and the first window.
        tensor_steps: The steps after which all tensors are counted.
        peak_step: The step that is measured at its highest point, counted from 0; None for none.

    Attributes:
        peak_bytes: The memory of that step; None if it was not measured.
    """

    def __init__(
        self,
        at_start: Callable[[pl.Trainer, pl.LightningModule, AccumulationWindow], None] | None = None,
        tensor_steps: Sequence[int] = (),
        peak_step: int | None = None,
    ) -> None:
        self._peak_step = peak_step
        self._peak: StepPeak | None = None
        self.peak_bytes: int | None = None
        self._at_start, self._tensor_steps = at_start, frozenset(tensor_steps)
        self.windows: dict[int, str] = {}
        self.resident: dict[int, int] = {}
        self.allocated: dict[int, int] = {}
        self.tensors: dict[int, LiveTensors] = {}
        self.feeds: dict[int, Feed] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: AccumulationWindow, batch_idx: int
    ) -> None:
        """Runs what is due in front of the first step, and keeps the window."""
        if self._at_start is not None:
            at_start, self._at_start = self._at_start, None
            at_start(trainer, pl_module, batch)
        self.windows[trainer.global_step] = hash_window(batch)
        logged = trainer.callback_metrics  # of the step before, by `DataTelemetry`
        if "data/headroom" in logged:
            self.feeds[trainer.global_step] = Feed(float(logged["data/headroom"]), float(logged["data/wait_ms"]))
        device = trainer.strategy.root_device
        if trainer.global_step == self._peak_step and StepPeak.can_measure(device):
            self._peak = StepPeak(pl_module, device)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        """Keeps the memory after the step."""
        if self._peak is not None:
            self.peak_bytes, self._peak = self._peak.stop(), None
        step, device = trainer.global_step, trainer.strategy.root_device
        self.resident[step] = read_resident_bytes()
        if not is_host(device.type) and hasattr(torch.get_device_module(device), "memory_allocated"):
            self.allocated[step] = torch.get_device_module(device).memory_allocated(device)
        if step in self._tensor_steps:
            self.tensors[step] = count_tensors()


def find_slope(values: dict[int, int]) -> float:
    """Returns the median growth of a step, over all pairs of steps (Theil and Sen), which single jumps do not move.

    Example:
        >>> find_slope({1: 10, 2: 12, 3: 14, 4: 100})
        16.0
    """
    steps = sorted(values)
    slopes = [
        (values[later] - values[step]) / (later - step)
        for number, step in enumerate(steps)
        for later in steps[number + 1 :]
    ]
    return statistics.median(slopes) if slopes else 0.0


class Repeat(pl.Callback):
    """Ends a fit on one repeated window as soon as its loss is low enough.

    Args:
        limit: The loss to reach, for each pair or valid token.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.losses: list[float] = []

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        """Keeps the loss, and ends the fit if it is low enough."""
        num_units = batch.num_units.get(PAIRS, batch.num_valid_tokens)
        if not num_units:
            return
        self.losses.append(float(outputs["loss_sum"]) / num_units)
        if self.losses[-1] < self._limit:
            trainer.should_stop = True
