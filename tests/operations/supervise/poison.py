"""Data that spoil training: windows at planted positions, with losses that are not finite, or without memory."""

import math
from typing import Any

import lightning.pytorch as pl
import torch

from genesis.data.window import AccumulationWindow


class PoisonedData(pl.Callback):
    """Lets a step fail while it trains on a window with a planted position, as damaged text or an outlier would.

    Args:
        first: The first planted position.
        stop: The position after the last one.
        exhausts_memory: Whether the step has no memory; else its losses are not finite.
    """

    def __init__(self, first: int, stop: int, exhausts_memory: bool = False) -> None:
        self._first, self._stop, self._exhausts_memory = first, stop, exhausts_memory
        self._is_poisoned = False
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        embedding = next(module for module in pl_module.modules() if isinstance(module, torch.nn.Embedding))
        self._hooks = [embedding.register_forward_hook(self._spoil)]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: AccumulationWindow, batch_idx: int
    ) -> None:
        size = trainer.datamodule.training.options.global_batch_size
        window = range(batch.data_position - size, batch.data_position)
        planted = range(self._first, self._stop)
        is_hit = window.start < planted.stop and planted.start < window.stop
        # What is skipped has no text that could spoil anything.
        self._is_poisoned = is_hit and batch.num_valid_tokens > 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()

    def _spoil(self, module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        if not self._is_poisoned:
            return output
        if self._exhausts_memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return output * math.nan
