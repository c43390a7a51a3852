"""Position to window: the sequences that the order names, read and made ready for the training step.

B  sequences of one micro-batch     S  tokens of one sequence     N  sequences of one window on one rank

A global batch is the sequences at `global_batch_size` consecutive positions. Its micro-batches are consecutive runs of
B of them, and rank r of R takes the r-th of R consecutive runs of micro-batches. So the global batch, and every single
micro-batch in it, is the same for any number of ranks.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64, Integer
from numpy import ndarray

from genesis.data.clock import LoaderClock
from genesis.data.order import SequenceOrder
from genesis.data.packing import fill_row, mark_piece_ends
from genesis.data.plans import SourcePlan
from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.errors import UserError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Ranks:
    """This rank among those that read different data."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class SequenceFormat:
    """How sequences are made of tokens.

    Args:
        seq_len: Tokens of a sequence.
        padding_id: The token of places without one.
        token_num_bytes: UTF-8 bytes of text behind each token.
        token_dtype: As on disk.
    """

    seq_len: int
    padding_id: int
    token_num_bytes: Integer[ndarray, " vocab"]
    token_dtype: np.dtype[Any]


class TokenStream(Protocol):
    """What windows read: the tokens of one source as one stream."""

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens the stream has."""

    @property
    def end_id(self) -> int | None:
        """Returns the token that ends each document and stands nowhere else; None where only an index says it."""

    @property
    def has_label_column(self) -> bool:
        """Returns whether some tokens may have no label, beside the first of each document."""

    def read(self, start: int, out: Integer[ndarray, " count"]) -> None:
        """Fills `out` with the tokens from `start` on; the stream must hold as many."""

    def read_labels(self, start: int, out: Bool[ndarray, " count"]) -> None:
        """Fills `out` with whether each token from `start` on has a label, as the one that follows another."""

    def ends_between(self, start: int, stop: int) -> Int64[ndarray, " ends"]:
        """Returns where documents end, of those that end after `start` and at `stop` at the latest."""


def plan_micro_batches(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Returns how many micro-batches one rank runs in one window.

    Raises:
        UserError: World size times micro-batch size does not divide the global batch.
    """
    for name, value in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
        if value < 1:
            raise UserError(f"data.{name} is {value}; it counts sequences, from 1 up")
    num_micro_batches, rest = divmod(global_batch_size, micro_batch_size * world_size)
    if not rest:
        return num_micro_batches
    what = f"data.global_batch_size {global_batch_size} does not divide into micro-batches of {micro_batch_size}"
    if global_batch_size % micro_batch_size == 0:
        world_sizes = _list_divisors(global_batch_size // micro_batch_size)
        raise UserError(f"{what} on {world_size} ranks; world sizes that do: {world_sizes}")
    if global_batch_size % world_size == 0:
        sizes = _list_divisors(global_batch_size // world_size)
        raise UserError(f"{what} on {world_size} ranks; values of data.micro_batch_size that do: {sizes}")
    raise UserError(f"{what} on {world_size} ranks; take a multiple of {micro_batch_size * world_size}")


def build_window(
    rows: Integer[ndarray, "N S+1"],
    sequence_format: SequenceFormat,
    micro_batch_size: int,
    data_position: int,
    document_ends: Bool[ndarray, "N S"],
    lengths: Int64[ndarray, " N"] | None = None,
    has_label: Bool[ndarray, "N S+1"] | None = None,
) -> AccumulationWindow:
    """Returns the window of rows that hold the tokens of each sequence and the one after it.

    Args:
        rows: As on disk.
        sequence_format: What the tokens mean.
        micro_batch_size: B; N is a multiple of it.
        data_position: What the window says of itself.
        document_ends: Which tokens end a document within the row; none of those that stand after its labels.
        lengths: Labels of each row, where some have fewer than S; by default all have S. The token after the last of
            fewer labels ends a document, and what follows it is padding, which is one document.
        has_label: Which tokens have a label where another comes before them, if not all have: fine-tuning learns the
            answers and not the questions. Inputs and documents are the same whatever it says.
    """
    inputs, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    ends = ignored = document_ends
    if lengths is not None:
        columns = np.arange(sequence_format.seq_len)
        ends = ends | (columns == lengths[:, None])
        ignored = ends | (columns >= lengths[:, None])
    if has_label is not None:
        ignored = ignored | ~has_label[:, 1:]
    # By the few places instead of masks of all: this is what a window of prepared tokens costs.
    places = np.flatnonzero(ignored)
    label_num_bytes = sequence_format.token_num_bytes.take(labels)
    num_bytes = int(label_num_bytes.sum(dtype=np.int64)) - int(label_num_bytes.take(places).sum(dtype=np.int64))
    labels.put(places, IGNORE_INDEX)
    document_ids = _number_documents(ends)
    ids, targets, documents = (torch.from_numpy(array) for array in (inputs, labels, document_ids))
    runs = [slice(first, first + micro_batch_size) for first in range(0, len(rows), micro_batch_size)]
    return AccumulationWindow(
        micro_batches=tuple(
            MicroBatch(ids[run], targets[run], documents[run], torch.from_numpy(_find_documents(ends[run])))
            for run in runs
        ),
        num_valid_tokens=labels.size - len(places),
        num_bytes=num_bytes,
        data_position=data_position,
    )


def _number_documents(ends: Bool[ndarray, "N S"]) -> Int32[ndarray, "N S"]:
    """Returns how many documents of its row ended before each token."""
    numbers = np.zeros(ends.shape, np.int32)
    numbers[:, 1:] = ends[:, :-1]
    return np.cumsum(numbers, axis=1, out=numbers)


def _find_documents(ends: Bool[ndarray, "B S"]) -> Int32[ndarray, " num_documents+1"]:
    """Returns where documents begin in the flattened rows, each of which begins one, and where the last one ends."""
    is_start = np.ones(ends.shape, np.bool_)
    is_start[:, 1:] = ends[:, :-1]
    return np.append(np.flatnonzero(is_start), ends.size).astype(np.int32)


@dataclass(frozen=True)
class TrainWindows:
    """One rank's windows of the training order. Deterministic and thread-safe; no communication.

    Args:
        order: Which sequence stands at each position.
        sources: In the order's order.
        sequence_format: How a sequence is made of tokens.
        global_batch_size: Sequences of one step, over all ranks.
        micro_batch_size: Sequences of one micro-batch.
        ranks: This rank.
        plans: Of the sources, in their order; None cuts their streams into sequences (`chunk`).
    """

    order: SequenceOrder
    sources: Sequence[TokenStream]
    sequence_format: SequenceFormat
    global_batch_size: int
    micro_batch_size: int
    ranks: Ranks
    plans: Sequence[SourcePlan] | None = None

    def __post_init__(self) -> None:
        assert len({source.end_id for source in self.sources} - {None}) <= 1, "sources of more than one corpus"

    @cached_property
    def _end_ids(self) -> tuple[int | None, ...]:
        return tuple(source.end_id for source in self.sources)

    def window(self, position: int) -> AccumulationWindow:
        """Returns this rank's window of the global batch that begins at `position`."""
        num_rows = self.global_batch_size // self.ranks.world_size
        source_ids, sequence_ids = self.order.sequences(position + self.ranks.rank * num_rows, num_rows)
        seq_len = self.sequence_format.seq_len
        rows = np.empty((num_rows, seq_len + 1), self.sequence_format.token_dtype)
        has_label = _make_label_rows(self.sources, rows)
        ids = list(zip(source_ids.tolist(), sequence_ids.tolist(), strict=True))
        lengths = None
        if self.plans is None:
            ends = self._read_rows(ids, rows, has_label)
        else:
            ends, lengths = np.zeros((num_rows, seq_len), np.bool_), np.empty(num_rows, np.int64)
            for number, (source_id, sequence) in enumerate(ids):
                of_row = None if has_label is None else has_label[number]
                starts, sizes = self.plans[source_id].pieces(sequence)
                source = self.sources[source_id]
                lengths[number] = self._fill_row(source, starts, sizes, rows[number], ends[number], of_row)
        end = position + self.global_batch_size
        return build_window(rows, self.sequence_format, self.micro_batch_size, end, ends, lengths, has_label)

    def _read_rows(
        self, ids: list[tuple[int, int]], rows: Integer[ndarray, "N S+1"], has_label: Bool[ndarray, "N S+1"] | None
    ) -> Bool[ndarray, "N S"]:
        """Reads rows that are cut evenly from the sources, and returns which tokens end a document."""
        seq_len = self.sequence_format.seq_len
        indexed = []
        for number, (source_id, sequence) in enumerate(ids):
            source, start = self.sources[source_id], sequence * seq_len
            source.read(start, rows[number])
            if has_label is not None:
                source.read_labels(start, has_label[number])
            if self._end_ids[source_id] is None:
                indexed.append((number, source, start))
        # To compare all tokens at once costs a third of a look into the index for each row.
        end_id = next((end_id for end_id in self._end_ids if end_id is not None), None)
        ends: Bool[ndarray, "N S"] = (
            np.zeros((len(rows), seq_len), np.bool_) if end_id is None else rows[:, :-1] == end_id
        )
        for number, source, start in indexed:
            ends[number] = False
            _mark_ends(source, start, ends[number])
        return ends

    def _fill_row(
        self,
        source: TokenStream,
        starts: Int64[ndarray, " pieces"],
        lengths: Integer[ndarray, " pieces"],
        row: Integer[ndarray, " S+1"],
        ends: Bool[ndarray, " S"],
        has_label: Bool[ndarray, " S+1"] | None,
    ) -> int:
        """Fills one row with the pieces of a plan, and returns how many labels it has."""
        cut = int(starts[-1]) + int(lengths[-1])
        goes_on = int(lengths[-1]) == self.sequence_format.seq_len and not len(source.ends_between(cut - 1, cut))
        mark_piece_ends(ends, lengths)
        if has_label is not None:
            fill_row(has_label, starts, lengths, source.read_labels, 0, goes_on=goes_on)
        return fill_row(row, starts, lengths, source.read, self.sequence_format.padding_id, goes_on=goes_on)


class ValidationWindows:
    """One rank's windows, of one micro-batch each, of a whole validation set. Deterministic and thread-safe.

    Every label of the set counts once: whatever the packing of the training set, each source's stream is cut every S
    tokens. Its last sequence may be short and the last windows may be empty; they are padded with labels that do not
    count, so that all ranks have equally many windows, whatever the set.

    Args:
        sources: The validation set.
        sequence_format: How a sequence is made of tokens.
        micro_batch_size: Sequences of one micro-batch.
        ranks: This rank.
        limit_sequences: Takes only so many sequences, evenly spread over the set.
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
        per_source = [-(-max(0, source.num_tokens - 1) // sequence_format.seq_len) for source in sources]
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
        has_label = _make_label_rows(self._sources, rows)
        lengths = np.zeros(self._micro_batch_size, np.int64)
        for row in range(min(self._micro_batch_size, self.num_sequences - first)):
            source, start = self._locate(first + row)
            length = lengths[row] = min(seq_len, source.num_tokens - 1 - start)
            of_row = None if has_label is None else has_label[row, : length + 1]
            _read_row(source, start, rows[row, : length + 1], ends[row, :length], of_row)
        end = min(begin + self._micro_batch_size * self._ranks.world_size, self.num_sequences)
        return build_window(rows, self._format, self._micro_batch_size, end, ends, lengths, has_label)

    def _locate(self, sequence: int) -> tuple[TokenStream, int]:
        """Returns where a sequence's tokens begin."""
        in_set = sequence * self._num_in_set // self.num_sequences
        source = int(np.searchsorted(self._last_of_source, in_set, side="right"))
        before = int(self._last_of_source[source - 1]) if source else 0
        return self._sources[source], (in_set - before) * self._format.seq_len


def _make_label_rows(sources: Sequence[TokenStream], rows: Integer[ndarray, "N S+1"]) -> Bool[ndarray, "N S+1"] | None:
    """Returns what says which tokens of `rows` have labels, all of them so far; None where no source says it."""
    return np.ones(rows.shape, np.bool_) if any(source.has_label_column for source in sources) else None


def _mark_ends(source: TokenStream, start: int, ends: Bool[ndarray, " count"]) -> None:
    """Marks which tokens of a stream from `start` on end a document, by the stream's index."""
    ends[source.ends_between(start, start + len(ends)) - start - 1] = True


def _read_row(
    source: TokenStream,
    start: int,
    row: Integer[ndarray, " count+1"],
    ends: Bool[ndarray, " count"],
    has_label: Bool[ndarray, " count+1"] | None,
) -> None:
    """Reads a stream from `start` on: its tokens, which of them but the last end a document, and which have labels."""
    source.read(start, row)
    _mark_ends(source, start, ends)
    if has_label is not None:
        source.read_labels(start, has_label)


class WindowLoader:
    """A sized iterable of windows, which one thread builds ahead of their use.

    Where an iteration begins is asked when its first window is, not when the iterator is made: Lightning makes
    iterators before it restores a checkpoint. It has `state_dict` because Lightning warns of a loader without one; what
    there is to save is the position, and that belongs to the data module.

    Args:
        build: Makes the window of an index.
        indices: Asked at the start of each iteration; `num_windows` long, or shorter where the data end.
        num_windows: Length of one iteration.
        prefetch_windows: How many are built ahead; 0 builds each when it is asked for.
        pin_memory: Whether windows lie in page-locked memory, for copies to a GPU that the host does not wait for.

    Attributes:
        clock: What the making of windows took, and the waiting for them.
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
        """Returns nothing to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` returned."""

    def _ready(self, index: int) -> AccumulationWindow:
        begin_seconds = time.perf_counter()
        window = self._build(index)
        window = window.pin_memory() if self._pin_memory else window
        self.clock.made(window, time.perf_counter() - begin_seconds)
        return window


def compute_ahead(function: Callable[[int], Item], indices: Iterable[int], depth: int) -> Iterator[Item]:
    """Yields `function(index)` for each index, with up to `depth` of them computed ahead by one thread."""
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
