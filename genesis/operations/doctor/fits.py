"""The fit of the doctor: a decoder on random tokens under our trainer, the same each time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import Strategy

from genesis.base.device import is_host, leave_memory_unfilled
from genesis.data.clock import CopyClock
from genesis.data.loader import SequenceFormat, WindowLoader, build_window
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


class RandomWindows(pl.LightningDataModule):
    """Windows of random tokens with several documents a row; a window follows from its step and rank alone.

    Args:
        size: The shape of the windows.
        rank: The rank of this process.
    """

    def __init__(self, size: Size, rank: int = 0) -> None:
        super().__init__()
        self._size, self._rank = size, rank
        self._clock = CopyClock()

    def _build(self, step: int) -> AccumulationWindow:
        decoder = self._size.decoder
        seq_len, batch = decoder.max_seq_len, self._size.micro_batch_size
        form = SequenceFormat(seq_len, 0, np.full(decoder.vocab_size, 4, np.uint8), np.dtype(np.uint16))
        numbers = np.random.default_rng((step, self._rank))
        rows = numbers.integers(decoder.vocab_size, size=(_NUM_MICRO_BATCHES * batch, seq_len + 1), dtype=np.uint16)
        ends = np.zeros((len(rows), seq_len), np.bool_)
        for end in _DOCUMENT_ENDS:
            ends[:, int(end * seq_len)] = True
        return build_window(rows, form, batch, step + 1, ends)

    def train_dataloader(self) -> WindowLoader:
        """Returns the windows from the current step on."""
        trainer = self.trainer
        assert trainer is not None
        has_accelerator = not is_host(trainer.strategy.root_device.type)
        return WindowLoader(
            self._build, lambda: range(trainer.global_step, ENDLESS), ENDLESS, 2, pin_memory=has_accelerator
        )

    def transfer_batch_to_device(
        self, batch: AccumulationWindow, device: torch.device, dataloader_idx: int
    ) -> AccumulationWindow:
        """Copies a window without waiting."""
        return self._clock.copy(batch, device)


def build_strategy(is_compiled: bool = False) -> Strategy:
    """Returns the strategy of a fit on one device."""
    return Replicated(compile_blocks=is_compiled)


def build_trainer(
    task: Task, strategy: Strategy, max_steps: int, callbacks: Sequence[pl.Callback] = (), **options: Any
) -> pl.Trainer:
    """Returns our Trainer, without logs and bars, which on an accelerator takes kernels that repeat, as a fit does."""
    leave_memory_unfilled()
    return pl.Trainer(
        strategy=strategy,
        accelerator=build_accelerator(task.kind),
        devices=task.num_ranks,
        precision=options.pop("precision", choose_precision(task.kind)),
        max_steps=max_steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=options.pop("enable_checkpointing", False),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        deterministic=options.pop("deterministic", None if is_host(task.kind) else True),
        default_root_dir=Path(task.directory),
        callbacks=[TokenCounters(), SkipAwareLR(warmup_updates=2), *callbacks],
        **options,
    )


def build_module(task: Task) -> GenesisModule:
    """Returns the module of a fit."""
    return GenesisModule(SIZES[task.size].decoder, OptimizerOptions())


class KeepLosses(pl.Callback):
    """Keeps each step's summed loss on the device, because reading it would wait for the device."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._counts: list[int] = []

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        """Keeps the loss of the window."""
        self._sums.append(outputs["loss_sum"].detach().clone())
        self._counts.append(batch.num_valid_tokens)

    def read(self) -> list[float]:
        """Returns the losses in nats per valid token of this rank; waits for the device."""
        return [float(total) / count for total, count in zip(self._sums, self._counts, strict=True)]
