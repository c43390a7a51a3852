"""Our trainer as `genesis fit` sets it up: Lightning's Trainer, our module, loader, clocks, schedule, log and bar.

Only checkpoints are left out, because `genesis bench checkpoint` measures them. The second argument is the strategy:
`replicated`, the default of `genesis fit`, or `auto`, Lightning's own strategy for one device. Further arguments are
options of `genesis fit`, such as `model.attention=flex` or `trainer.deterministic=false`.
"""

import math
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy

from genesis.base.device import CPU, leave_memory_unfilled
from genesis.base.run_directory import RunDirectory
from genesis.bench.workers.options import read_fit_options
from genesis.bench.workers.protocol import ENDLESS, Gate, NoMoreStepsError, Workload, workload_from_json
from genesis.bench.workers.windows import build_windows
from genesis.data.loader import WindowLoader
from genesis.data.window import AccumulationWindow
from genesis.model.decoder import DecoderConfig
from genesis.optim import OptimizerOptions
from genesis.strategies import Replicated
from genesis.train.accelerators import build_accelerator
from genesis.train.csv_log import CSVLog
from genesis.train.module import GenesisModule
from genesis.train.progress import GenesisProgressBar
from genesis_callbacks import SkipAwareLR, TokenCounters

_LOG_EVERY_N_STEPS = 10


class _Gatekeeper(pl.Callback):
    """Waits before each step until the previous step has finished all its work, including its log line."""

    def __init__(self, workload: Workload) -> None:
        self._gate = Gate(workload, ["torch", "lightning"], self._read_loss)
        self._loss_sum = torch.full((), math.nan)
        self._num_valid_tokens = 1

    def _read_loss(self) -> float:
        return float(self._loss_sum) / self._num_valid_tokens

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: AccumulationWindow, batch_idx: int
    ) -> None:
        self._gate.before_step()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        self._loss_sum, self._num_valid_tokens = outputs["loss_sum"], batch.num_valid_tokens


class _RandomWindows(pl.LightningDataModule):
    """The workload's windows through the loader of `CorpusDataModule`."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._windows = build_windows(workload)
        self._has_cuda = workload.device != CPU

    def train_dataloader(self) -> WindowLoader:
        return WindowLoader(
            lambda index: self._windows[index % len(self._windows)],
            lambda: range(ENDLESS),
            ENDLESS,
            prefetch_windows=2,
            pin_memory=self._has_cuda,
        )

    def transfer_batch_to_device(
        self, batch: AccumulationWindow, device: torch.device, dataloader_idx: int
    ) -> AccumulationWindow:
        return batch.to(device, non_blocking=True)


def _build_strategy(name: str, is_compiled: bool) -> Strategy | str:
    return Replicated(compile_blocks=is_compiled) if name == "replicated" else name


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    workload = workload_from_json(arguments[0])
    options = read_fit_options(arguments[2:], workload.device)
    if options.deterministic:
        leave_memory_unfilled()
    gatekeeper = _Gatekeeper(workload)
    with tempfile.TemporaryDirectory() as run_dir:
        trainer = pl.Trainer(
            accelerator=build_accelerator(workload.device),
            devices=1,
            strategy=_build_strategy(arguments[1], workload.is_compiled),
            precision=workload.precision,
            deterministic=options.deterministic,
            max_steps=ENDLESS,
            max_epochs=-1,
            gradient_clip_val=1.0,
            log_every_n_steps=_LOG_EVERY_N_STEPS,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            inference_mode=False,
            enable_checkpointing=False,
            default_root_dir=run_dir,
            logger=CSVLog(RunDirectory(Path(run_dir)).metrics),
            callbacks=[gatekeeper, TokenCounters(), SkipAwareLR(warmup_updates=100), GenesisProgressBar()],
        )
        module = GenesisModule(
            DecoderConfig(**workload.decoder), OptimizerOptions(**workload.optimizer), **options.model
        )
        with suppress(NoMoreStepsError):
            trainer.fit(module, datamodule=_RandomWindows(workload))


if __name__ == "__main__":
    main(sys.argv[1:])
