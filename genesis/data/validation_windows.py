"""The windows of a validation set, in which every label counts once, and conversations stay whole."""

import json
from collections.abc import Sequence
from typing import Final

import numpy as np
from blake3 import blake3

from genesis.data.corpus import Corpus
from genesis.data.loader import (
    Ranks,
    SequenceFormat,
    TokenStream,
    build_window,
    fill_pieces,
    make_label_rows,
    read_row,
)
from genesis.data.packing import PackedSequences, pack_documents
from genesis.data.plans import hash_shards
from genesis.data.window import AccumulationWindow

_NAME_DIGITS: Final = 16


class ValidationWindows:
    """One rank's windows, of one micro-batch each, of a whole validation set. Deterministic and thread-safe.

    Every label of the set counts once. Whatever the packing of the training set, each source's stream is cut every S
    tokens; conversations stay whole, as `best_fit` packs them. A source's last sequence may be short and the last
    windows may be empty: they are padded with labels that do not count, so that all ranks have the same number of
    windows.

    Args:
        sources: The validation set.
        sequence_format: How tokens become sequences.
        micro_batch_size: Sequences per micro-batch.
        ranks: The number of this rank.
        limit_sequences: Number of sequences to use, evenly spread over the set; None uses all.
    """

    def __init__(
        self,
        sources: Sequence[TokenStream],
        sequence_format: SequenceFormat,
        micro_batch_size: int,
        ranks: Ranks,
        limit_sequences: int | None = None,
    ) -> None:
        self._sources = sources
        self._format = sequence_format
        self._micro_batch_size = micro_batch_size
        self._ranks = ranks
        self._packed = [_pack_whole(source, sequence_format.seq_len) for source in sources]
        per_source = [
            -(-max(0, source.num_tokens - 1) // sequence_format.seq_len) if packed is None else len(packed)
            for source, packed in zip(sources, self._packed, strict=True)
        ]
        self._last_of_source = np.cumsum(per_source, dtype=np.int64)
        self._num_in_set = sum(per_source)
        self.num_sequences = self._num_in_set if limit_sequences is None else min(limit_sequences, self._num_in_set)

    def __len__(self) -> int:
        return -(-self.num_sequences // (self._micro_batch_size * self._ranks.world_size))

    def window(self, index: int) -> AccumulationWindow:
        """Returns this rank's window `index`."""
        seq_len = self._format.seq_len
        begin = index * self._micro_batch_size * self._ranks.world_size
        first = begin + self._ranks.rank * self._micro_batch_size
        rows = np.full((self._micro_batch_size, seq_len + 1), self._format.padding_id, self._format.token_dtype)
        ends = np.zeros((self._micro_batch_size, seq_len), np.bool_)
        has_label = make_label_rows(self._sources, rows, self._format)
        lengths = np.zeros(self._micro_batch_size, np.int64)
        for row in range(min(self._micro_batch_size, self.num_sequences - first)):
            number, sequence = self._locate(first + row)
            source, packed, start = self._sources[number], self._packed[number], sequence * seq_len
            if packed is not None:
                of_row = None if has_label is None else has_label[row]
                pieces = packed.pieces(sequence)
                padding_id = self._format.padding_id
                lengths[row] = fill_pieces(source, *pieces, rows[row], ends[row], of_row, padding_id)
                continue
            length = lengths[row] = min(seq_len, source.num_tokens - 1 - start)
            of_row = None if has_label is None else has_label[row, : length + 1]
            read_row(source, start, rows[row, : length + 1], ends[row, :length], of_row)
        end = min(begin + self._micro_batch_size * self._ranks.world_size, self.num_sequences)
        return build_window(rows, self._format, self._micro_batch_size, end, ends, lengths, has_label)

    def _locate(self, sequence: int) -> tuple[int, int]:
        """Returns the index of the source of a sequence, and the sequence's number in it."""
        in_set = sequence * self._num_in_set // self.num_sequences
        source = int(np.searchsorted(self._last_of_source, in_set, side="right"))
        before = int(self._last_of_source[source - 1]) if source else 0
        return source, in_set - before


def name_measure(corpus: Corpus, seq_len: int, limit_sequences: int | None) -> tuple[str, str | None]:
    """Returns a name of what a validation measures, and that of earlier versions if they measured the same.

    Losses under different names cannot be compared. Earlier versions cut conversations evenly, too.

    Args:
        corpus: The corpus, open.
        seq_len: Tokens of a sequence.
        limit_sequences: Number of sequences that are used; None for all.
    """
    are_whole = [source.has_conversations for source in corpus.validation]
    hashes = [(record.name, hash_shards(record)) for record in corpus.manifest.validation]
    content = json.dumps([are_whole, hashes, seq_len, limit_sequences])
    name = blake3(content.encode()).hexdigest()[:_NAME_DIGITS]
    return name, None if any(are_whole) else name


def _pack_whole(source: TokenStream, seq_len: int) -> PackedSequences | None:
    """Returns the sequences of conversations, each of them whole if it fits; None for text, which is cut evenly."""
    if not source.has_conversations:
        return None
    document_ends = np.concatenate([np.empty(0, np.int64), *source.document_ends()])
    return pack_documents(document_ends, seq_len, "best_fit")
