"""The data of a run as Lightning takes it: windows of a prepared corpus, from an exact position.

The position is one integer that belongs to the data module, and moves when a window has been trained, not when it was
read ahead. A callback that the module puts before all others moves it, so that whatever saves at `on_train_batch_end`
saves the position after the window.

An epoch, in Lightning's sense, is as many windows as the corpus has sequences for, whatever the mix; it ends nothing:
position and order go on. So `max_steps` is the natural length of a run, `max_epochs` counts corpus sizes.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_info

from genesis.data.clock import CopyClock
from genesis.data.corpus import Corpus, VerifyHashes, open_corpus
from genesis.data.loader import (
    Ranks,
    SequenceFormat,
    TrainWindows,
    ValidationWindows,
    WindowLoader,
    count_train_sequences,
    plan_micro_batches,
)
from genesis.data.order import SequenceOrder, build_order
from genesis.data.shards import little_endian
from genesis.data.window import Window
from genesis.errors import UserError
from genesis.tokenizer.tokenizer import Tokenizer


class CorpusDataModule(pl.LightningDataModule):
    """Windows of a prepared corpus; the batch of its loaders is a `Window`.

    Every rank calls it alike; it communicates nothing. A run that goes on starts from a restored state; a new run takes
    a new data module.

    Args:
        corpus: The directory that `genesis data prepare` wrote.
        seq_len: Tokens of a sequence.
        micro_batch_size: Sequences of one forward and backward on one rank.
        global_batch_size: Sequences of one step, over all ranks.
        seed: Of the order.
        mix: Integer weights of sources; by default those that the corpus was prepared with.
        validation_micro_batch_size: Sequences of one validation forward; by default `micro_batch_size`.
        limit_validation_sequences: Validates on so many sequences, evenly spread, instead of on all.
        prefetch_windows: How many windows a thread makes ahead of the training step.
        verify_hashes: Whether to compare each shard with its hash when it is first read.
        tokenizer_hash: The tokenizer that the corpus must have been made with; by default any.
    """

    def __init__(
        self,
        corpus: str,
        seq_len: int,
        micro_batch_size: int,
        global_batch_size: int,
        seed: int = 0,
        mix: dict[str, int] | None = None,
        validation_micro_batch_size: int | None = None,
        limit_validation_sequences: int | None = None,
        prefetch_windows: int = 2,
        verify_hashes: VerifyHashes = "first_touch",
        tokenizer_hash: str | None = None,
    ) -> None:
        super().__init__()
        self.path = Path(corpus)
        self.seq_len = seq_len
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.mix = mix
        self.validation_micro_batch_size = validation_micro_batch_size or micro_batch_size
        self.limit_validation_sequences = limit_validation_sequences
        self.prefetch_windows = prefetch_windows
        self.verify_hashes: VerifyHashes = verify_hashes
        self.tokenizer_hash = tokenizer_hash
        self.data_position = 0
        self.copy_clock = CopyClock()
        self._corpus: Corpus | None = None
        self._format: SequenceFormat | None = None
        self._order: SequenceOrder | None = None

    @property
    def corpus(self) -> Corpus:
        """Returns the opened corpus."""
        if self._corpus is None:
            self._corpus = open_corpus(self.path, tokenizer_hash=self.tokenizer_hash, verify_hashes=self.verify_hashes)
        return self._corpus

    @property
    def order(self) -> SequenceOrder:
        """Returns the order of the training sequences."""
        if self._order is None:
            self._order = self._build_order()
        return self._order

    # ---- Lightning's hooks

    def setup(self, stage: str) -> None:
        """Opens the corpus and refuses what can't be trained on, before a model is built."""
        _check_counts(
            seq_len=self.seq_len,
            validation_micro_batch_size=self.validation_micro_batch_size,
            limit_validation_sequences=self.limit_validation_sequences,
        )
        if self.prefetch_windows < 0:
            raise UserError(f"data.prefetch_windows is {self.prefetch_windows}; it counts from 0 up")
        if stage == "fit":
            plan_micro_batches(self.global_batch_size, self.micro_batch_size, self._ranks().world_size)
            self._put_position_callback_first()
            _ = self.order
        _ = self.corpus

    def train_dataloader(self) -> WindowLoader:
        """Returns this rank's windows from the position on."""
        plan_micro_batches(self.global_batch_size, self.micro_batch_size, self._ranks().world_size)
        windows = TrainWindows(
            self.order,
            self.corpus.train,
            self._sequence_format(),
            self.global_batch_size,
            self.micro_batch_size,
            self._ranks(),
        )
        weights = self.order.mixes[-1].weights
        num_sequences = sum(count for count, weight in zip(self.order.num_sequences, weights, strict=True) if weight)
        num_windows = max(1, num_sequences // self.global_batch_size)
        return WindowLoader(
            windows.window, lambda: self._positions(num_windows), num_windows, self.prefetch_windows, self._has_cuda()
        )

    def val_dataloader(self) -> WindowLoader:
        """Returns this rank's share of the validation set: no window where the corpus has no such set."""
        windows = ValidationWindows(
            self.corpus.validation,
            self._sequence_format(),
            self.validation_micro_batch_size,
            self._ranks(),
            self.limit_validation_sequences,
        )
        return WindowLoader(
            windows.window, lambda: range(len(windows)), len(windows), self.prefetch_windows, self._has_cuda()
        )

    def transfer_batch_to_device(self, batch: Window, device: torch.device, dataloader_idx: int) -> Window:
        """Returns the window on `device`; from page-locked memory the copy overlaps what the device is doing."""
        return self.copy_clock.copy(batch, device)

    def teardown(self, stage: str) -> None:
        """Takes the callback away that `setup` added."""
        callbacks = self._callbacks()
        callbacks[:] = [callback for callback in callbacks if not self._is_own(callback)]

    # ---- state

    def advance(self, window: Window) -> None:
        """Says that `window` has been trained; once more of the same window changes nothing."""
        expected = self.data_position + self.global_batch_size
        assert window.data_position in (self.data_position, expected), "windows are trained in their order, each once"
        self.data_position = window.data_position

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last trained window, and the order, in plain types."""
        drawn = self.order.sequences_drawn(self.data_position)
        return {
            "data_position": self.data_position,
            "seq_len": self.seq_len,
            "tokens_drawn": {name: count * self.seq_len for name, count in zip(self.order.names, drawn, strict=True)},
            "order": self.order.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where a saved run stood, with this run's mix from there on.

        Raises:
            UserError: The saved run's order can't be continued here.
        """
        if state_dict["seq_len"] != self.seq_len:
            raise UserError(
                f"the checkpoint was trained with seq_len {state_dict['seq_len']}, this run has {self.seq_len}; "
                "positions would name other sequences: set data.seq_len to the checkpoint's"
            )
        position: int = state_dict["data_position"]
        order = self._build_order().continued(state_dict["order"], position)
        if len(order.mixes) > len(state_dict["order"]["mixes"]):
            weights = ", ".join(f"{k} {v}" for k, v in zip(order.names, order.mixes[-1].weights, strict=True))
            rank_zero_info(f"the mix of sources changes at position {position} to: {weights}")
        self._order, self.data_position = order, position

    # ---- parts

    def _positions(self, num_windows: int) -> range:
        end = self.data_position + num_windows * self.global_batch_size
        return range(self.data_position, end, self.global_batch_size)

    def _build_order(self) -> SequenceOrder:
        sources = self.corpus.train
        weights = self.mix if self.mix is not None else {source.name: source.weight for source in sources}
        for source in sources:
            if weights.get(source.name) and source.num_tokens <= self.seq_len:
                raise UserError(
                    f"source {source.name!r} has {source.num_tokens} tokens, a sequence of data.seq_len "
                    f"{self.seq_len} reads {self.seq_len + 1}; lower data.seq_len, or give the source weight 0"
                )
        counts = {source.name: count_train_sequences(source.num_tokens, self.seq_len) for source in sources}
        return build_order(counts, weights, self.seed)

    def _sequence_format(self) -> SequenceFormat:
        if self._format is None:
            manifest = self.corpus.manifest
            self._format = SequenceFormat(
                self.seq_len,
                manifest.eos_id,
                Tokenizer.load(self.corpus.tokenizer_path).piece_num_bytes,
                little_endian(manifest.token_dtype),
            )
        return self._format

    def _ranks(self) -> Ranks:
        """Returns this rank among those that the strategy gives different data."""
        if self.trainer is None or not isinstance(self.trainer.strategy, ParallelStrategy):
            return Ranks()
        sampler = self.trainer.strategy.distributed_sampler_kwargs
        return Ranks(sampler["rank"], sampler["num_replicas"])

    def _has_cuda(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _callbacks(self) -> list[pl.Callback]:
        if self.trainer is None:
            return []
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # set by its connector
        return callbacks

    def _put_position_callback_first(self) -> None:
        callbacks = self._callbacks()
        if not any(self._is_own(callback) for callback in callbacks):
            callbacks.insert(0, _PositionCallback(self))

    def _is_own(self, callback: pl.Callback) -> bool:
        return isinstance(callback, _PositionCallback) and callback.data is self


class _PositionCallback(pl.Callback):
    """Moves the data module's position when a window has been trained. It has no state and does not communicate."""

    def __init__(self, data: CorpusDataModule) -> None:
        self.data = data

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Window, batch_idx: int
    ) -> None:
        self.data.advance(batch)


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"data.{name} is {value}; it counts from 1 up")
