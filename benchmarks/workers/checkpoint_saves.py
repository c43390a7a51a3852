"""The ways to save in a worker of the benchmark `checkpoint`: genesis' callback or torch's functions."""

import math
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import lightning.pytorch as pl
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.workers.checkpoint_task import Mode
from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.base.run_directory import TRASH_NAME, checkpoint_name
from genesis_callbacks.checkpoint import SaveScope, read_manifest

_POLL_SECONDS = 0.005
_WAIT_LIMIT_SECONDS = 300.0
_STATE_PREFIXES = ("model.", "optimizer.")


class SaveEnd(NamedTuple):
    """The wall-clock time at which a save was complete, and the total size of its files."""

    at_seconds: float
    file_bytes: int


@dataclass
class SaveClock:
    """Measurements around the hooks of a callback.

    Args:
        stall_seconds: Total time in all hooks since the last save began.
        begin_seconds: Time in the hook in which the last save began.
        began_at_seconds: Wall-clock time at which the last save began.
    """

    stall_seconds: float = 0.0
    begin_seconds: float = 0.0
    began_at_seconds: float = 0.0


class Saves(Protocol):
    """The interface of a way to save for the gate and the worker."""

    def wait_for_end(self, step: int) -> SaveEnd:
        """Returns when the save of `step` has ended."""

    def count_tensor_bytes(self) -> int:
        """Returns the bytes of parameters and optimizer state in the last checkpoint."""


def time_hooks(callback: pl.Callback, clock: SaveClock, every_n_steps: int) -> None:
    """Measures the time of every hook that `callback` defines, from outside of the callback."""
    for name in dir(pl.Callback):
        if name.startswith("on_") and getattr(type(callback), name) is not getattr(pl.Callback, name):
            setattr(callback, name, _timed(getattr(callback, name), clock, every_n_steps, name == "on_train_batch_end"))


def _timed(hook: Callable[..., Any], clock: SaveClock, every_n_steps: int, may_save: bool) -> Callable[..., Any]:
    def timed(trainer: pl.Trainer, *arguments: Any, **keywords: Any) -> Any:
        began_at, begin = time.time(), time.perf_counter()
        try:
            return hook(trainer, *arguments, **keywords)
        finally:
            seconds = time.perf_counter() - begin
            if may_save and trainer.global_step % every_n_steps == 0:
                clock.begin_seconds, clock.began_at_seconds, clock.stall_seconds = seconds, began_at, 0.0
            clock.stall_seconds += seconds

    return timed


# ---- ours


def build_ours(mode: Mode, run_dir: Path, every_n_steps: int, scope: SaveScope | None) -> AsyncProcessCheckpoint:
    """Returns the callback as a user would make it, in the given mode; `scope` says what saves hold, by default all."""
    return AsyncProcessCheckpoint(
        run_dir=run_dir,
        every_n_steps=every_n_steps,
        save_at_end=False,
        save_on_signal=False,
        keep_last=1,
        mode=mode.writer,
        staging=mode.staging,
        **({} if scope is None else {"scope": scope}),
    )


class Committed:
    """Finds the end of genesis' saves in the directory of checkpoints.

    Args:
        directory: The callback's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: Path | None = None

    def wait_for_end(self, step: int) -> SaveEnd:
        """Returns when the save of `step` is committed and the one before it is deleted.

        Raises:
            RuntimeError: The save ended without a checkpoint, or does not end.
        """
        final = self._directory / checkpoint_name(step)
        deadline_seconds = time.monotonic() + _WAIT_LIMIT_SECONDS
        while not self._is_quiet(final):
            if time.monotonic() > deadline_seconds:
                raise RuntimeError(f"the save of step {step} did not end in {_WAIT_LIMIT_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        if not final.exists():
            raise RuntimeError(f"the save of step {step} made no checkpoint")
        self._last = final
        # The rename is the last change of a checkpoint's directory.
        return SaveEnd(final.stat().st_ctime, _sum_file_bytes(final))

    def _is_quiet(self, final: Path) -> bool:
        """Returns whether nothing is staged, only `final` is kept and nothing waits for deletion."""
        others = {path.name for path in self._directory.iterdir() if path.is_dir()} - {final.name, TRASH_NAME}
        trash = self._directory / TRASH_NAME
        return not others and not (trash.is_dir() and any(trash.iterdir()))

    def count_tensor_bytes(self) -> int:
        """Returns the bytes of parameters and optimizer state in the files of the last checkpoint, by its manifest."""
        if self._last is None:
            return 0
        return sum(
            math.prod(record.shape) * record.torch_dtype.itemsize
            for name, record in read_manifest(self._last).tensors.items()
            if name.startswith(_STATE_PREFIXES) and record.chunks
        )


# ---- torch's


class TorchCheckpoint(pl.Callback):
    """Saves by `dcp.save` or `dcp.async_save`, each call as torch's documentation has it, into a new directory.

    It communicates over a gloo group of its own. A save waits for the one before.

    Args:
        directory: For the checkpoints.
        every_n_steps: Save when Lightning's global step is a multiple of it.
        writer: `sync` for `dcp.save`.
    """

    def __init__(self, directory: Path, every_n_steps: int, writer: Literal["sync", "thread", "process"]) -> None:
        self._directory = directory
        self._every_n_steps = every_n_steps
        self._writer = writer
        self._group: Any = None
        self._future: Future[Any] | None = None
        self._has_ended = threading.Event()
        self._ended_at_seconds = 0.0
        self._last: Path | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Creates the process group. Communicates."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._group = dist.new_group(backend="gloo")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves if a save is due. Communicates."""
        if trainer.global_step % self._every_n_steps:
            return
        self._finish()
        model, optimizer = get_state_dict(pl_module, trainer.optimizers)
        state = {"model": model, "optimizer": optimizer}
        path = self._last = self._directory / checkpoint_name(trainer.global_step)
        if self._writer == "sync":
            save(state, checkpoint_id=path, process_group=self._group)
            self._ended_at_seconds = time.time()
            return
        kind = AsyncCheckpointerType.THREAD if self._writer == "thread" else AsyncCheckpointerType.PROCESS
        future = async_save(state, checkpoint_id=path, process_group=self._group, async_checkpointer_type=kind)
        assert isinstance(future, Future)
        self._has_ended.clear()
        future.add_done_callback(self._note_end)
        self._future = future

    def _note_end(self, _: "Future[Any]") -> None:
        self._ended_at_seconds = time.time()
        self._has_ended.set()

    def _finish(self) -> None:
        future, self._future = self._future, None
        if future is not None:
            future.result()
            self._has_ended.wait()  # the future is done before its callback has recorded the end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Waits for the last save."""
        self._finish()

    def wait_for_end(self, step: int) -> SaveEnd:
        """Returns when the save of `step` has ended; deletes the ones before it. Communicates."""
        self._finish()
        assert self._last is not None
        dist.barrier(self._group)
        end = SaveEnd(self._ended_at_seconds, _sum_file_bytes(self._last))
        if dist.get_rank() == 0:
            for path in self._directory.iterdir():
                if path != self._last:
                    shutil.rmtree(path)
        return end

    def count_tensor_bytes(self) -> int:
        """Returns the bytes of all tensors in the last checkpoint, by torch's own metadata."""
        if self._last is None:
            return 0
        metadata = FileSystemReader(self._last).read_metadata()
        return sum(
            math.prod(record.size) * record.properties.dtype.itemsize
            for record in metadata.state_dict_metadata.values()
            if isinstance(record, TensorStorageMetadata)
        )


def _sum_file_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())
