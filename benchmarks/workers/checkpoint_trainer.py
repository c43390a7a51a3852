"""One rank of one contender of the benchmark `checkpoint`: genesis' trainer with one way to save."""

import csv
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.workers.checkpoint_saves import (
    Committed,
    SaveClock,
    Saves,
    TorchCheckpoint,
    build_ours,
    time_hooks,
)
from benchmarks.workers.checkpoint_task import Farewell, Task, task_from_json
from benchmarks.workers.protocol import ENDLESS, Gate
from benchmarks.workers.windows import build_windows
from genesis.base.device import name_collectives, select_device
from genesis.base.run_directory import RunDirectory
from genesis.data.window import AccumulationWindow
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import DecoderConfig
from genesis.operations.doctor import probe
from genesis.operations.doctor.fits import Windows, build_trainer
from genesis.optim import AdamW
from genesis.strategies import Replicated, Sharded
from genesis.train.adapter_base import build_scope, find_adapter_base
from genesis.train.csv_log import CSVLog
from genesis.train.module import GenesisModule
from genesis_callbacks import SkipAwareLR
from genesis_callbacks.checkpoint import SaveScope

_SHORT_SEQ_LEN = 16
_STALL, _STEP = "checkpoint/stall_seconds", "checkpoint/step"


def _choose_windows(task: Task) -> Callable[[int], AccumulationWindow]:
    """Returns the workload's windows; those of the warm-up are short.

    Compiled blocks would be compiled again for another length, so there the warm-up has windows like all others.
    """
    workload = task.workload
    windows = build_windows(workload)
    if workload.is_compiled:
        return lambda index: windows[index % len(windows)]
    short = replace(workload, seq_len=min(_SHORT_SEQ_LEN, workload.seq_len), micro_batch_size=1)
    warmup = build_windows(short)[: workload.num_warmup_steps]
    return lambda index: warmup[index] if index < len(warmup) else windows[index % len(windows)]


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
    decoder, optimizer = DecoderConfig(**task.workload.decoder), AdamW(**task.workload.optimizer)
    if task.adapter is None:
        return GenesisModule(decoder, optimizer), None
    adapter = AdapterConfig(**task.adapter)
    base = find_adapter_base(adapter.base, None)
    module = GenesisModule(decoder, optimizer, adapter=adapter)
    module.base_format = base.format
    return module, build_scope(base, has_magnitudes=adapter.dora, also_train=adapter.also_train)


def _build_saving(task: Task, scope: SaveScope | None) -> tuple[pl.Callback, Saves]:
    """Returns the saving callback and the observer of its saves."""
    mode, run_dir = task.mode, Path(task.run_dir)
    if mode.saver == "genesis":
        ours = build_ours(mode, run_dir, task.every_n_steps, scope)
        return ours, Committed(ours.directory)
    theirs = TorchCheckpoint(RunDirectory(run_dir).checkpoints, task.every_n_steps, mode.writer)
    return theirs, theirs


def _watch_saves(task: Task, saves: Saves, clock: SaveClock) -> Callable[[], dict[str, Any]]:
    """Returns a function that waits for the save of a turn, and returns its figures."""
    steps = itertools.count(task.every_n_steps, task.every_n_steps)

    def read() -> dict[str, Any]:
        step, ended_at = next(steps), time.time()
        end = saves.wait_for_end(step)
        return {
            "step": step,
            "stall_seconds": clock.stall_seconds,
            "begin_seconds": clock.begin_seconds,
            "save_seconds": end.at_seconds - clock.began_at_seconds,
            "turn_seconds_since_begin": ended_at - clock.began_at_seconds,
            "file_bytes": end.file_bytes,
        }

    return read


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
    workload, log = task.workload, RunDirectory(Path(task.run_dir)).metrics
    torch.set_num_threads(workload.num_threads)
    _join_ranks(task)
    module, scope = _build_module(task)
    callbacks: list[pl.Callback] = []
    saves: Saves | None = None
    figures: Callable[[], dict[str, Any]] = dict
    if task.mode.saver != "none":
        callback, saves = _build_saving(task, scope)
        clock = SaveClock()
        time_hooks(callback, clock, task.every_n_steps)
        callbacks, figures = [callback], _watch_saves(task, saves, clock)
    gate = Gate(workload, ["torch", "lightning"], read_figures=figures)
    trainer = build_trainer(
        probe.Task(workload.device, "", task.run_dir, task.rank, task.num_ranks),
        (Replicated if task.strategy == "replicated" else Sharded)(compile_blocks=workload.is_compiled),
        ENDLESS,
        callbacks,
        SkipAwareLR(warmup_updates=100),
        precision=workload.precision,
        deterministic=None,
        max_epochs=1,
        log_every_n_steps=10,
        logger=CSVLog(log),
        enable_checkpointing=task.mode.saver == "genesis",
    )
    trainer.fit(module, datamodule=Windows(_choose_windows(task), ENDLESS, gate.may_begin))
    is_first = task.rank == 0
    farewell = Farewell(
        sum(parameter.numel() for parameter in module.parameters()),
        _count_state_bytes(trainer, module),
        saves.count_tensor_bytes() if saves is not None and is_first else 0,
        _read_stalls(log) if is_first else {},
    )
    gate.send(asdict(farewell))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
