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
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64, Integer
from numpy import ndarray

from genesis.data.clock import LoaderClock
from genesis.data.corpus import TokenSource
from genesis.data.order import SequenceOrder
from genesis.data.packing import fill_row
from genesis.data.plans import SourcePlan
from genesis.data.window import IGNORE_INDEX, MicroBatch, Window
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
        eos_id: The token that ends a document; no document holds another.
        piece_num_bytes: UTF-8 bytes of text behind each token.
        token_dtype: As on disk.
    """

    seq_len: int
    eos_id: int
    piece_num_bytes: Integer[ndarray, " vocab"]
    token_dtype: np.dtype[Any]


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
    lengths: Int64[ndarray, " N"] | None = None,
    has_label: Bool[ndarray, "N S"] | None = None,
) -> Window:
    """Returns the window of rows that hold the tokens of each sequence and the one after it.

    Args:
        rows: As on disk.
        sequence_format: What the tokens mean.
        micro_batch_size: B; N is a multiple of it.
        data_position: What the window says of itself.
        lengths: Labels of each row, where some have fewer than S; by default all have S.
        has_label: Which tokens are to be followed by a label, where not all are: fine-tuning learns the answers and not
            the questions. Inputs and documents are the same whatever it says.
    """
    inputs, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    ends = rows[:, :-1] == sequence_format.eos_id
    ignored = ends
    if lengths is not None:
        columns = np.arange(sequence_format.seq_len)
        ignored = ends | (columns >= lengths[:, None])
        ends &= columns <= lengths[:, None]  # all padding is one document, however many ends it is made of
    if has_label is not None:
        ignored = ignored | ~has_label
    # By the few places instead of masks of all: this is what a window of prepared tokens costs.
    places = np.flatnonzero(ignored)
    label_num_bytes = sequence_format.piece_num_bytes.take(labels)
    num_bytes = int(label_num_bytes.sum(dtype=np.int64)) - int(label_num_bytes.take(places).sum(dtype=np.int64))
    labels.put(places, IGNORE_INDEX)
    document_ids = _number_documents(ends)
    tensors = [torch.from_numpy(array) for array in (inputs, labels, document_ids)]
    return Window(
        micro_batches=tuple(
            MicroBatch(*(tensor[first : first + micro_batch_size] for tensor in tensors))
            for first in range(0, len(rows), micro_batch_size)
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
    sources: Sequence[TokenSource]
    sequence_format: SequenceFormat
    global_batch_size: int
    micro_batch_size: int
    ranks: Ranks
    plans: Sequence[SourcePlan] | None = None

    def window(self, position: int) -> Window:
        """Returns this rank's window of the global batch that begins at `position`."""
        num_rows = self.global_batch_size // self.ranks.world_size
        source_ids, sequence_ids = self.order.sequences(position + self.ranks.rank * num_rows, num_rows)
        seq_len = self.sequence_format.seq_len
        rows = np.empty((num_rows, seq_len + 1), self.sequence_format.token_dtype)
        lengths = None if self.plans is None else np.empty(num_rows, np.int64)
        for number, (source, sequence) in enumerate(zip(source_ids.tolist(), sequence_ids.tolist(), strict=True)):
            read = self.sources[source].read
            if self.plans is None or lengths is None:
                read(sequence * seq_len, rows[number])
            else:
                starts, piece_lengths = self.plans[source].pieces(sequence)
                lengths[number] = fill_row(rows[number], starts, piece_lengths, read, self.sequence_format.eos_id)
        end = position + self.global_batch_size
        return build_window(rows, self.sequence_format, self.micro_batch_size, end, lengths)


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
        sources: Sequence[TokenSource],
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

    def window(self, index: int) -> Window:
        """Returns this rank's window `index`."""
        seq_len = self._format.seq_len
        begin = index * self._micro_batch_size * self._ranks.world_size
        first = begin + self._ranks.rank * self._micro_batch_size
        rows = np.full((self._micro_batch_size, seq_len + 1), self._format.eos_id, self._format.token_dtype)
        lengths = np.zeros(self._micro_batch_size, np.int64)
        for row in range(min(self._micro_batch_size, self.num_sequences - first)):
            source, start = self._locate(first + row)
            lengths[row] = min(seq_len, source.num_tokens - 1 - start)
            source.read(start, rows[row, : lengths[row] + 1])
        end = min(begin + self._micro_batch_size * self._ranks.world_size, self.num_sequences)
        return build_window(rows, self._format, self._micro_batch_size, end, lengths)

    def _locate(self, sequence: int) -> tuple[TokenSource, int]:
        """Returns where a sequence's tokens begin."""
        in_set = sequence * self._num_in_set // self.num_sequences
        source = int(np.searchsorted(self._last_of_source, in_set, side="right"))
        before = int(self._last_of_source[source - 1]) if source else 0
        return self._sources[source], (in_set - before) * self._format.seq_len


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
        pin_memory: Whether windows lie in page-locked memory, for copies to a GPU that overlap its work.

    Attributes:
        clock: What the making of windows took, and the waiting for them.
    """

    def __init__(
        self,
        build: Callable[[int], Window],
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

    def __iter__(self) -> Iterator[Window]:
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

    def _ready(self, index: int) -> Window:
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
