"""One rank of one contender of `genesis bench checkpoint`: genesis' trainer with one way to save."""

import csv
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from genesis.base.device import CPU, name_collectives, name_device, select_device
from genesis.base.run_directory import RunDirectory
from genesis.bench.workers.checkpoint_protocol import (
    Farewell,
    Mode,
    SaveClock,
    Task,
    TrainerReady,
    TurnGate,
    task_from_json,
)
from genesis.bench.workers.checkpoint_saves import (
    Committed,
    Saves,
    TorchCheckpoint,
    build_ours,
    change_engine,
    time_hooks,
)
from genesis.bench.workers.protocol import ENDLESS, NoMoreStepsError
from genesis.bench.workers.windows import build_windows
from genesis.data.loader import WindowLoader
from genesis.data.window import AccumulationWindow
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import DecoderConfig
from genesis.optim import OptimizerOptions
from genesis.strategies import Replicated, Sharded
from genesis.train.accelerators import build_accelerator
from genesis.train.adapter_base import build_scope, find_adapter_base
from genesis.train.csv_log import CSVLog
from genesis.train.module import GenesisModule
from genesis_callbacks import SkipAwareLR, TokenCounters
from genesis_callbacks.checkpoint import SaveScope

_LOG_EVERY_N_STEPS = 10
_SHORT_SEQ_LEN = 16
_STALL, _STEP = "checkpoint/stall_seconds", "checkpoint/step"


class _GatedLoader:
    """The windows of a loader, each released by the gate; the windows end when the parent sends `quit`.

    Args:
        loader: Makes the windows.
        gate: Releases each window.
    """

    def __init__(self, loader: WindowLoader, gate: TurnGate) -> None:
        self._loader = loader
        self._gate = gate

    def __len__(self) -> int:
        return len(self._loader)  # with a length, Lightning prefetches no window

    def __iter__(self) -> Iterator[AccumulationWindow]:
        for window in self._loader:
            try:
                self._gate.before_step()
            except NoMoreStepsError:
                return
            yield window

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` returned."""


class _RandomWindows(pl.LightningDataModule):
    """The workload's windows through the loader of `CorpusDataModule`; those of the warm-up are short.

    Compiled blocks would be compiled again for another length, so there the warm-up has windows like all others.
    """

    def __init__(self, task: Task, gate: TurnGate) -> None:
        super().__init__()
        workload = task.workload
        self._windows = build_windows(workload)
        short = replace(workload, seq_len=min(_SHORT_SEQ_LEN, workload.seq_len), micro_batch_size=1)
        self._warmup_windows = build_windows(workload if workload.is_compiled else short)[: gate.num_warmup_steps]
        self._gate = gate
        self._has_cuda = workload.device != CPU

    def _build(self, index: int) -> AccumulationWindow:
        is_warmup = index < len(self._warmup_windows)
        return self._warmup_windows[index] if is_warmup else self._windows[index % len(self._windows)]

    def train_dataloader(self) -> _GatedLoader:
        loader = WindowLoader(
            self._build, lambda: range(ENDLESS), ENDLESS, prefetch_windows=2, pin_memory=self._has_cuda
        )
        return _GatedLoader(loader, self._gate)

    def transfer_batch_to_device(
        self, batch: AccumulationWindow, device: torch.device, dataloader_idx: int
    ) -> AccumulationWindow:
        return batch.to(device, non_blocking=True)


def _share_cores(mode: Mode) -> list[int]:
    """Leaves the last core to the writer if the mode requires it, and returns the writer's cores."""
    if not mode.has_own_cores:
        return []
    *ours, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, ours)
    return [last]


def _join_ranks(task: Task) -> None:
    """Creates the process group before Lightning, without a port; for a single rank only if needed."""
    if task.num_ranks == 1 and task.strategy == "replicated" and task.mode.saver != "torch":
        return
    kind = task.workload.device
    select_device(kind, task.rank)
    dist.init_process_group(
        name_collectives(kind),
        init_method=f"file://{Path(task.run_dir) / 'store'}",
        rank=task.rank,
        world_size=task.num_ranks,
    )


def _build_module(task: Task) -> tuple[GenesisModule, SaveScope | None]:
    """Returns the module, and what its saves hold: new adapters beside a base, or everything (None)."""
    decoder, optimizer = DecoderConfig(**task.workload.decoder), OptimizerOptions(**task.workload.optimizer)
    if task.adapter is None:
        return GenesisModule(decoder, optimizer), None
    adapter = AdapterConfig(**task.adapter)
    base = find_adapter_base(adapter.base, None)
    module = GenesisModule(decoder, optimizer, adapter=adapter)
    module.base_dtype = base.dtype
    return module, build_scope(base, has_magnitudes=adapter.dora, also_train=adapter.also_train)


def _build_saving(task: Task, clock: SaveClock, scope: SaveScope | None) -> tuple[list[pl.Callback], Saves | None]:
    """Returns the saving callback, if the mode has one, with its hooks measured, and the observer of its saves."""
    mode, run_dir = task.mode, Path(task.run_dir)
    callback: pl.Callback
    saves: Saves
    if mode.saver == "none":
        return [], None
    if mode.saver == "genesis":
        callback = ours = build_ours(mode, run_dir, task.every_n_steps, scope)
        saves = Committed(ours.directory)
    else:
        callback = saves = TorchCheckpoint(RunDirectory(run_dir).checkpoints, task.every_n_steps, mode.writer)
    time_hooks(callback, clock, task.every_n_steps)
    return [callback], saves


def _build_trainer(task: Task, callbacks: list[pl.Callback]) -> pl.Trainer:
    workload, run_dir = task.workload, Path(task.run_dir)
    return pl.Trainer(
        accelerator=build_accelerator(workload.device),
        devices=task.num_ranks,
        strategy=(Replicated if task.strategy == "replicated" else Sharded)(compile_blocks=workload.is_compiled),
        precision=workload.precision,
        max_steps=ENDLESS,
        max_epochs=1,
        gradient_clip_val=1.0,
        log_every_n_steps=_LOG_EVERY_N_STEPS,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        enable_checkpointing=task.mode.saver == "genesis",
        enable_progress_bar=False,
        default_root_dir=run_dir,
        logger=CSVLog(RunDirectory(run_dir).metrics),
        callbacks=[TokenCounters(), SkipAwareLR(warmup_updates=100), *callbacks],
    )


def _count_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _count_state_bytes(trainer: pl.Trainer, module: pl.LightningModule) -> int:
    """Returns the bytes of trained parameters and optimizer state; a sharded tensor counts with its full size."""
    trained: list[Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    states = [state.values() for optimizer in trainer.optimizers for state in optimizer.state.values()]
    in_optimizer = [value for state in states for value in state if isinstance(value, Tensor)]
    return _count_bytes(trained) + _count_bytes(in_optimizer)


def _read_stalls(log: Path) -> dict[str, float]:
    """Returns the stalls that the callback logged, by the save's step."""
    if not log.exists():
        return {}
    with log.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get(_STALL)]
    return {str(int(float(row[_STEP]))): float(row[_STALL]) for row in rows}


def main(arguments: list[str]) -> None:
    """Trains until the parent sends `quit`."""
    task = task_from_json(arguments[0])
    change_engine(task.mode, _share_cores(task.mode))
    torch.set_num_threads(task.workload.num_threads)
    _join_ranks(task)
    clock = SaveClock()
    module, scope = _build_module(task)
    callbacks, saves = _build_saving(task, clock, scope)

    def describe() -> TrainerReady:
        versions = {package: version(package) for package in ("torch", "lightning")}
        return TrainerReady(
            versions, name_device(task.workload.device), sum(parameter.numel() for parameter in module.parameters())
        )

    gate = TurnGate(task, clock, None if saves is None else saves.wait_for_end, describe)
    trainer = _build_trainer(task, callbacks)
    trainer.fit(module, datamodule=_RandomWindows(task, gate))
    is_first = task.rank == 0
    gate.send(
        Farewell(
            _count_state_bytes(trainer, module),
            saves.count_tensor_bytes() if saves is not None and is_first else 0,
            _read_stalls(RunDirectory(Path(task.run_dir)).metrics) if is_first else {},
        )
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
