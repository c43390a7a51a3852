"""Training on a prepared corpus."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from genesis.base.errors import UserError, numbered
from genesis.chat.learned import build_prompt_form, find_recorded
from genesis.chat.render import read_template
from genesis.data.corpus import Corpus, TokenSource, VerifyHashes, open_corpus
from genesis.data.loader import Ranks, SequenceColumns, SequenceFormat, TrainWindows, plan_micro_batches
from genesis.data.manifest import read_manifest
from genesis.data.old_keys import rename_old_keys
from genesis.data.order import weigh_sequences
from genesis.data.packing import CUT_EVENLY, KEPT_WHOLE, Packing, count_train_sequences
from genesis.data.pair_windows import PairWindows
from genesis.data.pairs import AnswerSource, PairedSource, PairSet, ValuedSource
from genesis.data.plans import SourcePlan, hash_shards, open_plan, require_plan
from genesis.data.shards import little_endian
from genesis.data.training_data import (
    DataCursor,
    DataKind,
    SumOverRanks,
    TrainingOptions,
    check_kind,
    check_sequences,
    refuse_skips,
)
from genesis.data.window import AccumulationWindow, MicroBatch
from genesis.tokenizer.open import open_tokenizer


class CorpusData:
    """The `TrainingData` of a prepared corpus.

    Args:
        path: The directory that `genesis data prepare` or `genesis data adopt` wrote. It is opened at the first use.
        options: How sequences and batches are built; `best_fit` and `pad` need a plan, which `genesis data plan` makes.
        verify_hashes: Whether to compare each shard with its hash when the shard is first read.
        tokenizer_hash: The tokenizer that the corpus must have been made with; None accepts any.

    Attributes:
        columns: Further tensors of the training sequences, if an objective needs any; set them before the corpus is
            opened for training.
        has_answers: Whether conversations with values are read as single answers; set it before the corpus is opened.
        has_ends: The same for `PairSet.has_ends`.
    """

    tokens_per_second: Final = None
    queue_depths: Final = ()
    wait_remedy: Final = "raise data.prefetch_windows, put the corpus on a faster disk, or leave the loader a core"

    def __init__(
        self, path: Path, options: TrainingOptions, *, verify_hashes: VerifyHashes, tokenizer_hash: str | None
    ) -> None:
        self.path = path
        self.options = options
        self.vocabulary_owner = f"the corpus {path}"
        self.cursor = DataCursor(options, lambda: self.corpus.train, self._count_sequences)
        self._verify_hashes: VerifyHashes = verify_hashes
        self._tokenizer_hash = tokenizer_hash
        self._ranks = Ranks()
        self._pads_pairs = False
        self.columns: SequenceColumns | None = None
        self.has_answers = self.has_ends = False
        self._windows: TrainWindows | PairWindows | None = None
        self._packed_tokens: dict[str, int] = {}

    @cached_property
    def corpus(self) -> Corpus:
        """Returns the corpus, open."""
        return open_corpus(self.path, tokenizer_hash=self._tokenizer_hash, verify_hashes=self._verify_hashes)

    @property
    def validation_remedy(self) -> str:
        """Returns a line with the remedy for a run without a validation set."""
        advice = self.corpus.manifest.advise_held_out()
        return f"the corpus {self.path} has no validation set; {advice}, or set another by data.corpus"

    @cached_property
    def packing(self) -> Packing:
        """Returns how documents are put into sequences; by default conversations stay whole, and text is cut evenly."""
        if self.options.packing is not None:
            return self.options.packing
        return CUT_EVENLY if read_manifest(self.path).chat is None or self.kind != "text" else KEPT_WHOLE

    def make_plan(self) -> None:
        """Makes the packing plan of conversations, unless there is one; other data need none, or have their own.

        Locks may not reach from node to node: of several ranks, one process at a time may call this method.

        Raises:
            UserError: An index of documents is damaged, or the disk refuses the files.
        """
        if self.packing != "chunk" and self.corpus.manifest.chat is not None:
            require_plan(self.corpus, self.packing, self.options.seq_len)

    @cached_property
    def plans(self) -> tuple[SourcePlan, ...] | None:
        """Returns the packing plan of each source; None for `chunk`, which needs no plan."""
        if self.packing == "chunk":
            return None
        self.make_plan()
        return open_plan(self.corpus, self.packing, self.options.seq_len, self._verify_hashes)

    @cached_property
    def pairs(self) -> PairSet | None:
        """Returns the pairs of a corpus of pairs, or its single answers."""
        corpus, kind = self.corpus, self.kind
        if kind == "text":
            return None
        if self.packing != "chunk":
            what = "pairs of answers" if kind == "pairs" else "single answers"
            raise UserError(
                f"data.packing is {self.packing}, and {self.path} has {what}, which none joins: leave it out"
            )
        read = PairedSource if kind == "pairs" else ValuedSource
        train, validation = (tuple(map(read, sources)) for sources in (corpus.train, corpus.validation))
        identity = corpus.manifest.tokens_hash
        if kind == "answers":  # the length of a sequence cuts mismatched ones
            return PairSet(train, validation, f"{identity} {self.options.seq_len}", is_valued=True)
        return PairSet(train, validation, identity, has_ends=self.has_ends)

    @property
    def kind(self) -> DataKind:
        """Returns whether the corpus has text, pairs of answers, or single answers that an objective compares."""
        manifest = read_manifest(self.path)
        return "pairs" if manifest.is_paired else "answers" if self.has_answers and manifest.has_values else "text"

    @property
    def _planned(self) -> Sequence[SourcePlan | AnswerSource] | None:
        """Returns the sequences of each source of the training set; None if they follow from the number of tokens."""
        return self.plans if self.pairs is None else self.pairs.train

    @property
    def identity(self) -> dict[str, str]:
        """Returns the entries that identify the corpus in a checkpoint."""
        manifest = read_manifest(self.path)
        return {"tokenizer_hash": manifest.tokenizer_hash, "corpus": manifest.name}

    @property
    def vocab_size(self) -> int:
        """Returns the number of ids of the tokenizer."""
        return self.corpus.manifest.vocab_size

    @property
    def chat_template(self) -> str | None:
        """Returns the chat template of the corpus's conversations; None without conversations."""
        file = find_recorded(self.path)
        if self.corpus.manifest.chat is None or file is None:
            return None
        return build_prompt_form(read_template(file).text, open_tokenizer(self.path))

    @cached_property
    def sequence_format(self) -> SequenceFormat:
        """Returns how tokens become sequences."""
        manifest = self.corpus.manifest
        return SequenceFormat(
            self.options.seq_len,
            manifest.padding_id,
            self.corpus.token_num_bytes(),
            little_endian(manifest.token_dtype),
            has_values=manifest.has_values,
        )

    # ---- training

    def open(self, ranks: Ranks, *, pads_pairs: bool = False) -> None:
        """Opens the corpus for one rank and checks that it can be trained on; may be called repeatedly."""
        plan_micro_batches(self.options.global_batch_size, self.options.micro_batch_size, ranks.world_size)
        self._ranks, self._pads_pairs, self._windows = ranks, pads_pairs, None
        if self.pairs is not None:
            refuse_skips(self.options, "pairs of answers" if self.kind == "pairs" else "single answers")
            self.pairs.check_lengths(self.options.seq_len)
        _ = self.cursor.order

    def close(self) -> None:
        """Does nothing: the loader's thread reads the corpus, so that nothing must be closed here."""

    @property
    def num_windows(self) -> int:
        """Returns the number of windows in one pass over the corpus, whatever the mix."""
        order, weights = self.cursor.order, self.cursor.weights
        counts = zip(order.names, order.num_sequences, strict=True)
        num_sequences = sum(count for name, count in counts if weights.get(name))
        return max(1, num_sequences // self.options.global_batch_size)

    def window(self, position: int) -> AccumulationWindow:
        """Returns this rank's window of the global batch that begins at `position`."""
        if self._windows is None:
            options, form = self.options, self.sequence_format
            sizes = (options.global_batch_size, options.micro_batch_size, self._ranks)
            if self.pairs is not None:
                self._windows = PairWindows(self.cursor.order, self.pairs, form, *sizes, self._pads_pairs)
            else:
                self._windows = TrainWindows(
                    self.cursor.order, self.corpus.train, form, *sizes, self.plans, self.columns
                )
        return self._windows.window(position)

    def advance(self, window: AccumulationWindow, *, has_tokens: bool = True) -> str | None:
        """Moves the position past a trained window; returns a line about a mix that begins at the new position."""
        before = self.cursor.position
        note = self.cursor.advance(window)
        if self.cursor.position != before and not window.is_skipped:
            self._count_packed_tokens(before)
        return note

    def find_end(self) -> str | None:
        """Returns a line with the reason why training ends at this position, None if it continues."""
        order, last, position = self.cursor.order, self.cursor.last_position, self.cursor.position
        if order.end is None or last is None or position < last:
            return None
        consumed = zip(
            order.names, order.sequences_consumed(position), order.sequences_consumed(order.end), strict=True
        )
        dropped = ", ".join(f"{name} {end - now}" for name, now, end in consumed if end > now)
        return f"every source has reached its epoch limit: training ends at position {position}; " + (
            f"dropped sequences, too few for a global batch: {dropped}" if dropped else "no sequences are dropped"
        )

    @property
    def usage(self) -> dict[str, dict[str, float]]:
        """Returns the usage of each source up to the position."""
        order, position = self.cursor.order, self.cursor.position
        consumed, skipped = order.sequences_consumed(position), order.sequences_skipped(position)
        return {
            name: {
                "tokens": self._packed_tokens.get(name, (count - num_skipped) * self.options.seq_len),
                "epochs": count / max(1, length),
            }
            for name, count, num_skipped, length in zip(
                order.names, consumed, skipped, order.num_sequences, strict=True
            )
        }

    def sum_usage(self, sum_over_ranks: SumOverRanks) -> dict[str, dict[str, float]]:
        """Returns the usage of each source up to the position, which every rank knows without communication."""
        return self.usage

    # ---- fixed sequences, for what lies beside them

    def identify_sequences(self) -> dict[str, Any]:
        """Returns what determines the tokens of each sequence, by hashes, in plain types.

        Raises:
            UserError: The corpus has pairs of answers.
        """
        if self.pairs is not None:
            raise UserError(
                f"{self.path} has answers to compare, and a teacher's probabilities are for text: give other data"
            )
        manifest, order = self.corpus.manifest, self.cursor.order
        counts = dict(zip(order.names, order.num_sequences, strict=True))
        plans = [None for _ in counts] if self.plans is None else [plan.hash for plan in self.plans]
        sources = {
            record.name: {"shards": hash_shards(record), "plan": plan, "num_sequences": counts[record.name]}
            for record, plan in zip(manifest.train, plans, strict=True)
        }
        return {
            "seq_len": self.options.seq_len,
            "packing": self.packing,
            "tokenizer_hash": manifest.tokenizer_hash,
            "sources": sources,
        }

    def read_sequences(self, source: int, first: int, count: int) -> MicroBatch:
        """Returns consecutive sequences of one source as one micro-batch.

        Args:
            source: The index of the source in the corpus's training set.
            first: The first sequence of the source.
            count: Number of sequences.
        """
        windows = TrainWindows(
            *(self.cursor.order, self.corpus.train, self.sequence_format, count, count, Ranks(), self.plans)
        )
        (micro_batch,) = windows.read(np.full(count, source), np.arange(first, first + count), 0).micro_batches
        return micro_batch

    # ---- validation

    @property
    def validation(self) -> Sequence[TokenSource]:
        """Returns the sources of the corpus's validation set."""
        return self.corpus.validation

    # ---- state

    def state(self) -> dict[str, Any]:
        """Returns the position after the last trained window, the order and the usage, in plain types."""
        usage = self.usage
        return {
            **self.cursor.state(),
            **self._describe_sequences(),
            "tokens_consumed": {name: consumed["tokens"] for name, consumed in usage.items()},
            "epochs_consumed": {name: consumed["epochs"] for name, consumed in usage.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> str | None:
        """Continues from a saved state; returns a line about the mix if that has changed."""
        state = rename_old_keys(state)
        check_kind(state, is_stream=False)
        check_sequences(state, self._describe_sequences())
        note, self._windows = self.cursor.load_state(state), None
        if self._planned is not None:
            self._packed_tokens = dict(state["tokens_consumed"])
        return note

    def combine_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the first rank's state, because all ranks save the same."""
        first, *_ = states
        return first

    # ---- parts

    def _count_sequences(self, weights: Mapping[str, int]) -> tuple[Mapping[str, int], Mapping[str, int]]:
        sources, seq_len = self.corpus.train, self.options.seq_len
        if self._planned is not None:
            planned = dict(zip([source.name for source in sources], self._planned, strict=True))
            per_sequence = {name: plan.tokens_per_sequence for name, plan in planned.items()}
            return {name: plan.num_sequences for name, plan in planned.items()}, weigh_sequences(weights, per_sequence)
        for source in sources:
            if weights.get(source.name) and source.num_tokens <= seq_len:
                raise UserError(
                    f"source {source.name!r} has {numbered(source.num_tokens, 'tokens')}, but a sequence of "
                    f"data.seq_len {seq_len} reads {seq_len + 1}; lower data.seq_len, or give the source weight 0"
                )
        return {source.name: count_train_sequences(source.num_tokens, seq_len) for source in sources}, weights

    def _describe_sequences(self) -> dict[str, Any]:
        """Returns the settings that, beside the order, determine the tokens of a sequence."""
        packed = () if self._planned is None else zip(self.corpus.train, self._planned, strict=True)
        plans = {source.name: plan.hash for source, plan in packed}
        packing = self.packing if self.pairs is None else self.kind
        described = {"seq_len": self.options.seq_len, "packing": packing, "plans": plans}
        # Where answers end does not depend on their margins and values.
        return described if self.pairs is None else {**described, "answers": self.pairs.corpus_hash}

    def _count_packed_tokens(self, position: int) -> None:
        """Adds the global batch at a position to the usage; packed sequences differ in length."""
        if self._planned is None:
            return
        order = self.cursor.order
        source_ids, sequence_ids = order.sequences(position, self.options.global_batch_size)
        for number, name in enumerate(order.names):
            own = sequence_ids[source_ids == number]
            num_tokens = self._planned[number].num_tokens(own) if len(own) else 0
            self._packed_tokens[name] = self._packed_tokens.get(name, 0) + num_tokens
