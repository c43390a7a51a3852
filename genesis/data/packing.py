"""Packs documents into sequences.

S  tokens of one sequence (`seq_len`)

    chunk       cuts the stream of tokens every S tokens, also within documents; no padding
    best_fit    keeps documents whole where they fit: each goes into the fullest sequence with room for it
    pad         puts one document into each sequence

Under the last two a document of more than S tokens is cut into *pieces* of exactly S and a remainder. The label of a
cut piece's last token is the document's next token, so that every label of the corpus counts once. A remainder of one
token, the document's end, has no label of its own: it is the label of the piece before, and needs no position.

A sequence's row is S + 1 tokens, as under `chunk`: its pieces one after the other, then padding that does not count.
Masks and positions follow from the document ends in the row, whatever the packing. The document ends come from the
corpus's index, because the token that usually ends documents may also occur within one.

Everything here is a pure function of its arguments.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from operator import add
from typing import Final, Literal

import numpy as np
from jaxtyping import Bool, Int64, Integer, Shaped
from numpy import ndarray

from genesis.base.errors import numbered

Packing = Literal["chunk", "best_fit", "pad"]
Chunks = deque[Int64[ndarray, " sequences"]]
CUT_EVENLY: Final[Packing] = "chunk"
"""The packing of text, if none is given."""
KEPT_WHOLE: Final[Packing] = "best_fit"
"""The packing of conversations, if none is given: one that is cut continues without its question."""


@dataclass(frozen=True)
class PackedSequences:
    """Pieces of documents, sequence by sequence.

    Args:
        starts: Start of each piece in the stream of tokens.
        lengths: Number of tokens of each piece, at most S.
        sequence_ends: Number of pieces up to the end of each sequence.
    """

    starts: Int64[ndarray, " pieces"]
    lengths: Int64[ndarray, " pieces"]
    sequence_ends: Int64[ndarray, " sequences"]

    def __len__(self) -> int:
        return len(self.sequence_ends)

    def pieces(self, sequence: int) -> tuple[Int64[ndarray, " pieces"], Int64[ndarray, " pieces"]]:
        """Returns start and length of each piece of a sequence."""
        first, last = int(self.sequence_ends[sequence - 1]) if sequence else 0, int(self.sequence_ends[sequence])
        return self.starts[first:last], self.lengths[first:last]


def pack_documents(
    document_ends: Int64[ndarray, " documents"], seq_len: int, packing: Literal["best_fit", "pad"]
) -> PackedSequences:
    """Returns the sequences into which the documents of a stream are packed; the stream begins at 0.

    Args:
        document_ends: The cumulative end of each document, in tokens.
        seq_len: S.
        packing: How pieces are combined.

    Example:
        >>> packed = pack_documents(np.array([5, 12, 15]), seq_len=8, packing="best_fit")
        >>> packed.starts.tolist(), packed.lengths.tolist(), packed.sequence_ends.tolist()
        ([5, 0, 12], [7, 5, 3], [1, 3])
    """
    starts, lengths = cut_documents(document_ends, seq_len)
    if packing == "pad":
        return PackedSequences(starts, lengths, np.arange(1, len(starts) + 1))
    # Longest first, stable for equal lengths; the small type lets numpy use a radix sort.
    by_length = np.argsort((seq_len - lengths).astype(np.min_scalar_type(seq_len)), kind="stable")
    sequences = _fit_longest_first(lengths[by_length], seq_len)
    order = by_length[np.argsort(sequences, kind="stable")]
    return PackedSequences(starts[order], lengths[order], np.cumsum(np.bincount(sequences)))


def cut_documents(
    document_ends: Int64[ndarray, " documents"], seq_len: int
) -> tuple[Int64[ndarray, " pieces"], Int64[ndarray, " pieces"]]:
    """Returns start and length of each piece, in the order of the stream."""
    document_starts = np.concatenate(([0], document_ends[:-1]))[: len(document_ends)]
    num_whole, rest = np.divmod(document_ends - document_starts - 1, seq_len)  # of the tokens with a label after them
    num_pieces = num_whole + (rest > 0)
    ends = np.cumsum(num_pieces)
    number = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - num_pieces, num_pieces)
    starts = np.repeat(document_starts, num_pieces) + number * seq_len
    return starts, np.where(number < np.repeat(num_whole, num_pieces), seq_len, np.repeat(rest + 1, num_pieces))


def _fit_longest_first(lengths: Int64[ndarray, " pieces"], seq_len: int) -> Int64[ndarray, " pieces"]:
    """Returns the sequence of each piece by best-fit decreasing; `lengths` must be descending.

    Sequences with equal room are kept together, and pieces of equal length are assigned together: the sequence that is
    the best fit for a piece is also the best fit for the next piece of the same length, until its room is too small. So
    the work after sorting depends on the number of different lengths, and hardly on the number of pieces.

    References:
        Ding et al., "Fewer truncations improve language modeling", arXiv:2404.10830, section 3.
    """
    sequences = np.empty_like(lengths)
    by_room: dict[int, Chunks] = {}
    rooms: list[int] = []  # ascending; each has sequences in `by_room`

    def put(room: int, chunk: Int64[ndarray, " sequences"]) -> None:
        if not room or not len(chunk):
            return
        if room not in by_room:
            by_room[room] = deque()
            insort(rooms, room)
        by_room[room].append(chunk)

    num_sequences = 0
    firsts = np.flatnonzero(np.diff(lengths, prepend=seq_len + 1)).tolist()
    for first, last in pairwise([*firsts, len(lengths)]):
        length = int(lengths[first])
        while first < last:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                chunk = by_room[room].popleft()
                if not by_room[room]:
                    del by_room[room], rooms[at]
            else:
                room = seq_len
                chunk = np.arange(num_sequences, num_sequences - (first - last) // (room // length))
                num_sequences += len(chunk)
            each = room // length
            taken = min(last - first, len(chunk) * each)
            num_full, rest = divmod(taken, each)
            sequences[first : first + taken] = np.repeat(chunk[: -(-taken // each)], each)[:taken]
            put(room - each * length, chunk[:num_full])
            put(room - rest * length, chunk[num_full : num_full + 1])
            put(room, chunk[num_full + 1 :])
            first += taken
    return sequences


def fill_row(
    row: Shaped[ndarray, " S+1"],
    starts: Int64[ndarray, " pieces"],
    lengths: Integer[ndarray, " pieces"],
    read: Callable[[int, Shaped[ndarray, " count"]], None],
    padding: int,
    *,
    is_continued: bool,
) -> int:
    """Fills the row with the pieces of one sequence and with padding; returns the number of labels that may count.

    Args:
        row: S + 1 tokens, or other values with one per token.
        starts: Starts of the pieces in the stream.
        lengths: Lengths of the pieces, in total at most S.
        read: `read(start, out)` fills `out` with the stream's tokens from `start` on.
        padding: The value for positions after the pieces.
        is_continued: Whether the last piece's document continues after it, which requires a piece of S tokens.

    Returns:
        The row's length for `build_window`.
    """
    filled = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        read(start, row[filled : filled + length])
        filled += length
    row[filled:] = padding
    if is_continued:
        assert filled == len(row) - 1, "only a piece that fills the row is cut"
        read(start + length, row[filled:])
        return filled
    return max(0, filled - 1)


def mark_piece_ends(ends: Bool[ndarray, " S"], lengths: Integer[ndarray, " pieces"]) -> None:
    """Marks in `ends` the last token of each piece except the last piece, which `build_window` handles."""
    ends[np.cumsum(lengths[:-1]) - 1] = True


@dataclass(frozen=True)
class PackingFigures:
    """The effect of a packing on a source's documents.

    Args:
        num_sequences: Sequences of S tokens.
        num_documents: Documents of the source.
        num_labels: Tokens with an earlier token in their document, the possible labels.
        num_valid_tokens: Labels that the sequences contain; the others are dropped.
        num_documents_cut: Documents whose labels are in more than one sequence.
        num_truncated_tokens: Valid tokens whose context is truncated: it lacks the document's beginning.
    """

    num_sequences: int = 0
    num_documents: int = 0
    num_labels: int = 0
    num_valid_tokens: int = 0
    num_documents_cut: int = 0
    num_truncated_tokens: int = 0

    def __add__(self, other: "PackingFigures") -> "PackingFigures":
        return PackingFigures(*map(add, astuple(self), astuple(other)))

    def fill(self, seq_len: int) -> float:
        """Returns the share of the sequences' positions whose labels count."""
        return self.num_valid_tokens / max(1, self.num_sequences * seq_len)


@dataclass(frozen=True)
class LostDocuments:
    """What a packing does to whole documents, such as conversations, whose parts mean little alone.

    Args:
        num_documents: Documents of the source.
        num_cut: Documents that lie in more than one sequence, or lose their end.
        num_dropped: Documents that no sequence has.
        num_unlearned: Documents of which no token is learned.
        longest: Tokens of the longest document.
    """

    num_documents: int = 0
    num_cut: int = 0
    num_dropped: int = 0
    num_unlearned: int = 0
    longest: int = 0

    def __add__(self, other: "LostDocuments") -> "LostDocuments":
        sums = LostDocuments(*map(add, astuple(self), astuple(other)))
        return replace(sums, longest=max(self.longest, other.longest))

    def describe(self, packing: Packing, seq_len: int) -> str:
        """Returns a line about these documents as conversations, with the remedy if some are cut."""
        line = (
            f"{numbered(self.num_documents, 'conversations')} by {packing} in sequences of "
            f"{numbered(seq_len, 'tokens')}: {self.num_cut:,} cut, {self.num_dropped:,} dropped, "
            f"{self.num_unlearned:,} without a learned token"
        )
        if self.num_cut and packing == CUT_EVENLY:
            # The longest may be no conversation that fits: then no packing keeps all of them whole.
            return f"{line}; data.packing {KEPT_WHOLE} keeps whole what fits into a sequence"
        if self.num_cut:
            return (
                f"{line}; the longest has {numbered(self.longest, 'tokens')}: raise data.seq_len, or prepare with "
                f"chat.max_tokens {seq_len} and chat.on_long"
            )
        return line


def count_lost(
    document_starts: Int64[ndarray, " documents"],
    document_ends: Int64[ndarray, " documents"],
    seq_len: int,
    packing: Packing,
    num_sequences: int,
    count_labels: Callable[[Int64[ndarray, " places"]], Int64[ndarray, " places"]],
) -> LostDocuments:
    """Returns what a packing does to the documents of a stream, or of a part of it; arguments as `measure_packing`.

    Example:
        >>> count_lost(np.array([0, 5]), np.array([5, 11]), 4, "chunk", 2, lambda places: places)
        LostDocuments(num_documents=2, num_cut=1, num_dropped=0, num_unlearned=0, longest=6)
    """
    num_labels = document_ends - document_starts - 1  # the first token of a document is no label
    read = document_ends - 1
    is_cut, is_dropped = num_labels > seq_len, np.zeros(len(document_ends), np.bool_)
    if packing == "chunk":
        # Label t belongs to the sequence of token t - 1.
        first, last = document_starts // seq_len, (document_ends - 2) // seq_len
        is_dropped, is_cut = (first >= num_sequences) & (num_labels > 0), (last > first) & (first < num_sequences)
        read = np.clip(read, document_starts, np.maximum(document_starts, num_sequences * seq_len))
    has_none = count_labels(read + 1) - count_labels(document_starts + 1) == 0
    return LostDocuments(
        num_documents=len(document_ends),
        num_cut=int(np.count_nonzero(is_cut)),
        num_dropped=int(np.count_nonzero(is_dropped)),
        num_unlearned=int(np.count_nonzero(has_none & ~is_dropped)),
        longest=int((document_ends - document_starts).max(initial=0)),
    )


def count_train_sequences(num_tokens: int, seq_len: int) -> int:
    """Returns the number of sequences under `chunk`: whole ones, each with the label of its last token."""
    return max(0, num_tokens - 1) // seq_len


def measure_packing(
    document_starts: Int64[ndarray, " documents"],
    document_ends: Int64[ndarray, " documents"],
    seq_len: int,
    packing: Packing,
    num_sequences: int,
    count_labels: Callable[[Int64[ndarray, " places"]], Int64[ndarray, " places"]] = lambda places: places,
) -> PackingFigures:
    """Returns the figures of the documents of a stream, or of a part of it.

    Args:
        document_starts: Start of each document in the stream.
        document_ends: End of each document in the stream.
        seq_len: S.
        packing: The packing.
        num_sequences: Number of sequences; under `chunk`, that of the whole stream.
        count_labels: Returns the number of tokens with labels before each position, up to a constant; by default all
            tokens have labels.
    """
    last = document_ends - 1  # the label after a document's end does not count
    if packing == "chunk":
        cut = (document_starts // seq_len + 1) * seq_len
        read = np.minimum(last, num_sequences * seq_len)
    else:
        cut, read = document_starts + seq_len, last

    def between(first: Int64[ndarray, " documents"], end: Int64[ndarray, " documents"]) -> Int64[ndarray, " documents"]:
        """Returns the number of labels after each token `first`, up to and including `end`."""
        counts: Int64[ndarray, " documents"] = count_labels(np.maximum(first, end) + 1) - count_labels(first + 1)
        return counts

    truncated = between(cut, read)
    return PackingFigures(
        num_sequences=num_sequences,
        num_documents=len(document_ends),
        num_labels=int(between(document_starts, last).sum()),
        num_valid_tokens=int(between(document_starts, read).sum()),
        num_documents_cut=int(np.count_nonzero(truncated)),
        num_truncated_tokens=int(truncated.sum()),
    )
