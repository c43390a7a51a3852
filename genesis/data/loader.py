"""From positions to windows: reads the sequences that the order selects, and builds the tensors of a training step.

B  sequences of one micro-batch     S  tokens of one sequence     N  sequences of one window on one rank

A global batch consists of the sequences at `global_batch_size` consecutive positions. Each run of B of them is a
micro-batch, and rank r of R gets the r-th of R consecutive runs of micro-batches. So the global batch, and each single
micro-batch in it, are the same for any number of ranks.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64, Integer, UInt8
from numpy import ndarray
from torch import Tensor

from genesis.base.errors import UserError, numbered
from genesis.data.clock import LoaderClock
from genesis.data.order import SequenceOrder
from genesis.data.packing import fill_row, mark_piece_ends
from genesis.data.plans import SourcePlan
from genesis.data.shards import little_endian, token_dtype
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.tokenizer.tokenizer import Tokenizer, padding_id

Item = TypeVar("Item")

VALUES: Final = "values"
"""The tensor of `MicroBatch.extra` with the value of the document of each valid label, where documents have values."""
DOCUMENTS: Final = "documents"
"""The unit of documents with a valid label in `AccumulationWindow.num_units`, counted where documents have values."""
Labels = Bool[ndarray, "N S+1"] | UInt8[ndarray, "N S+1"]
RowLabels = Bool[ndarray, " S+1"] | UInt8[ndarray, " S+1"]


@dataclass(frozen=True)
class Ranks:
    """The number of this rank among the ranks that read different data."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class SequenceFormat:
    """How tokens become sequences.

    Args:
        seq_len: Tokens per sequence.
        padding_id: The token at positions that have none.
        token_num_bytes: Number of UTF-8 bytes behind each token.
        token_dtype: The type of tokens on disk.
        has_values: Whether each document has a value, which windows then have in `VALUES`.
    """

    seq_len: int
    padding_id: int
    token_num_bytes: Integer[ndarray, " vocab"]
    token_dtype: np.dtype[Any]
    has_values: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, seq_len: int) -> Self:
        """Returns the format of sequences of a tokenizer's ids."""
        dtype = little_endian(token_dtype(tokenizer.vocab_size))
        return cls(seq_len, padding_id(tokenizer), tokenizer.token_num_bytes, dtype)


class TokenStream(Protocol):
    """The input of windows: the tokens of one source as one stream."""

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens in the stream."""

    @property
    def end_id(self) -> int | None:
        """Returns the token that ends each document and occurs nowhere else; None if only an index has the ends."""

    @property
    def has_conversations(self) -> bool:
        """Returns whether the documents are conversations, which a validation does not cut."""

    @property
    def has_label_column(self) -> bool:
        """Returns whether tokens other than the first of a document may lack a label."""

    def read(self, start: int, out: Integer[ndarray, " count"]) -> None:
        """Fills `out` with the tokens from `start` on; the stream must have that many."""

    def read_labels(self, start: int, out: UInt8[ndarray, " count"] | Bool[ndarray, " count"]) -> None:
        """Fills `out` with whether each token from `start` on has a label, apart from the rule for first tokens.

        Bytes are those of `genesis.data.shards.mark_labels`.
        """

    def ends_between(self, start: int, stop: int) -> Int64[ndarray, " ends"]:
        """Returns the document ends in the stream that are greater than `start` and at most `stop`."""

    def document_ends(self) -> Iterable[Int64[ndarray, " documents"]]:
        """Yields the ends of all documents in the stream, in order."""


class SequenceColumns(Protocol):
    """Further tensors of each sequence, which an objective reads beside the tokens. Thread-safe."""

    def read(self, source_ids: Int64[ndarray, " N"], sequence_ids: Int64[ndarray, " N"]) -> Mapping[str, Tensor]:
        """Returns the tensors by name, for `MicroBatch.extra`: a row for each of these sequences of these sources."""


def plan_micro_batches(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Returns the number of micro-batches per window of one rank.

    Raises:
        UserError: World size times micro-batch size does not divide the global batch size.
    """
    for name, value in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
        if value < 1:
            raise UserError(f"data.{name} is {value}: give a number of sequences of at least 1")
    num_micro_batches, rest = divmod(global_batch_size, micro_batch_size * world_size)
    if not rest:
        return num_micro_batches
    what = (
        f"data.global_batch_size {global_batch_size} is not divisible into micro-batches of {micro_batch_size} on "
        f"{numbered(world_size, 'ranks')}"
    )
    if global_batch_size % micro_batch_size == 0:
        world_sizes = _list_divisors(global_batch_size // micro_batch_size)
        raise UserError(f"{what}; use one of these world sizes: {world_sizes}")
    if global_batch_size % world_size == 0:
        sizes = _list_divisors(global_batch_size // world_size)
        raise UserError(f"{what}; set data.micro_batch_size to one of {sizes}")
    raise UserError(f"{what}; set it to a multiple of {micro_batch_size * world_size}")


def build_window(
    rows: Integer[ndarray, "N S+1"],
    sequence_format: SequenceFormat,
    micro_batch_size: int,
    data_position: int,
    document_ends: Bool[ndarray, "N S"],
    lengths: Int64[ndarray, " N"] | None = None,
    has_label: Labels | None = None,
) -> AccumulationWindow:
    """Returns the window of `rows`, each of which has the tokens of a sequence and the token after it.

    Args:
        rows: Tokens in their type on disk.
        sequence_format: How tokens become sequences.
        micro_batch_size: B; N is a multiple of it.
        data_position: The window's `data_position`.
        document_ends: Whether each token ends a document within the row; False for all tokens after the row's labels.
        lengths: Number of labels of each row; None if all rows have S. In a shorter row, the token after the last label
            ends a document, and the rest is padding, which counts as one more document.
        has_label: Whether each token has a label, or the bytes of `genesis.data.shards.mark_labels`; None if all have.
            With fine-tuning, answers have labels and questions do not. Inputs and documents do not depend on it.
    """
    inputs, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    ends = ignored = document_ends
    if lengths is not None:
        columns = np.arange(sequence_format.seq_len)
        ends = ends | (columns == lengths[:, None])
        ignored = ends | (columns >= lengths[:, None])
    if has_label is not None:
        ignored = ignored | (has_label[:, 1:] == 0)
    # Indexing only the ignored positions is faster than masks over all: most of a window's cost is here.
    places = np.flatnonzero(ignored)
    label_num_bytes = sequence_format.token_num_bytes.take(labels)
    num_bytes = int(label_num_bytes.sum(dtype=np.int64)) - int(label_num_bytes.take(places).sum(dtype=np.int64))
    labels.put(places, IGNORE_INDEX)
    starts = _find_documents(ends, places if ignored is ends else np.flatnonzero(ends))
    document_ids = _number_documents(starts, ends.shape)
    ids, targets, documents = (torch.from_numpy(array) for array in (inputs, labels, document_ids))
    runs = [slice(first, first + micro_batch_size) for first in range(0, len(rows), micro_batch_size)]
    offsets = _split_documents(starts, micro_batch_size * sequence_format.seq_len, len(runs))
    extra, num_units = dict[str, Tensor](), dict[str, int]()
    if has_label is not None and has_label.dtype == np.uint8:
        extra[VALUES] = torch.from_numpy(has_label[:, 1:].astype(np.int32) - 1)
        num_units[DOCUMENTS] = int(np.logical_or.reduceat(labels.ravel() != IGNORE_INDEX, starts).sum())
    return AccumulationWindow(
        micro_batches=tuple(
            MicroBatch(
                *(ids[run], targets[run], documents[run], torch.from_numpy(of_run)),
                extra={name: tensor[run] for name, tensor in extra.items()},
            )
            for run, of_run in zip(runs, offsets, strict=True)
        ),
        num_units=num_units,
        num_valid_tokens=labels.size - len(places),
        num_bytes=num_bytes,
        data_position=data_position,
        document_lengths=np.diff(starts, append=inputs.size),
    )


def build_skipped_window(
    sequence_format: SequenceFormat, num_micro_batches: int, data_position: int
) -> AccumulationWindow:
    """Returns the window that takes the place of a skipped one: a row of padding in each micro-batch, without labels.

    So each rank runs as many forwards and backwards as in any other window, and takes part in every collective.
    """
    shape = (num_micro_batches, sequence_format.seq_len)
    rows = np.full((shape[0], shape[1] + 1), sequence_format.padding_id, sequence_format.token_dtype)
    lengths = np.zeros(num_micro_batches, np.int64)
    has_label = np.zeros(rows.shape, np.uint8) if sequence_format.has_values else None
    window = build_window(rows, sequence_format, 1, data_position, np.zeros(shape, np.bool_), lengths, has_label)
    return replace(window, is_skipped=True)


def _find_documents(ends: Bool[ndarray, "N S"], end_places: Int64[ndarray, " ends"]) -> Int64[ndarray, " documents"]:
    """Returns where documents begin in the flattened rows, each of which begins one; `end_places` is where one ends."""
    after = end_places + 1
    seq_len = ends.shape[1]
    starts = np.concatenate((np.arange(0, ends.size, seq_len), after[after % seq_len != 0]))
    starts.sort()
    return starts


def _number_documents(starts: Int64[ndarray, " documents"], shape: tuple[int, int]) -> Int32[ndarray, "N S"]:
    """Returns, for each token, how many documents of its row began before its own."""
    # Repeating a number per document is several times as fast as a cumulative sum over all tokens.
    num_rows, seq_len = shape
    is_first = starts % seq_len == 0
    numbers = np.arange(len(starts), dtype=np.int32)
    numbers -= np.maximum.accumulate(np.where(is_first, numbers, 0))
    return np.repeat(numbers, np.diff(starts, append=num_rows * seq_len)).reshape(shape)


def _split_documents(
    starts: Int64[ndarray, " documents"], size: int, num_micro_batches: int
) -> Iterator[Int32[ndarray, " num_documents+1"]]:
    """Yields, for each micro-batch of `size` tokens, where its documents begin in it and where the last one ends."""
    bounds = np.searchsorted(starts, np.arange(num_micro_batches + 1) * size)
    for number in range(num_micro_batches):
        of_run = starts[bounds[number] : bounds[number + 1]] - number * size
        yield np.append(of_run, size).astype(np.int32)


@dataclass(frozen=True)
class TrainWindows:
    """One rank's windows of the training order. Deterministic and thread-safe; no communication.

    Args:
        order: Maps each position to a sequence.
        sources: The sources, in the order's order.
        sequence_format: How tokens become sequences.
        global_batch_size: Sequences per step, over all ranks.
        micro_batch_size: Sequences per micro-batch.
        ranks: The number of this rank.
        plans: The plans of the sources, in the same order; None cuts each stream evenly (`chunk`).
        columns: Further tensors of the sequences, if any.
    """

    order: SequenceOrder
    sources: Sequence[TokenStream]
    sequence_format: SequenceFormat
    global_batch_size: int
    micro_batch_size: int
    ranks: Ranks
    plans: Sequence[SourcePlan] | None = None
    columns: SequenceColumns | None = None

    def __post_init__(self) -> None:
        assert len({source.end_id for source in self.sources} - {None}) <= 1, "sources of more than one corpus"

    @cached_property
    def _end_ids(self) -> tuple[int | None, ...]:
        return tuple(source.end_id for source in self.sources)

    def window(self, position: int) -> AccumulationWindow:
        """Returns this rank's window of the global batch that begins at `position`."""
        num_rows = self.global_batch_size // self.ranks.world_size
        source_ids, sequence_ids = self.order.sequences(position + self.ranks.rank * num_rows, num_rows)
        end = position + self.global_batch_size
        if self.order.is_skipped(position, self.global_batch_size):
            # One row for each micro-batch; its columns may be any sequence's, because no label is left.
            source_ids, sequence_ids = source_ids[:: self.micro_batch_size], sequence_ids[:: self.micro_batch_size]
            window = build_skipped_window(self.sequence_format, len(sequence_ids), end)
        else:
            window = self.read(source_ids, sequence_ids, end)
        return window if self.columns is None else _add_columns(window, self.columns.read(source_ids, sequence_ids))

    def read(
        self, source_ids: Int64[ndarray, " N"], sequence_ids: Int64[ndarray, " N"], data_position: int
    ) -> AccumulationWindow:
        """Returns the window of these sequences without columns; N is a multiple of the micro-batch size."""
        num_rows, seq_len = len(sequence_ids), self.sequence_format.seq_len
        rows = np.empty((num_rows, seq_len + 1), self.sequence_format.token_dtype)
        has_label = make_label_rows(self.sources, rows, self.sequence_format)
        ids = list(zip(source_ids.tolist(), sequence_ids.tolist(), strict=True))
        lengths = None
        if self.plans is None:
            ends = self._read_rows(ids, rows, has_label)
        else:
            ends, lengths = np.zeros((num_rows, seq_len), np.bool_), np.empty(num_rows, np.int64)
            padding_id = self.sequence_format.padding_id
            for number, (source_id, sequence) in enumerate(ids):
                of_row = None if has_label is None else has_label[number]
                starts, sizes = self.plans[source_id].pieces(sequence)
                source = self.sources[source_id]
                lengths[number] = fill_pieces(source, starts, sizes, rows[number], ends[number], of_row, padding_id)
        return build_window(rows, self.sequence_format, self.micro_batch_size, data_position, ends, lengths, has_label)

    def _read_rows(
        self, ids: list[tuple[int, int]], rows: Integer[ndarray, "N S+1"], has_label: Labels | None
    ) -> Bool[ndarray, "N S"]:
        """Reads rows that are cut evenly from the sources, and returns whether each token ends a document."""
        seq_len = self.sequence_format.seq_len
        indexed = []
        for number, (source_id, sequence) in enumerate(ids):
            source, start = self.sources[source_id], sequence * seq_len
            source.read(start, rows[number])
            if has_label is not None:
                source.read_labels(start, has_label[number])
            if self._end_ids[source_id] is None:
                indexed.append((number, source, start))
        # Comparing all tokens at once takes a third of the time of an index lookup for each row.
        end_id = next((end_id for end_id in self._end_ids if end_id is not None), None)
        ends: Bool[ndarray, "N S"] = (
            np.zeros((len(rows), seq_len), np.bool_) if end_id is None else rows[:, :-1] == end_id
        )
        for number, source, start in indexed:
            ends[number] = False
            _mark_ends(source, start, ends[number])
        return ends


def fill_pieces(
    source: TokenStream,
    starts: Int64[ndarray, " pieces"],
    lengths: Integer[ndarray, " pieces"],
    row: Integer[ndarray, " S+1"],
    ends: Bool[ndarray, " S"],
    has_label: RowLabels | None,
    padding_id: int,
) -> int:
    """Fills one row with the pieces of a sequence, and returns its number of labels."""
    cut = int(starts[-1]) + int(lengths[-1])
    is_continued = int(lengths[-1]) == len(ends) and not len(source.ends_between(cut - 1, cut))
    mark_piece_ends(ends, lengths)
    if has_label is not None:
        fill_row(has_label, starts, lengths, source.read_labels, 0, is_continued=is_continued)
    return fill_row(row, starts, lengths, source.read, padding_id, is_continued=is_continued)


def _add_columns(window: AccumulationWindow, columns: Mapping[str, Tensor]) -> AccumulationWindow:
    """Returns the window with each micro-batch's rows of the columns."""
    micro_batches, first = [], 0
    for micro_batch in window.micro_batches:
        end = first + len(micro_batch.input_ids)
        extra = {name: column[first:end] for name, column in columns.items()}
        micro_batches.append(replace(micro_batch, extra={**micro_batch.extra, **extra}))
        first = end
    return replace(window, micro_batches=tuple(micro_batches))


def make_label_rows(
    sources: Sequence[TokenStream], rows: Integer[ndarray, "N S+1"], sequence_format: SequenceFormat
) -> Labels | None:
    """Returns the array for the labels of `rows`, all 1; None if no source has a label column."""
    if not any(source.has_label_column for source in sources):
        return None
    return np.ones(rows.shape, np.uint8 if sequence_format.has_values else np.bool_)


def _mark_ends(source: TokenStream, start: int, ends: Bool[ndarray, " count"]) -> None:
    """Marks the tokens of a stream from `start` on that end a document, by the stream's index."""
    ends[source.ends_between(start, start + len(ends)) - start - 1] = True


def read_row(
    source: TokenStream,
    start: int,
    row: Integer[ndarray, " count+1"],
    ends: Bool[ndarray, " count"],
    has_label: UInt8[ndarray, " count+1"] | Bool[ndarray, " count+1"] | None,
) -> None:
    """Reads a stream from `start` on: its tokens, its document ends except at the last token, and its labels."""
    source.read(start, row)
    _mark_ends(source, start, ends)
    if has_label is not None:
        source.read_labels(start, has_label)


class WindowLoader:
    """A sized iterable of windows, which a thread builds ahead of their use.

    An iteration calls `indices` when its first window is requested, not when the iterator is made, because Lightning
    makes iterators before it restores a checkpoint. The class has `state_dict` only because Lightning warns about a
    loader without one: the state is the position, which the data module saves.

    Args:
        build: Builds the window of an index.
        indices: Called at the start of each iteration; the range has `num_windows` indices, or fewer at the data's end.
        num_windows: Length of one iteration.
        prefetch_windows: Number of windows built ahead; 0 builds each window when it is requested.
        pin_memory: Whether windows are in page-locked memory, for copies to a GPU that the host does not wait for.

    Attributes:
        clock: Times of building windows and of waiting for them.
    """

    def __init__(
        self,
        build: Callable[[int], AccumulationWindow],
        indices: Callable[[], range],
        num_windows: int,
        prefetch_windows: int,
        pin_memory: bool,
    ) -> None:
        self._build = build
        self._indices = indices
        self._num_windows = num_windows
        self._prefetch_windows = prefetch_windows
        self._pin_memory = pin_memory
        self.clock = LoaderClock()

    def __len__(self) -> int:
        return self._num_windows

    def __iter__(self) -> Iterator[AccumulationWindow]:
        indices = self._indices()
        assert len(indices) <= self._num_windows
        self.clock.begin()
        ahead = compute_ahead(self._ready, indices, self._prefetch_windows)
        while (window := self.clock.wait_for(ahead)) is not None:
            yield window

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignores the empty state."""

    def _ready(self, index: int) -> AccumulationWindow:
        begin_seconds = time.perf_counter()
        window = self._build(index)
        window = window.pin_memory() if self._pin_memory else window
        self.clock.made(window, time.perf_counter() - begin_seconds)
        return window


def compute_ahead(function: Callable[[int], Item], indices: Iterable[int], depth: int) -> Iterator[Item]:
    """Yields `function(index)` for each index; one thread computes up to `depth` results ahead."""
    if not depth:
        yield from map(function, indices)
        return
    pending: deque[Future[Item]] = deque()
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="genesis-data")
    try:
        for index in indices:
            pending.append(pool.submit(function, index))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _list_divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
