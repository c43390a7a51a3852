"""Training straight from raw shards, without a corpus on disk."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from genesis.base.errors import UserError
from genesis.data.corpus import Corpus, TokenSource, VerifyHashes, open_corpus
from genesis.data.loader import Ranks, SequenceFormat, plan_micro_batches
from genesis.data.old_keys import rename_old_keys
from genesis.data.packing import CUT_EVENLY, Packing
from genesis.data.sources import describe_left_out
from genesis.data.stream.open import Stream, open_stream
from genesis.data.stream.options import StreamOptions
from genesis.data.stream.state import combine_states, count_spans
from genesis.data.stream.windows import StreamWindows
from genesis.data.training_data import DataCursor, SumOverRanks, TrainingOptions, check_kind, check_sequences
from genesis.data.window import AccumulationWindow
from genesis.tokenizer.open import has_hash, open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)
_ENDLESS_WINDOWS: Final = 1 << 40
"""Length of a stream's epoch in Lightning's sense; the number of its sequences is unknown."""


class StreamData:
    """The `TrainingData` of a stream.

    Args:
        stream_options: The options of the stream.
        options: How sequences and batches are built.
        corpus_path: A corpus that provides only the validation set and the tokenizer.
        verify_hashes: Whether to compare each shard of that corpus with its hash when the shard is first read.
        tokenizer_hash: The tokenizer that must make the tokens; None accepts any.
    """

    wait_remedy: Final = (
        "raise data.stream.num_workers if cores are free, or prepare a corpus with `genesis data prepare`"
    )
    kind: Final = "text"
    chat_template: Final = None
    """A stream has no conversations."""
    pairs: Final = None
    """A stream has no pairs of answers."""

    def __init__(
        self,
        stream_options: StreamOptions,
        options: TrainingOptions,
        *,
        corpus_path: Path | None,
        verify_hashes: VerifyHashes,
        tokenizer_hash: str | None,
    ) -> None:
        self.stream_options = stream_options
        self.options = options
        self.packing: Packing = options.packing or CUT_EVENLY
        self.corpus_path = corpus_path
        # A stream's sequences have no numbers, and the lanes keep its epoch limits.
        self.cursor = DataCursor(options, lambda: stream_options.sources, self._count_sequences, has_limits=False)
        self._verify_hashes: VerifyHashes = verify_hashes
        self._tokenizer_hash = tokenizer_hash
        self._ranks = Ranks()
        self._num_empty_positions = 0
        self._is_described = False

    @cached_property
    def corpus(self) -> Corpus | None:
        """Returns the corpus next to the stream, open."""
        if self.corpus_path is None:
            return None
        return open_corpus(self.corpus_path, tokenizer_hash=self._tokenizer_hash, verify_hashes=self._verify_hashes)

    @cached_property
    def stream(self) -> Stream:
        """Returns the stream, open."""
        return open_stream(
            self.stream_options,
            self._load_tokenizer(),
            seed=self.options.seed,
            seq_len=self.options.seq_len,
            packing=self.packing,
            max_epochs=self.options.max_epochs,
        )

    @cached_property
    def windows(self) -> StreamWindows:
        """Returns this rank's windows of the stream."""
        return StreamWindows(
            self.stream,
            self.cursor.order,
            self.sequence_format,
            self.options.global_batch_size,
            self.options.micro_batch_size,
            self._ranks,
        )

    @property
    def identity(self) -> dict[str, str]:
        """Returns the entries that identify the stream in a checkpoint."""
        return {"tokenizer_hash": self.stream.tokenizer.hash, "stream": self.stream.hash()}

    @property
    def vocab_size(self) -> int:
        """Returns the number of ids of the tokenizer."""
        return self.stream.tokenizer.vocab_size

    @property
    def vocabulary_owner(self) -> str:
        """Returns the name of the vocabulary's owner, for error messages."""
        return "the stream's tokenizer"

    @cached_property
    def sequence_format(self) -> SequenceFormat:
        """Returns how tokens become sequences."""
        return SequenceFormat.of(self.stream.tokenizer, self.options.seq_len)

    # ---- training

    def open(self, ranks: Ranks, *, pads_pairs: bool = False) -> None:
        """Opens the stream for one rank and checks that it can be trained on; may be called repeatedly."""
        plan_micro_batches(self.options.global_batch_size, self.options.micro_batch_size, ranks.world_size)
        if ranks != self._ranks and "windows" in vars(self):
            # The open stream has read the lanes of the first rank; the state of the other ranks' lanes is unknown.
            raise RuntimeError(
                f"the stream was opened for {self._ranks} but is used by {ranks}; build a new data module"
            )
        self._ranks = ranks
        if ranks.rank == 0 and not self._is_described:
            for listing in self.stream.listings:
                for line in describe_left_out(listing):
                    _logger.warning("%s", line)
        self._is_described = True
        self.windows.open()

    def close(self) -> None:
        """Ends the workers; after the next `open` new ones can start."""
        if "windows" in vars(self):
            self.windows.close()

    @property
    def num_windows(self) -> int:
        """Returns a number that no run reaches."""
        return _ENDLESS_WINDOWS

    def window(self, position: int) -> AccumulationWindow:
        """Returns this rank's window of the global batch that begins at `position`."""
        return self.windows.window(position)

    def advance(self, window: AccumulationWindow, *, has_tokens: bool = True) -> str | None:
        """Moves the position past a trained window; returns a line about a mix that begins at the new position."""
        before = self.cursor.position
        note = self.cursor.advance(window)
        if self.cursor.position != before:
            if not window.is_skipped:  # whether its lanes had a sequence, nobody has looked at
                size = self.options.global_batch_size
                self._num_empty_positions = 0 if has_tokens else self._num_empty_positions + size
            self.windows.release(self.cursor.position)
        return note

    @property
    def has_ended(self) -> bool:
        """Returns whether the last round over all lanes found no sequence."""
        return self._num_empty_positions >= self.stream.num_lanes

    def find_end(self) -> str | None:
        """Returns a line with the reason why training ends at this position, None if it continues."""
        if not self.has_ended:
            return None
        return (
            "every source of the stream has reached its epoch limit, or has no text: training ends at position "
            f"{self.cursor.position}"
        )

    def sum_usage(self, sum_over_ranks: SumOverRanks) -> dict[str, dict[str, float]]:
        """Returns the usage of each source, summed over the lanes of all ranks."""
        entries = self.windows.usage(self.cursor.position).values()
        own = [
            (e.num_tokens, e.num_spans, e.num_bad_documents, e.num_damaged_spans, e.num_blank_documents)
            for e in entries
        ]
        sums = iter(sum_over_ranks([value for values in own for value in values]))
        return {
            name: {
                "tokens": next(sums),
                "epochs": next(sums) / num_spans,
                "bad_documents": next(sums),
                "damaged_spans": next(sums),
                "blank_documents": next(sums),
            }
            for name, num_spans in count_spans(self.stream).items()
        }

    # ---- validation

    @property
    def validation(self) -> Sequence[TokenSource]:
        """Returns the sources of the validation set of the corpus next to the stream."""
        return () if self.corpus is None else self.corpus.validation

    @property
    def validation_remedy(self) -> str:
        """Returns a line with the remedy for a run without a validation set."""
        if self.corpus_path is None:
            return "data.stream has no validation set; give a corpus with one by data.corpus"
        return (
            f"the corpus {self.corpus_path} has no validation set; prepare it with a larger validation_fraction, or "
            "give another by data.corpus"
        )

    # ---- state

    def state(self) -> dict[str, Any]:
        """Returns the position after the last trained window, and the state and usage of this rank's lanes."""
        usage_of_lanes = self.windows.usage(self.cursor.position)
        return {
            **self.cursor.state(),
            **self._describe_sequences(),
            "num_empty_positions": self._num_empty_positions,
            "stream": self.windows.state(self.cursor.position),
            "usage_of_lanes": {name: entry._asdict() for name, entry in usage_of_lanes.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> str | None:
        """Continues from a saved state; returns a line about the mix if that has changed."""
        state = rename_old_keys(state)
        check_kind(state, is_stream=True)
        check_sequences(state, self._describe_sequences())
        note, self._num_empty_positions = self.cursor.load_state(state), state["num_empty_positions"]
        self.windows.order = self.cursor.order
        self.windows.load_state(state["stream"], self.cursor.position)
        return note

    def combine_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the state with all ranks' lanes."""
        first, *_ = states
        return {**first, "stream": combine_states([state["stream"] for state in states])}

    # ---- telemetry

    @property
    def tokens_per_second(self) -> float | None:
        """Returns the throughput of all workers together, None before they have made a block."""
        return self.windows.tokens_per_second

    @property
    def queue_depths(self) -> tuple[int, ...]:
        """Returns the number of blocks that each worker still has to make."""
        return self.windows.queue_depths

    # ---- parts

    def _count_sequences(self, weights: Mapping[str, int]) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return dict.fromkeys(self.stream.names, 1), weights

    def _describe_sequences(self) -> dict[str, Any]:
        """Returns the settings that, beside the order, determine the tokens of a sequence."""
        return {"seq_len": self.options.seq_len, "packing": self.packing, "plans": {}}

    def _load_tokenizer(self) -> Tokenizer:
        given = self.stream_options.tokenizer
        if given is not None:
            tokenizer = open_tokenizer(given)
        elif self.corpus is not None:
            tokenizer = open_tokenizer(self.corpus.path)
        else:
            raise UserError(
                "the stream has no tokenizer; give data.stream.tokenizer, or a data.corpus with a tokenizer"
            )
        wanted = self._tokenizer_hash if self.corpus is None else self.corpus.manifest.tokenizer_hash
        if wanted is not None and not has_hash(tokenizer, wanted):
            other = "data.tokenizer_hash" if self.corpus is None else f"the tokenizer of {self.corpus_path}"
            raise UserError(
                f"the stream's tokenizer is {tokenizer.hash[:16]}, {other} is {wanted[:16] or 'unknown'}; use the same"
            )
        return tokenizer
