"""The data of a run as Lightning takes it: windows of a prepared corpus, or of a stream, from an exact position.

The position is one integer that belongs to the data module, and moves when a window has been trained, not when it was
read ahead. A callback that the module puts before all others moves it, so that whatever saves at `on_train_batch_end`
saves the position after the window.

An epoch, in Lightning's sense, is as many windows as the corpus has sequences for, whatever the mix; it ends nothing:
position and order go on. So `max_steps` is the natural length of a run, `trainer.max_epochs` counts corpus sizes. Only
limits on all sources (`data.max_epochs`) make the data end, and the run with them. Lightning's epoch of a stream never
ends: nobody has counted its sequences.

    logged                       unit and meaning
    data/epochs_SOURCE           how often the source was drawn: its sequences drawn over those that it has; of a
                                 stream, spans of its files read over those that there are
    data/tokens_SOURCE           tokens drawn from it, padding not counted
    data/bad_documents_SOURCE    of a stream: documents skipped because they could not be read
    data/damaged_spans_SOURCE    of a stream: spans of damaged files whose rest was skipped
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from genesis.data.clock import CopyClock
from genesis.data.corpus import Corpus, VerifyHashes, open_corpus
from genesis.data.loader import (
    Ranks,
    SequenceFormat,
    TrainWindows,
    ValidationWindows,
    WindowLoader,
    plan_micro_batches,
)
from genesis.data.manifest import read_manifest
from genesis.data.order import Mix, SequenceOrder, build_order, weigh_sequences
from genesis.data.packing import Packing, count_train_sequences
from genesis.data.plans import SourcePlan, open_plan
from genesis.data.shards import little_endian, token_dtype
from genesis.data.stream.ledger import count_spans
from genesis.data.stream.open import Stream, open_stream
from genesis.data.stream.options import StreamOptions
from genesis.data.stream.state import combine_states
from genesis.data.stream.windows import StreamWindows
from genesis.data.window import Window
from genesis.errors import UserError
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.host_group import HostGroup

_ENDLESS_WINDOWS: Final = 1 << 40
"""An epoch of a stream, in Lightning's sense."""


class CorpusDataModule(pl.LightningDataModule):
    """Windows of a prepared corpus or of a stream; the batch of its loaders is a `Window`.

    Every rank calls it alike; it communicates nothing, but for a stream's figures when they are logged. A run that goes
    on starts from a restored state; a new run takes a new data module.

    Args:
        corpus: The directory that `genesis data prepare` wrote. Beside a stream it gives the validation set and the
            tokenizer alone, and may be left out.
        seq_len: Tokens of a sequence.
        micro_batch_size: Sequences of one forward and backward on one rank.
        global_batch_size: Sequences of one step, over all ranks.
        seed: Of the order.
        mix: Integer weights of sources, by their tokens (of a stream, by their sequences); by default those that the
            corpus was prepared with, or the stream's sources have.
        max_epochs: How often a source is drawn at most; one that it does not name has no limit.
        packing: How documents are put into sequences. Of a corpus, `best_fit` and `pad` need the plan of
            `genesis data plan`.
        stream: Raw shards to train on instead of a corpus.
        validation_micro_batch_size: Sequences of one validation forward; by default `micro_batch_size`.
        limit_validation_sequences: Validates on so many sequences, evenly spread, instead of on all.
        prefetch_windows: How many windows a thread makes ahead of the training step.
        verify_hashes: Whether to compare each shard with its hash when it is first read.
        tokenizer_hash: The tokenizer that the corpus must have been made with; by default any.
    """

    def __init__(
        self,
        corpus: str | None = None,
        *,
        seq_len: int,
        micro_batch_size: int,
        global_batch_size: int,
        seed: int = 0,
        mix: dict[str, int] | None = None,
        max_epochs: dict[str, int] | None = None,
        packing: Packing = "chunk",
        stream: StreamOptions | None = None,
        validation_micro_batch_size: int | None = None,
        limit_validation_sequences: int | None = None,
        prefetch_windows: int = 2,
        verify_hashes: VerifyHashes = "first_touch",
        tokenizer_hash: str | None = None,
    ) -> None:
        super().__init__()
        if corpus is None and stream is None:
            raise UserError("there is nothing to train on; give data.corpus (of `genesis data prepare`) or data.stream")
        self.path = None if corpus is None else Path(corpus)
        self.stream_options = stream
        self.seq_len = seq_len
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.mix = mix
        self.max_epochs = max_epochs
        self.packing: Packing = packing
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
        self._plans: tuple[SourcePlan, ...] | None = None
        self._packed_tokens: dict[str, int] = {}
        self._stream: Stream | None = None
        self._stream_windows: StreamWindows | None = None
        self._num_empty_positions = 0
        self._limit_val_batches: int | float | None = None  # the trainer's own, while there is nothing to validate

    @property
    def corpus(self) -> Corpus:
        """Returns the opened corpus."""
        assert self.path is not None, "a stream may be without a corpus"
        if self._corpus is None:
            self._corpus = open_corpus(self.path, tokenizer_hash=self.tokenizer_hash, verify_hashes=self.verify_hashes)
        return self._corpus

    @property
    def stream(self) -> Stream | None:
        """Returns the opened stream; None where a corpus is trained on."""
        if self._stream is None and self.stream_options is not None:
            self._stream = open_stream(
                self.stream_options,
                self._stream_tokenizer(self.stream_options),
                seed=self.seed,
                seq_len=self.seq_len,
                packing=self.packing,
                max_epochs=self.max_epochs,
            )
        return self._stream

    @property
    def identity(self) -> dict[str, str]:
        """Returns what a checkpoint says of the data that it was trained on."""
        if self.stream is not None:
            return {"tokenizer_hash": self.stream.tokenizer.hash, "stream": self.stream.hash()}
        assert self.path is not None
        manifest = read_manifest(self.path)
        return {"tokenizer_hash": manifest.tokenizer_hash, "corpus": manifest.name}

    @property
    def vocab_size(self) -> int:
        """Returns how many ids the tokenizer has."""
        return self.corpus.manifest.vocab_size if self.stream is None else self.stream.tokenizer.vocab_size

    @property
    def order(self) -> SequenceOrder:
        """Returns the order of the training sequences; of a stream, which source stands at each position."""
        if self._order is None:
            self._order = self._build_order()
        return self._order

    @property
    def plans(self) -> tuple[SourcePlan, ...] | None:
        """Returns the packing's plan of each source; None under `chunk` and for a stream, which need none."""
        if self._plans is None and self.packing != "chunk" and self.stream_options is None:
            self._plans = open_plan(self.corpus, self.packing, self.seq_len, self.verify_hashes)
        return self._plans

    @property
    def ledger(self) -> dict[str, dict[Literal["tokens", "epochs"], float]]:
        """Returns what was drawn of each source of a corpus up to the position; `stream_windows` knows a stream's."""
        drawn = self.order.sequences_drawn(self.data_position)
        return {
            name: {"tokens": self._packed_tokens.get(name, count * self.seq_len), "epochs": count / max(1, length)}
            for name, count, length in zip(self.order.names, drawn, self.order.num_sequences, strict=True)
        }

    @property
    def last_position(self) -> int | None:
        """Returns the position after the last window; None if the data do not end."""
        if self.order.end is None:
            return None
        return self.order.end - max(0, self.order.end - self.data_position) % self.global_batch_size

    # ---- Lightning's hooks

    def setup(self, stage: str) -> None:
        """Opens the corpus and refuses what can't be trained on, before a model is built."""
        self._give_back_validation()  # what raised before may have had no teardown
        _check_counts(
            seq_len=self.seq_len,
            validation_micro_batch_size=self.validation_micro_batch_size,
            limit_validation_sequences=self.limit_validation_sequences,
        )
        if self.prefetch_windows < 0:
            raise UserError(f"data.prefetch_windows is {self.prefetch_windows}; it counts from 0 up")
        if self.trainer is not None:
            _check_validation(self.trainer)
        if stage == "fit":
            plan_micro_batches(self.global_batch_size, self.micro_batch_size, self._ranks().world_size)
            self._put_position_callback_first()
            _ = self.order
            if self.stream is not None:
                self.stream_windows.open()
        if self.path is not None:
            _ = self.corpus
        if stage == "validate":
            self._check_has_validation_set()
        if stage == "fit" and self.trainer is not None and not self._has_validation_set():
            self._limit_val_batches = self.trainer.limit_val_batches
            self.trainer.limit_val_batches = 0  # else Lightning warns of a loader without batches

    def train_dataloader(self) -> WindowLoader:
        """Returns this rank's windows from the position on."""
        plan_micro_batches(self.global_batch_size, self.micro_batch_size, self._ranks().world_size)
        if self.stream is not None:
            return self._loader(self.stream_windows.window, _ENDLESS_WINDOWS)
        windows = TrainWindows(
            self.order,
            self.corpus.train,
            self._sequence_format(),
            self.global_batch_size,
            self.micro_batch_size,
            self._ranks(),
            self.plans,
        )
        weights = self._weights()
        counts = zip(self.order.names, self.order.num_sequences, strict=True)
        num_sequences = sum(count for name, count in counts if weights.get(name))
        num_windows = max(1, num_sequences // self.global_batch_size)
        return self._loader(windows.window, num_windows)

    def val_dataloader(self) -> WindowLoader:
        """Returns this rank's share of the validation set: no window where there is no such set."""
        windows = ValidationWindows(
            self.corpus.validation if self.path is not None else (),
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
        """Undoes what `setup` did to the trainer, and ends a stream's workers."""
        self.close()
        self._give_back_validation()
        callbacks = self._callbacks()
        callbacks[:] = [callback for callback in callbacks if not self._is_own(callback)]

    def close(self) -> None:
        """Ends a stream's workers; the next fit starts new ones."""
        if self._stream_windows is not None:
            self._stream_windows.close()

    # ---- state

    def advance(self, window: Window) -> None:
        """Says that `window` has been trained; once more of the same window changes nothing."""
        expected = self.data_position + self.global_batch_size
        assert window.data_position in (self.data_position, expected), "windows are trained in their order, each once"
        if window.data_position == expected:
            self._count_packed_tokens()
            self.data_position = expected
            if self.stream is not None:
                self.stream_windows.release(expected)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last trained window, the order and the ledger, in plain types.

        Of a stream, where this rank's lanes stand, and the ledger of these.
        """
        state = {"data_position": self.data_position, **self._state_of_sequences()}
        if self.stream is not None:
            ledger_of_lanes = self.stream_windows.ledger(self.data_position)
            return {
                **state,
                "order": self.order.state(),
                "num_empty_positions": self._num_empty_positions,
                "stream": self.stream_windows.state(self.data_position),
                "ledger_of_lanes": {name: asdict(entry) for name, entry in ledger_of_lanes.items()},
            }
        ledger = self.ledger
        return {
            **state,
            "tokens_drawn": {name: drawn["tokens"] for name, drawn in ledger.items()},
            "epochs_drawn": {name: drawn["epochs"] for name, drawn in ledger.items()},
            "order": self.order.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where a saved run stood, with this run's mix from there on. Validation needs none of it.

        Raises:
            UserError: The saved run's order can't be continued here.
        """
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
            return
        if (self.stream is None) == ("stream" in state_dict):
            was, now = ("a corpus", "a stream") if self.stream is not None else ("a stream", "a corpus")
            raise UserError(
                f"the checkpoint was trained on {was}, this run trains on {now}, where no position is the same; give "
                "the data of the checkpoint, or begin a new run from its weights (--checkpoint.restore weights)"
            )
        for key, here in self._state_of_sequences().items():
            saved = state_dict.get(key, _BEFORE_PACKING.get(key))
            if saved != here:
                raise UserError(
                    f"the checkpoint was trained with {key} {saved}, this run has {here}; positions would name other "
                    f"sequences: {_REMEDIES[key]}"
                )
        position: int = state_dict["data_position"]
        order = self._build_order().continued(state_dict["order"], position)
        before, now = state_dict["order"]["mixes"], order.state()["mixes"]
        if now != before:
            ahead = (mix for mix in order.mixes if mix.start_position > position)
            rank_zero_info(_tell_changes(order, [replace(order.mix_at(position), start_position=position), *ahead]))
        self._order, self.data_position = order, position
        if self.stream is not None:
            self._num_empty_positions = state_dict["num_empty_positions"]
            self.stream_windows.order = order
            self.stream_windows.load_state(state_dict["stream"], position)
        if self.plans is not None:
            self._packed_tokens = dict(state_dict["tokens_drawn"])

    def combine_rank_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns one state for `load_state_dict` from those of all ranks that saved."""
        first, *_ = states
        return first if "stream" not in first else {**first, "stream": combine_states([s["stream"] for s in states])}

    # ---- streams

    @property
    def stream_windows(self) -> StreamWindows:
        """Returns this rank's windows of the stream."""
        assert self.stream is not None
        if self._stream_windows is None:
            self._stream_windows = StreamWindows(
                self.stream,
                self.order,
                self._sequence_format(),
                self.global_batch_size,
                self.micro_batch_size,
                self._ranks(),
            )
        return self._stream_windows

    @property
    def has_stream_ended(self) -> bool:
        """Returns whether every lane of the stream was asked in a row and none had a sequence left."""
        return self.stream is not None and self._num_empty_positions >= self.stream.num_lanes

    def count_empty(self, has_tokens: bool) -> None:
        """Says of the next window whether that of any rank had a token."""
        self._num_empty_positions = 0 if has_tokens else self._num_empty_positions + self.global_batch_size

    def _stream_tokenizer(self, options: StreamOptions) -> Tokenizer:
        if options.tokenizer is None and self.path is None:
            raise UserError("data.stream.tokenizer is not given, and no data.corpus that holds one; give one of them")
        tokenizer = Tokenizer.load(options.tokenizer if options.tokenizer is not None else self.corpus.tokenizer_path)
        wanted = self.tokenizer_hash if self.path is None else self.corpus.manifest.tokenizer_hash
        if wanted is not None and tokenizer.hash != wanted:
            other = "data.tokenizer_hash" if self.path is None else f"the tokenizer of {self.path}"
            raise UserError(
                f"the stream's tokenizer is {tokenizer.hash[:16]}, {other} is {wanted[:16] or 'unknown'}; give the same"
            )
        return tokenizer

    # ---- parts

    def _loader(self, build: Callable[[int], Window], num_windows: int) -> WindowLoader:
        return WindowLoader(
            build, lambda: self._positions(num_windows), num_windows, self.prefetch_windows, self._has_cuda()
        )

    def _positions(self, num_windows: int) -> range:
        end = self.data_position + num_windows * self.global_batch_size
        if self.last_position is not None:
            end = min(end, self.last_position)
        return range(self.data_position, end, self.global_batch_size)

    def _build_order(self) -> SequenceOrder:
        if self.stream is not None:
            # Its sequences have no numbers, and its limits of epochs are the lanes' to keep.
            return build_order(dict.fromkeys(self.stream.names, 1), self._weights(), self.seed)
        counts, weights = self._count_sequences(), self._weights()
        if self.plans is not None:
            sources = zip(self.corpus.train, self.plans, strict=True)
            weights = weigh_sequences(weights, {source.name: plan.tokens_per_sequence for source, plan in sources})
        return build_order(counts, weights, self.seed, self.max_epochs)

    def _weights(self) -> Mapping[str, int]:
        sources = self.corpus.train if self.stream is None else self.stream.options.sources
        return self.mix if self.mix is not None else {source.name: source.weight for source in sources}

    def _count_sequences(self) -> dict[str, int]:
        sources, weights = self.corpus.train, self._weights()
        if self.plans is not None:
            return {source.name: plan.num_sequences for source, plan in zip(sources, self.plans, strict=True)}
        for source in sources:
            if weights.get(source.name) and source.num_tokens <= self.seq_len:
                raise UserError(
                    f"source {source.name!r} has {source.num_tokens} tokens, a sequence of data.seq_len "
                    f"{self.seq_len} reads {self.seq_len + 1}; lower data.seq_len, or give the source weight 0"
                )
        return {source.name: count_train_sequences(source.num_tokens, self.seq_len) for source in sources}

    def _state_of_sequences(self) -> dict[str, Any]:
        """Returns what decides which tokens a sequence holds, beside the order."""
        packed = () if self.plans is None else zip(self.corpus.train, self.plans, strict=True)
        plans = {source.name: plan.hash for source, plan in packed}
        return {"seq_len": self.seq_len, "packing": self.packing, "plans": plans}

    def _count_packed_tokens(self) -> None:
        """Enters the global batch at the position into the ledger: packed sequences differ in length."""
        if self.plans is None:
            return
        source_ids, sequence_ids = self.order.sequences(self.data_position, self.global_batch_size)
        for number, name in enumerate(self.order.names):
            own = sequence_ids[source_ids == number]
            num_tokens = self.plans[number].num_tokens(own) if len(own) else 0
            self._packed_tokens[name] = self._packed_tokens.get(name, 0) + num_tokens

    def _sequence_format(self) -> SequenceFormat:
        if self._format is None and self.stream is not None:
            tokenizer = self.stream.tokenizer
            dtype = little_endian(token_dtype(tokenizer.vocab_size))
            self._format = SequenceFormat(self.seq_len, tokenizer.eos_id, tokenizer.piece_num_bytes, dtype)
        if self._format is None:
            manifest = self.corpus.manifest
            self._format = SequenceFormat(
                self.seq_len,
                manifest.eos_id,
                self.corpus.piece_num_bytes(),
                little_endian(manifest.token_dtype),
            )
        return self._format

    def _ranks(self) -> Ranks:
        """Returns this rank among those that the strategy gives different data."""
        if self.trainer is None or not isinstance(self.trainer.strategy, ParallelStrategy):
            return Ranks()
        sampler = self.trainer.strategy.distributed_sampler_kwargs
        return Ranks(sampler["rank"], sampler["num_replicas"])

    def _give_back_validation(self) -> None:
        if self.trainer is not None and self._limit_val_batches is not None:
            self.trainer.limit_val_batches, self._limit_val_batches = self._limit_val_batches, None

    def _has_validation_set(self) -> bool:
        return self.path is not None and any(source.num_tokens for source in self.corpus.validation)

    def _check_has_validation_set(self) -> None:
        if self.path is None:
            raise UserError("data.stream has no validation set; give data.corpus, the corpus that has one")
        if not self._has_validation_set():
            raise UserError(
                f"the corpus {self.path} has no validation set; prepare it with a validation_fraction, or give another "
                "by data.corpus"
            )
        if self.trainer is not None and not self.trainer.limit_val_batches:
            raise UserError("trainer.limit_val_batches is 0, so that nothing would be validated; leave it out")

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
    """Moves the data module's position when a window has been trained, logs, and ends the run with the data.

    It has no state. All ranks come to the same by themselves, or by what the module has summed before; a stream's
    ledger is summed over them when it is logged.
    """

    def __init__(self, data: CorpusDataModule) -> None:
        self.data = data
        self._host_group = HostGroup()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tells of a length of training that the data do not have; ends a run whose data ended before."""
        last = self.data.last_position
        if last is not None:
            num_steps = trainer.global_step + max(0, last - self.data.data_position) // self.data.global_batch_size
            if trainer.min_steps and trainer.min_steps > num_steps:
                raise UserError(
                    f"trainer.min_steps is {trainer.min_steps}, data.max_epochs ends the data after {num_steps} steps; "
                    "lower the one or raise the other"
                )
            if trainer.max_steps > num_steps:
                rank_zero_info(
                    f"data.max_epochs ends the data after {num_steps} steps of trainer.max_steps {trainer.max_steps}"
                )
        self._stop_at_the_end(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Window, batch_idx: int
    ) -> None:
        """Moves the position."""
        before, order = self.data.data_position, self.data.order
        if self.data.stream is not None and batch.data_position != before:
            self.data.count_empty(getattr(pl_module, "skip_reason", None) != "no_valid_tokens")
        self.data.advance(batch)
        passed = (mix for mix in order.mixes if before < mix.start_position <= self.data.data_position)
        if changes := [mix for mix in passed if any(mix.weights)]:
            rank_zero_info(_tell_changes(order, changes))
        self._stop_at_the_end(trainer)
        if trainer.global_step % vars(trainer)["log_every_n_steps"] == 0 or trainer.should_stop:
            pl_module.log_dict(self._metrics(), on_step=True, on_epoch=False, batch_size=1)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ends a stream's workers."""
        self.data.close()

    def _stop_at_the_end(self, trainer: pl.Trainer) -> None:
        data, order = self.data, self.data.order
        if data.has_stream_ended:
            rank_zero_info(
                "every source of the stream has reached its limit of epochs, or holds no text: training ends at "
                f"position {data.data_position}"
            )
            trainer.should_stop = True
        if data.last_position is None or data.data_position < data.last_position:
            return
        assert order.end is not None
        drawn = zip(
            order.names, order.sequences_drawn(data.data_position), order.sequences_drawn(order.end), strict=True
        )
        dropped = ", ".join(f"{name} {last - first}" for name, first, last in drawn if last > first)
        rank_zero_info(
            f"every source has reached its limit of epochs: training ends at position {data.data_position}; "
            + (f"dropped, too few for a global batch: sequences of {dropped}" if dropped else "nothing is dropped")
        )
        trainer.should_stop = True

    def _metrics(self) -> dict[str, Tensor]:
        drawn = self.data.ledger if self.data.stream is None else self._stream_figures(self.data.stream)
        # As float64 on the CPU: Lightning would move a number to the device, as a float32.
        return {
            f"data/{what}_{name}": torch.tensor(value, dtype=torch.float64)
            for name, figures in drawn.items()
            for what, value in figures.items()
        }

    def _stream_figures(self, stream: Stream) -> dict[str, dict[str, float]]:
        """Returns the figures of all ranks' lanes together."""
        entries = self.data.stream_windows.ledger(self.data.data_position).values()
        own = [(e.num_tokens, e.num_spans, e.num_bad_documents, e.num_damaged_spans) for e in entries]
        sums = iter(self._host_group.sum([value for values in own for value in values]).wait())
        return {
            name: {
                "tokens": next(sums),
                "epochs": next(sums) / num_spans,
                "bad_documents": next(sums),
                "damaged_spans": next(sums),
            }
            for name, num_spans in count_spans(stream).items()
        }


_BEFORE_PACKING: Final[dict[str, Any]] = {"packing": "chunk", "plans": {}}
"""What a checkpoint means that does not say how its documents were packed."""
_REMEDIES: Final = {
    "seq_len": "set data.seq_len to the checkpoint's",
    "packing": "set data.packing to the checkpoint's",
    "plans": "train with the plan that the checkpoint was trained with",
}


def _tell_changes(order: SequenceOrder, mixes: Sequence[Mix]) -> str:
    """Returns a line that names mixes and where they begin."""

    def tell(mix: Mix) -> str:
        weights = ", ".join(f"{name} {weight}" for name, weight in zip(order.names, mix.weights, strict=True) if weight)
        return f"{weights or 'none, every source has reached its limit'} from position {mix.start_position} on"

    return "the mix of sources changes: " + "; ".join(map(tell, mixes))


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"data.{name} is {value}; it counts from 1 up")


def _check_validation(trainer: pl.Trainer) -> None:
    """Refuses what would make validation another one on another number of ranks, or leave a rank waiting."""
    settings = vars(trainer)
    if settings["fast_dev_run"] or settings["overfit_batches"]:  # these try things out, on few batches
        return
    limit = trainer.limit_val_batches
    if limit and not (isinstance(limit, float) and limit == 1.0):
        raise UserError(
            f"trainer.limit_val_batches is {limit}: it counts micro-batches of each rank, which are other sequences on "
            "another number of ranks; set data.limit_validation_sequences, which takes them from all over the set"
        )
    if trainer.world_size > 1 and "val_check_interval" not in settings:  # where Lightning keeps a number of steps
        raise UserError(
            "trainer.val_check_interval is a time: each rank would go by its own clock, and wait for others that do "
            "not validate; give a number of steps"
        )
