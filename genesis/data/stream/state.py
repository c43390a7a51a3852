"""The state of a stream's lanes: small, in plain types, and refused by a run with other settings.

The data usage follows from the states alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from genesis.base.errors import UserError
from genesis.data.sources.files import READING
from genesis.data.stream.block import Block, Cursor
from genesis.data.stream.open import Stream
from genesis.data.stream.worker import LaneSource
from genesis.tokenizer.open import has_hash

STATE_VERSIONS: Final = range(1, READING + 1)
"""The versions that are continued: each is the rules by which its run reads files; others lead to other sequences."""


class PartState(NamedTuple):
    """The state of one lane in one source.

    Args:
        cursor: Start of the lane's current block; None when the lane has read all of its part.
        num_given: Number of sequences of the block that were given out.
        num_sequences: Number of sequences given out in total.
        num_tokens: Number of labels of these sequences, without those that were skipped.
        num_documents: Number of documents that begin in the blocks so far, including the current block.
        num_bad_documents: Number of documents skipped in these blocks.
        num_damaged_spans: Number of spans in these blocks whose rest was skipped.
        num_blank_documents: Number of documents dropped in these blocks because they are only white space.
    """

    cursor: Cursor | None = Cursor()
    num_given: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_documents: int = 0
    num_bad_documents: int = 0
    num_damaged_spans: int = 0
    num_blank_documents: int = 0

    def begin(self, block: Block) -> Self:
        """Returns the state at the start of a block, with the block's documents counted."""
        assert self.num_given == 0
        return self._replace(
            num_documents=self.num_documents + block.num_documents,
            num_bad_documents=self.num_bad_documents + block.num_bad_documents,
            num_damaged_spans=self.num_damaged_spans + block.num_damaged_spans,
            num_blank_documents=self.num_blank_documents + block.num_blank_documents,
        )

    def give(self, block: Block, *, is_skipped: bool = False) -> Self:
        """Returns the state after the next sequence of the block; one that is skipped has no tokens."""
        return self._replace(
            num_given=self.num_given + 1,
            num_sequences=self.num_sequences + 1,
            num_tokens=self.num_tokens + (0 if is_skipped else int(block.lengths[self.num_given])),
        )

    def end(self, block: Block) -> Self:
        """Returns the state at the beginning of the next block."""
        return self._replace(cursor=block.next, num_given=0)


LaneStates = dict[LaneSource, PartState]

_REMEDIES: Final = {
    "seed": "set data.seed to the checkpoint's",
    "seq_len": "set data.seq_len to the checkpoint's",
    "packing": "set data.packing to the checkpoint's",
    "block_tokens": "set data.stream.block_tokens to the checkpoint's",
    "num_lanes": "set data.stream.num_lanes to the checkpoint's",
    "tokenizer": "set data.stream.tokenizer to the one of the checkpoint",
    "max_epochs": "set data.max_epochs to the checkpoint's",
    "files": "stream the same files (names and sizes), read in the same way, or start a new run",
}


def write_states(stream: Stream, states: LaneStates) -> dict[str, Any]:
    """Returns the states of some lanes in plain types."""
    lanes: dict[str, dict[str, Any]] = {}
    for key, state in sorted(states.items()):
        cursor = None if state.cursor is None else list(state.cursor)
        lanes.setdefault(str(key.lane), {})[stream.names[key.source]] = {**state._asdict(), "cursor": cursor}
    return {"version": stream.reading, **stream.describe(), "lanes": lanes}


def combine_states(written: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the state of all lanes, combined from the ranks' states."""
    first, *_ = written
    return {**first, "lanes": {lane: parts for state in written for lane, parts in state["lanes"].items()}}


def read_states(stream: Stream, written: Mapping[str, Any]) -> LaneStates:
    """Returns the states of all lanes.

    Raises:
        UserError: The states are of a run with other settings, or the states of some lanes are missing.
    """
    if written["version"] not in STATE_VERSIONS:
        raise UserError(
            f"the checkpoint's stream has version {written['version']}, this genesis reads up to {STATE_VERSIONS[-1]}; "
            "continue with the version of genesis that wrote it"
        )
    here = stream.describe()
    if has_hash(stream.tokenizer, written["tokenizer"]):
        here["tokenizer"] = written["tokenizer"]
    for key, remedy in _REMEDIES.items():
        if written[key] != here[key]:
            found, wanted = _differing(written[key], here[key])
            raise UserError(f"the checkpoint's stream has {key} {found}, but this run has {wanted}; {remedy}")
    missing = [lane for lane in range(stream.num_lanes) if str(lane) not in written["lanes"]]
    if missing:
        raise UserError(
            f"the checkpoint lacks lanes {', '.join(map(str, missing))} of its stream; resume from another checkpoint"
        )
    return {key: _read_part(written["lanes"][str(key.lane)][stream.names[key.source]]) for key in stream.parts}


def _read_part(written: Mapping[str, Any]) -> PartState:
    cursor = None if written["cursor"] is None else Cursor(*written["cursor"])
    return PartState(**{**written, "cursor": cursor})


def _differing(saved: object, here: object) -> tuple[str, str]:
    """Returns the two values for a message; for mappings, their first different entries."""
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for name in dict.fromkeys((*saved, *here)):
            if saved.get(name) != here.get(name):
                return f"{name}: {_short(saved.get(name))}", f"{name}: {_short(here.get(name))}"
    return _short(saved), _short(here)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:16]


class SourceUsage(NamedTuple):
    """The usage of one source by some lanes. Entries of different lanes can be added, field by field.

    Args:
        num_sequences: Number of sequences given out.
        num_tokens: Number of labels of these sequences.
        num_documents: Number of documents started.
        num_bad_documents: Number of documents skipped because they could not be read.
        num_damaged_spans: Number of parts of shards whose rest was skipped.
        num_spans: Number of parts of shards read to their end, counted in every epoch.
        num_blank_documents: Number of documents dropped because they are only white space.
    """

    num_sequences: int
    num_tokens: int
    num_documents: int
    num_bad_documents: int
    num_damaged_spans: int
    num_spans: int
    num_blank_documents: int


def measure_usage(stream: Stream, states: LaneStates) -> dict[str, SourceUsage]:
    """Returns the usage of each source by the lanes of `states`."""
    summed = [name for name in SourceUsage._fields if name != "num_spans"]
    usage = {}
    for index, source in enumerate(stream.names):
        parts = {key: state for key, state in states.items() if key.source == index}
        sums = {name: sum(getattr(state, name) for state in parts.values()) for name in summed}
        num_spans = sum(_count_spans(stream, key, state) for key, state in parts.items())
        usage[source] = SourceUsage(**sums, num_spans=num_spans)
    return usage


def count_spans(stream: Stream) -> dict[str, int]:
    """Returns the number of spans of each source in one epoch."""
    counts = dict.fromkeys(stream.names, 0)
    for part in stream.parts.values():
        counts[part.source.name] += len(part.spans)
    return counts


def _count_spans(stream: Stream, key: LaneSource, state: PartState) -> int:
    part = stream.parts[key]
    if state.cursor is None:
        return len(part.spans) * (part.max_epochs or 0)
    return state.cursor.epoch * len(part.spans) + state.cursor.span
