"""A progress bar with updates, tokens, tokens/s and the time left."""

import math
import time
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from genesis.base.console import Console
from genesis.base.errors import numbered
from genesis.base.progress import Stage, stage
from genesis.data.corpus_data import CorpusData
from genesis_callbacks import TokenCounters

_REFRESH_SECONDS = 0.5
_LOG_LINE_SECONDS = 15.0


def _duration_text(seconds: float) -> str:
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole_seconds:02d} s" if minutes else f"{whole_seconds} s"


def _tokens_text(num_tokens: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if num_tokens >= size:
            return f"{num_tokens / size:.2f}{unit}"
    return f"{num_tokens:.0f}"


def _learns_some(trainer: pl.Trainer) -> bool:
    """Returns whether only some tokens of the data are learned, as of conversations: these are what is counted."""
    data = getattr(vars(trainer).get("datamodule"), "training", None)
    return isinstance(data, CorpusData) and any(source.has_label_column for source in data.corpus.train)


class GenesisProgressBar(ProgressBar):
    """Shows steps, updates, tokens, tokens/s, loss and the time left, on rank 0.

    On a terminal it is a live bar; otherwise (a log file) it prints a line at intervals. Does not communicate.
    """

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._is_enabled = True
        self._shown_at = 0.0
        self._rate_from: tuple[float, int] | None = None
        self._rate = 0.0
        self._open = ExitStack()
        self._validation: Stage | None = None
        self._has_news = False
        self._kind = "tokens"

    def disable(self) -> None:
        """Shows nothing (Lightning calls it on the other ranks)."""
        self._is_enabled = False

    def enable(self) -> None:
        """Shows again."""
        self._is_enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the bar."""
        self._rate_from, self._has_news = None, False
        self._kind = "learned tokens" if _learns_some(trainer) else "tokens"
        if not self._is_enabled or not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=2,
        )
        total = trainer.max_steps if trainer.max_steps > 0 else None
        self._task = self._progress.add_task("train", total=total, completed=trainer.global_step, words="")
        self._progress.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes that there is a step to show: its own values are logged only after this hook."""
        self._has_news = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Refreshes the bar at intervals, with the step before."""
        self._refresh(trainer)

    def _refresh(self, trainer: pl.Trainer, *, is_last: bool = False) -> None:
        now = time.monotonic()
        interval = _REFRESH_SECONDS if self._progress is not None else _LOG_LINE_SECONDS
        # Before any value is read: metrics are on the device, and reading one in every step would wait for it.
        if not self._is_enabled or not self._has_news or (now - self._shown_at < interval and not is_last):
            return
        self._shown_at, self._has_news = now, False
        words = self._words(trainer, now)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=trainer.global_step, words=words)
        else:
            total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
            self._console.print(f"step {trainer.global_step}{total}  {words}", highlight=False, soft_wrap=True)

    def _words(self, trainer: pl.Trainer, now: float) -> str:
        counters = next((c for c in vars(trainer)["callbacks"] if isinstance(c, TokenCounters)), None)
        words = []
        if counters is not None:
            if self._rate_from is not None and now > self._rate_from[0]:
                self._rate = (counters.tokens_seen - self._rate_from[1]) / (now - self._rate_from[0])
            self._rate_from = (now, counters.tokens_seen)
            words = [numbered(counters.updates, "updates"), f"{_tokens_text(counters.tokens_seen)} {self._kind}"]
            if counters.skips:
                words.append(f"{sum(counters.skips.values())} skipped")
            if self._rate:
                words.append(f"{_tokens_text(self._rate)} {self._kind}/s")
                left = trainer.max_steps - trainer.global_step
                if trainer.max_steps > 0 and self._progress is None and counters.step:
                    seconds = left * (counters.tokens_seen / counters.step) / self._rate
                    words.append(f"{_duration_text(seconds)} left")
        metrics = trainer.logged_metrics
        if "train/loss" in metrics:
            words.append(f"loss {float(metrics['train/loss']):.4f}")
        return "  ".join(words)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows the step before, and begins a line about the validation; the live bar has no room for another."""
        self._refresh(trainer)
        if self._is_enabled and self._progress is None:
            number = (
                sum(map(int, trainer.num_val_batches)) if all(map(math.isfinite, trainer.num_val_batches)) else None
            )
            self._validation = self._open.enter_context(stage("validating", number, "batches"))

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Counts a batch."""
        if self._validation is not None:
            self._validation.advance()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the line."""
        self._open.close()
        self._validation = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows the last step, and ends the bar."""
        self._refresh(trainer, is_last=True)
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ends the bar."""
        self._close()

    def _close(self) -> None:
        self._open.close()
        self._validation = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar."""
        self._console.print(*args)
