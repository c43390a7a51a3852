"""The fit of the doctor, whose trainer, windows and clocks the benchmarks share: a decoder on random tokens."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import Strategy

from genesis.base.device import is_host, leave_memory_unfilled, synchronize
from genesis.data.clock import CopyClock
from genesis.data.loader import SequenceFormat, WindowLoader, build_window
from genesis.data.pair_windows import PAIRS
from genesis.data.window import AccumulationWindow
from genesis.model.decoder import DecoderConfig
from genesis.model.precision import choose_precision
from genesis.operations.doctor.probe import Task
from genesis.optim import OptimizerOptions
from genesis.strategies import Replicated
from genesis.train.accelerators import build_accelerator
from genesis.train.module import GenesisModule
from genesis_callbacks import SkipAwareLR, TokenCounters

ENDLESS: Final = 10**6
_NUM_MICRO_BATCHES: Final = 2
_DOCUMENT_ENDS: Final = (0.125, 0.75)
"""Where documents end within a sequence, as shares of its length."""


@dataclass(frozen=True)
class Size:
    """The shape of a fit."""

    decoder: DecoderConfig
    micro_batch_size: int

    @property
    def longest_document(self) -> int:
        """The tokens of the longest document of a sequence."""
        cuts = (0, *(int(end * self.decoder.max_seq_len) for end in _DOCUMENT_ENDS), self.decoder.max_seq_len)
        return max(end - begin for begin, end in pairwise(cuts))


SIZES: Final = {
    "tiny": Size(
        DecoderConfig(vocab_size=512, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, max_seq_len=64),
        2,
    ),
    # 124 million parameters: fits a GPU of 8 GB, and is large enough to keep it busy.
    "small": Size(
        DecoderConfig(
            vocab_size=32768, dim=768, num_layers=12, num_heads=12, num_kv_heads=12, ffn_dim=2048, max_seq_len=1024
        ),
        4,
    ),
    # For runs that are saved, killed and compared: a save takes milliseconds, and its documents are long.
    "resumed": Size(
        DecoderConfig(
            vocab_size=4096, dim=128, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=384, max_seq_len=1024
        ),
        1,
    ),
}


class Windows(pl.LightningDataModule):
    """Windows by their number, through the loader of `CorpusDataModule`, from the current step on.

    Args:
        build: Returns the window of a number.
        count: How many windows there are.
        may_begin: Called before each window is given to training, which ends where it returns False. A Trainer with
            more than one epoch would begin the next one.
    """

    def __init__(
        self,
        build: Callable[[int], AccumulationWindow],
        count: int = ENDLESS,
        may_begin: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__()
        self._build, self._count, self._may_begin = build, count, may_begin
        self._clock = CopyClock()

    def train_dataloader(self) -> "WindowLoader | _GatedLoader":
        """Returns the windows from the current step on."""
        trainer = self.trainer
        assert trainer is not None
        has_accelerator = not is_host(trainer.strategy.root_device.type)
        loader = WindowLoader(
            self._build, lambda: range(trainer.global_step, self._count), self._count, 2, pin_memory=has_accelerator
        )
        return loader if self._may_begin is None else _GatedLoader(loader, self._may_begin)

    def transfer_batch_to_device(
        self, batch: AccumulationWindow, device: torch.device, dataloader_idx: int
    ) -> AccumulationWindow:
        """Copies a window without waiting."""
        return self._clock.copy(batch, device)


class _GatedLoader:
    """The windows of a loader, each released by a call that may wait."""

    def __init__(self, loader: WindowLoader, may_begin: Callable[[], bool]) -> None:
        self._loader, self._may_begin = loader, may_begin

    def __len__(self) -> int:
        return len(self._loader)  # with a length, Lightning prefetches no window

    def __iter__(self) -> Iterator[AccumulationWindow]:
        return takewhile(lambda _: self._may_begin(), self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignores the empty state."""


def random_windows(size: Size, rank: int = 0) -> Windows:
    """Returns windows of random tokens with several documents a row; a window follows from its step and rank alone."""
    seq_len, batch, vocab_size = size.decoder.max_seq_len, size.micro_batch_size, size.decoder.vocab_size
    form = SequenceFormat(seq_len, 0, np.full(vocab_size, 4, np.uint8), np.dtype(np.uint16))

    def build(step: int) -> AccumulationWindow:
        numbers = np.random.default_rng((step, rank))
        rows = numbers.integers(vocab_size, size=(_NUM_MICRO_BATCHES * batch, seq_len + 1), dtype=np.uint16)
        ends = np.zeros((len(rows), seq_len), np.bool_)
        for end in _DOCUMENT_ENDS:
            ends[:, int(end * seq_len)] = True
        return build_window(rows, form, batch, step + 1, ends)

    return Windows(build)


def build_strategy(is_compiled: bool = False) -> Strategy:
    """Returns the strategy of a fit on one device."""
    return Replicated(compile_blocks=is_compiled)


def build_trainer(
    task: Task,
    strategy: Strategy | str,
    max_steps: int,
    callbacks: Sequence[pl.Callback] = (),
    schedule: SkipAwareLR | None = None,
    **options: Any,
) -> pl.Trainer:
    """Returns our Trainer, which on an accelerator takes kernels that repeat, as a fit does.

    Args:
        task: Kind of device, directory and number of ranks.
        strategy: The strategy.
        max_steps: The last step.
        callbacks: Further callbacks.
        schedule: The schedule of the learning rate; a short warm-up by default.
        options: Of Lightning's Trainer, in place of those here: no log, no bar, no checkpoint.
    """
    leave_memory_unfilled()
    defaults: dict[str, Any] = {
        "strategy": strategy,
        "accelerator": build_accelerator(task.kind),
        "devices": task.num_ranks,
        "precision": choose_precision(task.kind),
        "max_steps": max_steps,
        "max_epochs": -1,
        "gradient_clip_val": 1.0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "inference_mode": False,
        "deterministic": None if is_host(task.kind) else True,
        "default_root_dir": Path(task.directory),
        "callbacks": [TokenCounters(), schedule or SkipAwareLR(warmup_updates=2), *callbacks],
    }
    return pl.Trainer(**{**defaults, **options})


def build_module(task: Task) -> GenesisModule:
    """Returns the module of a fit."""
    return GenesisModule(SIZES[task.size].decoder, OptimizerOptions())


class KeepLosses(pl.Callback):
    """Keeps each step's summed loss on the device, because reading it would wait for the device.

    Args:
        num_kept: How many of the last steps are kept; None for all.
    """

    def __init__(self, num_kept: int | None = None) -> None:
        self._kept: deque[tuple[torch.Tensor, int]] = deque(maxlen=num_kept)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        """Keeps the loss of the window."""
        num_units = batch.num_units.get(PAIRS, batch.num_valid_tokens)
        self._kept.append((outputs["loss_sum"].detach().clone(), num_units))

    def read(self) -> list[float]:
        """Returns the losses in nats per valid token of this rank, or per pair; waits for the device."""
        return [float(total) / count for total, count in self._kept]


class StepTimes(pl.Callback):
    """Times the steps after the first ones, with one wait for the device before and one after.

    Args:
        kind: Kind of device.
        num_warmup_steps: Steps that are not timed.
        num_steps: Steps that are timed.
    """

    def __init__(self, kind: str, num_warmup_steps: int, num_steps: int) -> None:
        self._kind, self._first, self._last = kind, num_warmup_steps, num_warmup_steps + num_steps
        self._begin_seconds = 0.0
        self.seconds_of_first = 0.0
        self.seconds = 0.0
        self.tokens = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts with the first steps, which are not timed."""
        self._begin_seconds = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        """Reads the clock before and after the timed steps."""
        step = trainer.global_step
        if step > self._first:
            self.tokens += sum(micro_batch.input_ids.numel() for micro_batch in batch.micro_batches)
        if step in (self._first, self._last):
            synchronize(self._kind)
            now_seconds = time.perf_counter()
            seconds = now_seconds - self._begin_seconds
            if step == self._first:
                self.seconds_of_first = seconds
            else:
                self.seconds = seconds
            self._begin_seconds = now_seconds
