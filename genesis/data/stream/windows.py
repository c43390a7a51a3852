"""One rank's windows of a stream.

position -> (lane, source)      pure functions; rank r of R takes the lanes whose number is r modulo R
(lane, source) -> sequence      the next of its block; then the next block
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray

from genesis.data.loader import Ranks, SequenceFormat, build_skipped_window, build_window
from genesis.data.order import SequenceOrder
from genesis.data.stream.block import Block
from genesis.data.stream.lanes import check_world_size, choose_other, lanes_at
from genesis.data.stream.open import Stream
from genesis.data.stream.pool import BlockSupply, InlineSupply, WorkerPool
from genesis.data.stream.state import LaneStates, PartState, SourceUsage, measure_usage, read_states, write_states
from genesis.data.stream.worker import Job, LaneSource, Setup
from genesis.data.window import AccumulationWindow

_MAX_NOTES: Final = 5
_ROUNDS_LOOKED_AHEAD: Final = 8

_logger = logging.getLogger(__name__)


class StreamWindows:
    """One rank's windows of a stream, in order. No communication.

    One thread calls `window`; another thread may call the other methods at the same time. Windows read ahead of
    training do not affect the state: `state` and `usage` describe a given position, and `window` can go back to any
    position that was not released.

    Args:
        stream: The open stream.
        order: Maps positions to sources; its sequences are not used.
        sequence_format: How tokens become sequences.
        global_batch_size: Sequences of one step, over all ranks.
        micro_batch_size: Sequences of one micro-batch.
        ranks: This rank.
    """

    def __init__(
        self,
        stream: Stream,
        order: SequenceOrder,
        sequence_format: SequenceFormat,
        global_batch_size: int,
        micro_batch_size: int,
        ranks: Ranks,
    ) -> None:
        check_world_size(stream.num_lanes, global_batch_size, ranks.world_size)
        self.stream = stream
        self.order = order
        self._format = sequence_format
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._ranks = ranks
        self._position = 0
        self._states: LaneStates = {key: PartState() for key in stream.parts if self._is_own(key.lane)}
        self._blocks: dict[LaneSource, Block] = {}
        self._snapshots: dict[int, LaneStates] = {0: dict(self._states)}
        self._lock = threading.Lock()
        self._supply: BlockSupply | None = None
        self._is_closed = False
        self._num_noted = 0

    # ---- windows

    def window(self, position: int) -> AccumulationWindow:
        """Returns this rank's window of the global batch that begins at `position`.

        Raises:
            UserError: A document or shard is bad, or too many workers have died.
            RuntimeError: The windows are closed, for example while a thread reads ahead at the end of training.
        """
        if self._is_closed:
            raise RuntimeError("the windows of the stream are closed")
        if self._supply is None or position != self._position:
            self._go_to(position)
        is_skipped = self.order.is_skipped(position, self._global_batch_size)
        rows, ends, lengths = self._draw_batch(position, is_skipped=is_skipped)
        self._position = position + self._global_batch_size
        with self._lock:
            self._snapshots[self._position] = dict(self._states)
        if is_skipped:
            return build_skipped_window(self._format, len(rows) // self._micro_batch_size, self._position)
        return build_window(rows, self._format, self._micro_batch_size, self._position, ends, lengths)

    def release(self, position: int) -> None:
        """Releases all windows before `position`, which cannot be requested afterwards."""
        with self._lock:
            for past in [known for known in self._snapshots if known < position]:
                del self._snapshots[past]

    def open(self) -> None:
        """Allows windows, also after `close`; the first window starts the workers."""
        self._is_closed = False

    def close(self) -> None:
        """Ends the workers."""
        self._is_closed = True
        if self._supply is not None:
            self._supply.close()
            self._supply = None
            self._blocks.clear()

    # ---- state

    def state(self, position: int) -> dict[str, Any]:
        """Returns the state of this rank's lanes before the window at `position`, in plain types."""
        return write_states(self.stream, self._snapshot(position))

    def load_state(self, state: Mapping[str, Any], position: int) -> None:
        """Continues at `position` from the state of all lanes of a saved run, on any number of ranks.

        Raises:
            UserError: The saved run had other settings or files.
        """
        states = read_states(self.stream, state)
        self.stream = self.stream.read_by(state["version"])
        self.close()
        self.open()
        self._position = position
        self._states = {key: part for key, part in states.items() if self._is_own(key.lane)}
        with self._lock:
            self._snapshots = {position: dict(self._states)}

    def usage(self, position: int) -> dict[str, SourceUsage]:
        """Returns the usage of each source by this rank's lanes before the window at `position`."""
        return measure_usage(self.stream, self._snapshot(position))

    # ---- telemetry

    @property
    def queue_depths(self) -> tuple[int, ...]:
        """Returns how many blocks each worker still has to make."""
        return self._supply.queue_depths if self._supply is not None else ()

    @property
    def tokens_per_second(self) -> float | None:
        """Returns the mean throughput of all workers since their start; None before their first block."""
        supply = self._supply
        if supply is None or not supply.made.num_tokens:
            return None
        return supply.made.num_tokens / supply.made.seconds * max(1, len(supply.queue_depths))

    # ---- drawing

    def _draw_batch(
        self, position: int, *, is_skipped: bool
    ) -> tuple[Integer[ndarray, "N S+1"], Bool[ndarray, "N S"], Int64[ndarray, " N"]]:
        num_rows = self._global_batch_size // self._ranks.world_size
        rows = np.full((num_rows, self._format.seq_len + 1), self._format.padding_id, self._format.token_dtype)
        ends = np.zeros((num_rows, self._format.seq_len), np.bool_)
        lengths = np.zeros(num_rows, np.int64)
        for number, key in enumerate(self._own_keys(position, self._global_batch_size)):
            chosen = self._with_data(key)
            if chosen is not None:
                rows[number], ends[number], lengths[number] = self._draw(chosen, is_skipped=is_skipped)
        return rows, ends, lengths

    def _own_keys(self, position: int, count: int) -> Iterator[LaneSource]:
        """Yields the lane and source of each of this rank's positions from `position` on."""
        lanes = lanes_at(position, count, self.stream.num_lanes, self.stream.recipe.seed).tolist()
        sources = self.order.sources(position, count).tolist()
        for lane, source in zip(lanes, sources, strict=True):
            if self._is_own(lane):
                yield LaneSource(lane, source)

    def _is_own(self, lane: int) -> bool:
        return lane % self._ranks.world_size == self._ranks.rank

    def _with_data(self, key: LaneSource) -> LaneSource | None:
        """Returns `key` or, if it is exhausted, its replacement in the same lane; None if the lane is exhausted."""
        while not self._has_sequence(key):
            states = [self._states[LaneSource(key.lane, source)] for source in range(len(self.stream.names))]
            other = choose_other(
                self.order.mixes[-1].weights,
                [state.num_sequences for state in states],
                [state.cursor is not None for state in states],
            )
            if other is None:
                return None
            key = LaneSource(key.lane, other)
        return key

    def _has_sequence(self, key: LaneSource) -> bool:
        """Returns whether a sequence is left, after moving the state to that sequence."""
        while self._states[key].cursor is not None:
            block = self._block(key)
            if self._states[key].num_given < len(block.rows):
                return True
            if self._states[key].num_given == 0:  # it is empty
                self._states[key] = self._states[key].begin(block)
            self._end_block(key, block)
        return False

    def _draw(self, key: LaneSource, *, is_skipped: bool) -> tuple[Integer[ndarray, " S+1"], Bool[ndarray, " S"], int]:
        block, state = self._block(key), self._states[key]
        if state.num_given == 0:
            state = state.begin(block)
        number = state.num_given
        consumed = block.rows[number], block.ends[number], int(block.lengths[number])
        self._states[key] = state.give(block, is_skipped=is_skipped)
        if self._states[key].num_given == len(block.rows):
            self._end_block(key, block)
        return consumed

    # ---- blocks

    def _block(self, key: LaneSource) -> Block:
        """Returns the lane's current block; its first use requests the next block."""
        if key not in self._blocks:
            assert self._supply is not None
            cursor = self._states[key].cursor
            assert cursor is not None
            block = self._blocks[key] = self._supply.take(Job(key, cursor))
            self._tell(block)
            if block.next is not None:
                self._supply.request(Job(key, block.next))
        return self._blocks[key]

    def _end_block(self, key: LaneSource, block: Block) -> None:
        self._states[key] = self._states[key].end(block)
        del self._blocks[key]

    def _tell(self, block: Block) -> None:
        for note in block.notes:
            if self._num_noted < _MAX_NOTES:
                self._num_noted += 1
                _logger.warning("skipped: %s", note)

    def _start_supply(self) -> BlockSupply:
        stream = self.stream
        files, num_workers = stream.tokenizer.files, stream.options.num_workers
        own_lanes = sorted({key.lane for key in self._states})
        if not num_workers:
            return InlineSupply(Setup(files, stream.recipe, {key: stream.parts[key] for key in self._states}))
        setups = [
            Setup(
                files,
                stream.recipe,
                {key: stream.parts[key] for key in self._states if own_lanes.index(key.lane) % num_workers == number},
            )
            for number in range(num_workers)
        ]
        return WorkerPool(setups, stream.options.max_worker_restarts)

    def _request_first_blocks(self, supply: BlockSupply, position: int) -> None:
        """Requests the block of each lane and source, in the order in which positions will need them."""
        weights = self.order.mixes[-1].weights
        needed = self._own_keys(position, _ROUNDS_LOOKED_AHEAD * self.stream.num_lanes)
        for key in dict.fromkeys((*needed, *(key for key in self._states if weights[key.source]))):
            cursor = self._states[key].cursor
            if cursor is not None:
                supply.request(Job(key, cursor))

    def _go_to(self, position: int) -> None:
        """Starts at a position, or goes back to it after windows were read ahead."""
        self._states = self._snapshot(position)
        self._position = position
        self._blocks.clear()
        if self._supply is None:
            self._supply = self._start_supply()
        self._supply.forget()
        self._request_first_blocks(self._supply, position)

    def _snapshot(self, position: int) -> LaneStates:
        with self._lock:
            assert position in self._snapshots, f"no window ends at position {position}, or it was released"
            return dict(self._snapshots[position])
