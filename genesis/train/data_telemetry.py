"""Measures whether the data keep up with training.

    logged                     unit and meaning
    data/tokens_per_second     possible speed of the data: valid tokens over the time to make their windows; for a
                               stream, tokens over the time of its workers, times the number of workers
    data/headroom              data/tokens_per_second over the trained tokens per second; below 1 training waits
    data/wait_ms               milliseconds that a step waited for its window, mean over the steps
    data/wait_share            share of the time spent waiting, a fraction 0..1
    data/host_to_device_ms     milliseconds to copy a window to the GPU, mean (CUDA only)
    data/packer_fill           valid labels over all label positions, a fraction 0..1
    data/queue_depth           windows that are ready
    data/queue_depth_N         blocks that worker N of a stream still has to make

All values cover the time since the last log line, on rank 0. The callback neither waits for the device nor
communicates: each rank warns by itself.
"""

import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch

from genesis.base.errors import numbered
from genesis.data.clock import LoaderTimes
from genesis.data.loader import WindowLoader
from genesis.data.training_data import TrainingData
from genesis.data.window import AccumulationWindow
from genesis.train.data_module import CorpusDataModule
from genesis.train.logged_values import is_log_step

WAIT_SHARE_LIMIT = 0.05
_JUDGED_STEPS = 20
_REMEDY = "raise data.prefetch_windows, or leave a core to the loader"
"""The remedy for a loader of other windows; a `TrainingData` has its own remedy."""


class DataWaitWarning(UserWarning):
    """The warning that training waits for its data."""


def rate_data(times: LoaderTimes, seconds: float, stream_tokens_per_second: float | None = None) -> dict[str, float]:
    """Returns the known metrics of an interval of training by key.

    Args:
        times: The loader's measurements in this interval.
        seconds: The length of the interval.
        stream_tokens_per_second: Speed of a stream's workers, whose blocks the loader only passes on.
    """
    values: dict[str, float] = {}
    if times.num_given:
        values["data/wait_ms"] = 1e3 * times.wait_seconds / times.num_given
        values["data/wait_share"] = times.wait_seconds / seconds
    if times.num_positions:
        values["data/packer_fill"] = times.num_tokens / times.num_positions
    if times.num_tokens and times.num_given:
        values["data/tokens_per_second"] = stream_tokens_per_second or times.num_tokens / times.make_seconds
        trained_per_second = times.num_tokens / times.num_made * times.num_given / seconds
        values["data/headroom"] = values["data/tokens_per_second"] / trained_per_second
    return values


def _find_training_data(trainer: pl.Trainer) -> TrainingData | None:
    data = vars(trainer).get("datamodule")
    return data.training if isinstance(data, CorpusDataModule) else None


class DataTelemetry(pl.Callback):
    """Logs the speed of the data every `log_every_n_steps`, and warns if training waits more than 5% of the time.

    The first steps cause no warning, because caches are cold and workers start. No state, no communication.
    """

    def __init__(self) -> None:
        self._log_from_seconds = 0.0
        self._judge_from_seconds = 0.0
        self._num_steps = 0
        self._wait_seconds = 0.0
        self._has_warned = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the measurements."""
        self._log_from_seconds = self._judge_from_seconds = time.perf_counter()
        self._num_steps, self._wait_seconds, self._has_warned = -_JUDGED_STEPS, 0.0, False

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: AccumulationWindow,
        batch_idx: int,
    ) -> None:
        """Logs and warns at the steps of the log."""
        loader, data = trainer.train_dataloader, vars(trainer).get("datamodule")
        if not isinstance(loader, WindowLoader) or not is_log_step(trainer):
            return
        now_seconds = time.perf_counter()
        times = loader.clock.take()
        training = _find_training_data(trainer)
        rate = None if training is None else training.tokens_per_second
        values = rate_data(times, now_seconds - self._log_from_seconds, rate)
        values["data/queue_depth"] = float(loader.clock.num_ready)
        for worker, depth in enumerate(() if training is None else training.queue_depths):
            values[f"data/queue_depth_{worker}"] = float(depth)
        copy_ms = data.copy_clock.take_mean_ms() if isinstance(data, CorpusDataModule) else None
        if copy_ms is not None:
            values["data/host_to_device_ms"] = copy_ms
        # In float64, as the module logs its own: Lightning would make a number a float32.
        pl_module.log_dict({key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()})
        remedy = _REMEDY if training is None else training.wait_remedy
        self._judge(times, now_seconds, f"rank {trainer.global_rank}", remedy)
        self._log_from_seconds = time.perf_counter()

    def _judge(self, times: LoaderTimes, now_seconds: float, who: str, remedy: str) -> None:
        self._num_steps += times.num_given
        if self._num_steps <= 0:  # the run's first steps
            self._judge_from_seconds = now_seconds
            return
        self._wait_seconds += times.wait_seconds
        if self._num_steps < _JUDGED_STEPS:
            return
        share = self._wait_seconds / (now_seconds - self._judge_from_seconds)
        is_late = share > WAIT_SHARE_LIMIT
        if is_late and not self._has_warned:
            warnings.warn(
                f"{who} waits for data {share:.0%} of the time (over {numbered(self._num_steps, 'steps')}): {remedy}",
                DataWaitWarning,
                stacklevel=2,
            )
        self._has_warned = is_late
        self._num_steps, self._wait_seconds, self._judge_from_seconds = 0, 0.0, now_seconds
