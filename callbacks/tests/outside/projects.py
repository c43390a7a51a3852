"""Other people's Lightning projects in small, by name, and a way to run one that kills itself where it is told."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from genesis_callbacks import AsyncProcessCheckpoint

from .loaders import (
    StreamLoader,
    build_counting_loader,
    build_own_generator_loader,
    build_plain_loader,
    build_resumable_loader,
)
from .models import Gan, Lbfgs, OneCycle, Plain, Sharded, Validated

STEPS_IN_EPOCH = 4
NUM_EPOCHS = 3


@dataclass(frozen=True)
class Project:
    """One project.

    Attributes:
        build_model: Its module, with its loader.
        every_n_steps: How often it saves.
        build_callbacks: Its own callbacks.
        num_ranks: In how many processes it trains.
        strategy: Of Lightning.
    """

    build_model: Callable[[], LightningModule]
    every_n_steps: int = 1
    build_callbacks: Callable[[], list[Callback]] = list
    num_ranks: int = 1
    strategy: str = "auto"

    @property
    def steps_in_epoch(self) -> int:
        return STEPS_IN_EPOCH // self.num_ranks


PROJECTS = {
    # A plain loader can be gone on with where an epoch ended, so that these save there.
    "plain": Project(partial(Plain, build_plain_loader), STEPS_IN_EPOCH),
    "own-generator": Project(partial(Plain, build_own_generator_loader), STEPS_IN_EPOCH),
    "workers": Project(partial(Plain, partial(build_plain_loader, 2)), STEPS_IN_EPOCH),
    "average": Project(
        partial(Validated, build_plain_loader), STEPS_IN_EPOCH, lambda: [WeightAveraging(use_buffers=False)]
    ),
    "onecycle-plain": Project(partial(OneCycle, build_plain_loader), STEPS_IN_EPOCH),
    # The others have loaders with a state, and save at every step.
    "counting": Project(partial(Plain, build_counting_loader)),
    "resumable": Project(partial(Plain, build_resumable_loader)),
    "resumable-workers": Project(partial(Plain, partial(build_resumable_loader, 2))),
    "ddp-resumable": Project(partial(Plain, build_resumable_loader), num_ranks=2, strategy="ddp"),
    "stream": Project(partial(Plain, StreamLoader)),
    "ema": Project(partial(Validated, build_counting_loader), 1, lambda: [EMAWeightAveraging(decay=0.5)]),
    "gan": Project(partial(Gan, build_counting_loader), 2),
    "lbfgs": Project(partial(Lbfgs, build_counting_loader)),
    "onecycle": Project(partial(OneCycle, build_counting_loader)),
    "ddp": Project(partial(Plain, build_counting_loader), num_ranks=2, strategy="ddp"),
    "ddp-ema": Project(
        partial(Validated, build_counting_loader),
        build_callbacks=lambda: [EMAWeightAveraging(decay=0.5)],
        num_ranks=2,
        strategy="ddp",
    ),
    "fsdp2": Project(partial(Sharded, build_counting_loader), num_ranks=2, strategy="fsdp2"),
}


@dataclass
class Outcome:
    """What a run came to on one rank.

    Attributes:
        weights: The model's, at the end.
        optimizers: Their state.
        callbacks: The state of Lightning's averaging callbacks: the averaged weights.
        report: What the restore reported, if there was one.
    """

    weights: dict[str, Tensor]
    optimizers: list[Any]
    averages: list[dict[str, Tensor]] = field(default_factory=list)
    report: str | None = None


class Recorder(Callback):
    """Writes to a file, for each batch, its epoch, its number there and a sum over its bits."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        data = batch if isinstance(batch, Tensor) else torch.stack(batch)
        bits = int(data.contiguous().view(torch.int32).to(torch.int64).sum())
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"batches-{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.current_epoch} {batch_idx} {bits}\n")


class Killed(Callback):
    """SIGKILLs its process within a batch, once a checkpoint of at least some step is committed."""

    def __init__(self, directory: Path, batch: int, saved_step: int) -> None:
        self._directory, self._batch, self._saved_step = directory, batch, saved_step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self._batch:
            committed = self._directory / f"checkpoints/step-{self._saved_step:08d}/COMMITTED"
            while not committed.exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)


def _build_strategy(name: str, num_ranks: int) -> Any:
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=num_ranks, tensor_parallel_size=1)
    return DDPStrategy(process_group_backend="gloo") if name == "ddp" else "auto"


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return value


def run_project(name: str, run_dir: Path, attempt: int = 0, kill: tuple[int, int] | None = None, **options) -> Outcome:
    """Trains a project on this rank, from its latest checkpoint if there is one, and returns what it came to.

    Args:
        name: Of the project.
        run_dir: The run's directory.
        attempt: Number of this start: each records its batches in a directory of its own.
        kill: Number of the batch, counted from 1 over all epochs, within which it SIGKILLs itself, and the step whose
            checkpoint it waits for before.
        options: Of the checkpoint callback.
    """
    # Lightning advises on speed and on plain loaders.
    warnings.filterwarnings("ignore", message=".*many workers.*|.*dataloader is not resumable.*|.*logging interval.*")
    warnings.filterwarnings("ignore", message=".*`training_step` returned `None`.*|.*eval mode.*|.*sampler.*")
    project = PROJECTS[name]
    torch.manual_seed(1)
    model = project.build_model()
    callbacks = project.build_callbacks()
    checkpoint = AsyncProcessCheckpoint(
        run_dir=run_dir, **{"every_n_steps": project.every_n_steps, "mode": "thread", **options}
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=project.num_ranks,
        strategy=_build_strategy(project.strategy, project.num_ranks),
        max_epochs=NUM_EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[
            checkpoint,
            *callbacks,
            Recorder(run_dir / f"attempt-{attempt}"),
            *([Killed(run_dir, *kill)] if kill else []),
        ],
        default_root_dir=run_dir,
    )
    trainer.fit(model, ckpt_path="latest")
    return Outcome(
        _copy(model.state_dict()),
        [_copy(optimizer.state_dict()["state"]) for optimizer in trainer.optimizers],
        [_copy(callback._average_model.state_dict()) for callback in callbacks],
        None if checkpoint.restore_report is None else checkpoint.restore_report.text,
    )


def read_batches(run_dir: Path, attempt: int, rank: int) -> list[str]:
    """Returns a line for each batch that an attempt began."""
    return (run_dir / f"attempt-{attempt}/batches-{rank}").read_text().splitlines()
