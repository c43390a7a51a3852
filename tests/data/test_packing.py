import doctest
from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.data import packing as packing_module
from genesis.data.loader import SequenceFormat, build_window
from genesis.data.packing import (
    PackedSequences,
    Packing,
    count_lost,
    count_train_sequences,
    fill_row,
    mark_piece_ends,
    measure_packing,
    pack_documents,
)
from genesis.data.window import IGNORE_INDEX
from tests.data.corpora import BOS, EOS, FIRST_PIECE

lengths_of_documents = st.lists(st.integers(2, 60), min_size=1, max_size=60)
seq_lens = st.integers(1, 25)


def pack(lengths: list[int], seq_len: int, packing: Packing) -> PackedSequences:
    assert packing != "chunk"
    return pack_documents(np.cumsum(lengths, dtype=np.int64), seq_len, packing)


def pieces_of(packed: PackedSequences) -> list[list[tuple[int, int]]]:
    """(start, length) of each piece, sequence by sequence."""
    pieces = list(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))
    ends = packed.sequence_ends.tolist()
    return [pieces[first:last] for first, last in zip([0, *ends], ends, strict=False)]


def cut_slowly(lengths: list[int], seq_len: int) -> list[tuple[int, int]]:
    pieces = []
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        start = end - length
        while end - start > 1:
            pieces.append((start, min(seq_len, end - start)))
            start += pieces[-1][1]
    return pieces


def fit_slowly(lengths: list[int], seq_len: int) -> list[list[int]]:
    """Best-fit decreasing as it is written down: for each piece a look at every sequence."""
    sequences: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        taking = [sequence for sequence in sequences if sum(sequence) + length <= seq_len]
        if taking:
            max(taking, key=sum).append(length)
        else:
            sequences.append([length])
    return sequences


def stream_of(lengths: list[int]) -> np.ndarray:
    """A token of its own for each place, but for the documents' ends."""
    tokens = np.arange(FIRST_PIECE, FIRST_PIECE + sum(lengths))
    ends = np.cumsum(lengths)
    tokens[ends - lengths] = BOS
    tokens[ends - 1] = EOS
    return tokens


def rows_of(stream: np.ndarray, packed: PackedSequences, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    def read(start: int, out: np.ndarray) -> None:
        assert 0 <= start <= len(stream) - len(out)
        out[:] = stream[start : start + len(out)]

    stream_ends = set((np.flatnonzero(stream == EOS) + 1).tolist())
    rows = np.full((len(packed), seq_len + 1), -1)
    inner_ends = np.zeros((len(packed), seq_len), np.bool_)
    labels = np.empty(len(packed), np.int64)
    ends = packed.sequence_ends.tolist()
    for row, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        starts, sizes = packed.starts[first:last], packed.lengths[first:last]
        is_continued = bool(sizes[-1] == seq_len) and int(starts[-1]) + seq_len not in stream_ends
        labels[row] = fill_row(rows[row], starts, sizes, read, EOS, is_continued=is_continued)
        mark_piece_ends(inner_ends[row], sizes)
    return rows, inner_ends, labels


@given(lengths=lengths_of_documents, seq_len=seq_lens)
def test_pieces_are_those_of_the_documents_each_in_one_sequence(lengths: list[int], seq_len: int) -> None:
    for packing in ("best_fit", "pad"):
        sequences = pieces_of(pack(lengths, seq_len, packing))
        assert sorted(piece for sequence in sequences for piece in sequence) == cut_slowly(lengths, seq_len)
        assert all(sequence and sum(length for _, length in sequence) <= seq_len for sequence in sequences)
        assert packing == "best_fit" or all(len(sequence) == 1 for sequence in sequences)


@given(lengths=lengths_of_documents, seq_len=seq_lens)
def test_best_fit_is_that_of_a_search_over_all_sequences(lengths: list[int], seq_len: int) -> None:
    sequences = pieces_of(pack(lengths, seq_len, "best_fit"))
    slow = fit_slowly([length for _, length in cut_slowly(lengths, seq_len)], seq_len)
    # Of sequences with equal room any is the best fit; what later pieces find depends on the rooms alone.
    assert Counter(sum(length for _, length in sequence) for sequence in sequences) == Counter(map(sum, slow))


@given(lengths=lengths_of_documents, seq_len=seq_lens)
def test_every_label_of_the_corpus_counts_once_with_the_token_before_it(lengths: list[int], seq_len: int) -> None:
    stream = stream_of(lengths)
    ends = set(np.cumsum(lengths).tolist())
    expected = {(int(stream[at - 1]), int(stream[at])) for at in range(1, len(stream)) if at not in ends}
    sequence_format = SequenceFormat(seq_len, EOS, np.ones(FIRST_PIECE + len(stream), np.int32), stream.dtype)
    for packing in ("best_fit", "pad"):
        rows, ends, counts = rows_of(stream, pack(lengths, seq_len, packing), seq_len)
        (batch,) = build_window(rows, sequence_format, len(rows), 0, ends, counts).micro_batches
        valid = batch.labels != IGNORE_INDEX
        seen = Counter(zip(batch.input_ids[valid].tolist(), batch.labels[valid].tolist(), strict=True))
        assert set(seen) == expected
        # BOS before EOS is the one pair that several documents may share
        assert all(count == 1 for pair, count in seen.items() if pair != (BOS, EOS))
        assert seen.total() == len(stream) - len(lengths)


@given(lengths=lengths_of_documents, seq_len=seq_lens)
def test_document_ids_tell_the_pieces_of_a_row_apart(lengths: list[int], seq_len: int) -> None:
    stream = stream_of(lengths)
    sequence_format = SequenceFormat(seq_len, EOS, np.ones(FIRST_PIECE + len(stream), np.int32), stream.dtype)
    packed = pack(lengths, seq_len, "best_fit")
    rows, ends, counts = rows_of(stream, packed, seq_len)
    (batch,) = build_window(rows, sequence_format, len(rows), 0, ends, counts).micro_batches
    for ids, pieces in zip(batch.document_ids.tolist(), pieces_of(packed), strict=True):
        expected = [number for number, (_, length) in enumerate(pieces) for _ in range(length)]
        padding = [len(pieces)] * (seq_len - len(expected))
        assert ids == expected + padding


@given(lengths=lengths_of_documents, seq_len=seq_lens)
def test_figures_are_those_that_counting_gives(lengths: list[int], seq_len: int) -> None:
    ends = np.cumsum(lengths)
    num_chunks = count_train_sequences(sum(lengths), seq_len)
    sequence_pieces: dict[Packing, list[list[tuple[int, int]]]] = {
        "chunk": [[(number * seq_len, seq_len)] for number in range(num_chunks)],
        "best_fit": pieces_of(pack(lengths, seq_len, "best_fit")),
        "pad": pieces_of(pack(lengths, seq_len, "pad")),
    }
    for packing, sequences in sequence_pieces.items():
        figures = measure_packing(ends - lengths, ends, seq_len, packing, len(sequences))
        inputs = [
            (at, number)
            for number, pieces in enumerate(sequences)
            for first, n in pieces
            for at in range(first, first + n)
        ]
        document_of = np.repeat(np.arange(len(lengths)), lengths)
        is_last = np.isin(np.arange(sum(lengths)), ends - 1)
        valid = [(at, number) for at, number in inputs if not is_last[at]]
        found: dict[int, set[int]] = {}
        first_sequence: dict[int, int] = {}
        truncated = 0
        for at, number in sorted(valid):
            document = int(document_of[at])
            found.setdefault(document, set()).add(number)
            truncated += number != first_sequence.setdefault(document, number)
        assert figures.num_sequences == len(sequences)
        assert figures.num_documents == len(lengths)
        assert figures.num_labels == sum(lengths) - len(lengths)
        assert figures.num_valid_tokens == len(valid)
        assert figures.num_documents_cut == sum(len(numbers) > 1 for numbers in found.values())
        assert figures.num_truncated_tokens == truncated
        assert figures.fill(seq_len) == len(valid) / max(1, len(sequences) * seq_len)


def test_many_documents_are_packed_as_few() -> None:
    """Lengths as of real text; the same sequences whether told by search or by room."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 3_000).astype(np.int64).clip(2).tolist()
    packed = pack(lengths, 512, "best_fit")
    slow = fit_slowly([length for _, length in cut_slowly(lengths, 512)], 512)
    assert len(packed) == len(slow)
    figures = measure_packing(np.cumsum(lengths) - lengths, np.cumsum(lengths), 512, "best_fit", len(packed))
    assert figures.fill(512) > 0.98


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_nothing_makes_no_sequence(packing: Packing) -> None:
    assert len(pack([], 8, packing)) == 0


def test_examples_in_the_docstrings_are_true() -> None:
    failures, tests = doctest.testmod(packing_module)
    assert (failures, tests > 0) == (0, True)


@pytest.mark.parametrize("packing", ["chunk", "best_fit", "pad"])
def test_lost_documents_are_those_that_looking_for_each_of_them_finds(packing: Packing) -> None:
    rng, seq_len = np.random.default_rng(3), 8
    lengths = rng.integers(2, 30, 60)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    learned = rng.random(ends[-1]) < 0.2
    running = np.concatenate(([0], np.cumsum(learned)))
    num_sequences = count_train_sequences(int(ends[-1]), seq_len)
    found = count_lost(starts, ends, seq_len, packing, num_sequences, lambda places: running[places])
    num_cut = num_dropped = num_unlearned = 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        labels = range(start + 1, end)
        places = {
            label: (label - 1) // seq_len if packing == "chunk" else (label - start - 1) // seq_len for label in labels
        }
        kept = [label for label in labels if packing != "chunk" or places[label] < num_sequences]
        num_dropped += not kept
        num_cut += bool(kept) and len(set(places.values())) > 1
        num_unlearned += bool(kept) and not any(learned[label] for label in kept)
    assert (found.num_cut, found.num_dropped, found.num_unlearned) == (num_cut, num_dropped, num_unlearned)
    assert (found.num_documents, found.longest) == (60, lengths.max())
    assert num_unlearned > 0 < num_cut
