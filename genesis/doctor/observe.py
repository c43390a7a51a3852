"""What the doctor observes in a fit: windows, memory, the first checkpoint; callbacks that change nothing."""

import gc
import hashlib
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import lightning.pytorch as pl
import torch

from genesis.data.pair_windows import PAIRS
from genesis.data.window import AccumulationWindow
from genesis.device import is_host

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


def count_tensors() -> LiveTensors:
    """Returns how many tensors Python knows."""
    gc.collect()
    storages: dict[int, int] = {}
    count = 0
    for found in gc.get_objects():
        # `type`, because `isinstance` asks lazy modules for their class, which imports them.
        if issubclass(type(found), torch.Tensor) and not found.is_meta:
            count += 1
            try:
                storage = found.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a tensor without storage of its own, such as a sharded one
                continue
    return LiveTensors(count, sum(storages.values()))


class Watch(pl.Callback):
    """Keeps the windows and the memory of each step.

    Args:
        at_start: Called once, in front of the first step, with the trainer, the module and the first window.
        tensor_steps: The steps after which all tensors are counted.
    """

    def __init__(
        self,
        at_start: Callable[[pl.Trainer, pl.LightningModule, AccumulationWindow], None] | None = None,
        tensor_steps: Sequence[int] = (),
    ) -> None:
        self._at_start, self._tensor_steps = at_start, frozenset(tensor_steps)
        self.windows: dict[int, str] = {}
        self.resident: dict[int, int] = {}
        self.allocated: dict[int, int] = {}
        self.tensors: dict[int, LiveTensors] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: AccumulationWindow, batch_idx: int
    ) -> None:
        """Runs what is due in front of the first step, and keeps the window."""
        if self._at_start is not None:
            at_start, self._at_start = self._at_start, None
            at_start(trainer, pl_module, batch)
        self.windows[trainer.global_step] = hash_window(batch)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        """Keeps the memory after the step."""
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
